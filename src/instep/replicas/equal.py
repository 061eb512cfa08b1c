"""Whether two values are the same, for tensors of every kind and through any structure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.structure.tree import attributes_of, open_node


def equal_tensors(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one device hold the same numbers; a NaN equals a NaN."""
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    left, right = left.detach(), right.detach()
    if left.is_nested:
        return all(map(equal_tensors, left.unbind(), right.unbind()))
    if left.layout is torch.sparse_coo:
        left, right = left.coalesce(), right.coalesce()
        return torch.equal(left.indices(), right.indices()) and equal_tensors(left.values(), right.values())
    if left.layout is not torch.strided:
        return equal_tensors(left.to_dense(), right.to_dense())
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def equal(left: Any, right: Any) -> bool:
    """Whether two values that replicas hold are equal; a tensor that needs a gradient equals only itself."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not (left.requires_grad or right.requires_grad) and equal_tensors(left, right.to(left.device))
    if type(left) is not type(right):
        return False
    one, two = open_node(left), open_node(right)
    if one is not None and two is not None:
        return list(one.keys) == list(two.keys) and all(map(equal, one.children, two.children))
    if isinstance(left, (int, float, complex, str, bytes, bool)):
        return left == right or left != left != right
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    if type(left).__eq__ is not object.__eq__:
        return (left == right) is True
    mine, theirs = attributes_of(left), attributes_of(right)
    return bool(mine) and list(mine) == list(theirs) and all(map(equal, mine.values(), theirs.values()))
