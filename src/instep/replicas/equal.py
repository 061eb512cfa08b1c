"""Whether two values are the same, for tensors of every kind and through any structure."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.replicas.contents import beside
from instep.replicas.opaque import is_opaque
from instep.structure.tree import attributes_of, open_node


def equal_tensors(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one device hold the same numbers; a NaN equals a NaN."""
    if left.is_nested != right.is_nested or left.layout != right.layout:
        return False
    if left.is_nested:
        one, two = left.detach().unbind(), right.detach().unbind()
        return len(one) == len(two) and all(map(equal_tensors, one, two))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.layout is torch.sparse_coo:
        left, right = left.detach().coalesce(), right.detach().coalesce()
        return torch.equal(left.indices(), right.indices()) and equal_tensors(left.values(), right.values())
    if left.layout is not torch.strided:
        return equal_tensors(left.detach().to_dense(), right.detach().to_dense())
    if torch.equal(left, right):
        return True
    if torch.equal(left, left):  # there is no NaN in it
        return False
    left, right = left.detach(), right.detach()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


_DEEPEST = 20


def equal(left: Any, right: Any, depth: int = 0) -> bool:
    """Whether two values that replicas hold are equal; a tensor that needs a gradient equals only itself."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not (left.requires_grad or right.requires_grad) and equal_tensors(left, right.to(left.device))
    if type(left) is not type(right):
        return False
    one, two = open_node(left), open_node(right)
    if one is not None and two is not None:
        same = list(one.keys) == list(two.keys) and all(map(equal, one.children, two.children))
        return same and equal(beside(left), beside(right), depth + 1)
    if isinstance(left, (int, float, complex, str, bytes, bool)):
        same = bool(left == right or left != left != right)
        return same and (is_opaque(left) or equal(attributes_of(left), attributes_of(right), depth + 1))
    if isinstance(left, weakref.ref):
        return left() is right()
    if isinstance(left, deque):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    comparison: Any = type(left).__eq__
    if comparison is not object.__eq__:
        try:
            return (left == right) is True
        except Exception:  # values that cannot even be compared are not known to be equal
            return False
    if depth > _DEEPEST:
        return False
    mine, theirs = attributes_of(left), attributes_of(right)
    pairs = zip(mine.values(), theirs.values(), strict=False)
    return bool(mine) and list(mine) == list(theirs) and all(equal(one, two, depth + 1) for one, two in pairs)
