"""Functions to compare the outputs of parts of a batch with those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from instep.structure.tree import extra_attributes, flatten_one_level, tensors_in
from instep.structure.types_torch import handler_for


def restore_batch_dim(values: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """Unsqueeze the batch dim of parts of one sample that have lost it, if the shape of the whole shows which it is."""
    whole = values[2]
    restored = list(values)
    for index, size in enumerate(sizes[:2]):
        part = values[index]
        if size != 1 or part.ndim != whole.ndim - 1:
            continue
        for dim in range(whole.ndim):
            sample_shape = (*whole.shape[:dim], *whole.shape[dim + 1 :])
            if whole.shape[dim] == sizes[2] and tuple(part.shape) == sample_shape:
                restored[index] = part.unsqueeze(dim)
                break
    return restored


def to_comparable(value: Tensor) -> Tensor:
    """Convert to a dtype that all operations support."""
    if value.is_complex():
        return value.to(torch.complex128)
    if value.is_floating_point():
        return value.double() if value.dtype.itemsize > 2 else value.float()
    return value if value.dtype is torch.bool else value.long()


def is_sorted(whole: Tensor) -> bool:
    """Whether a 1-d tensor is sorted, as from `torch.unique` or `topk`.

    The sorted parts of such a tensor may concatenate to the whole by chance.
    """
    if whole.ndim != 1 or whole.is_complex():
        return False
    return bool((whole[1:] >= whole[:-1]).all()) or bool((whole[1:] <= whole[:-1]).all())


def is_sorted_list(items: Sequence[Any]) -> bool:
    """Whether a list of strings or numbers is sorted and its entries are not all equal."""
    types = {type(item) for item in items}
    if len(types) != 1 or not types <= {str, int, float}:
        return False
    ascending = all(left <= right for left, right in pairwise(items))
    return items[0] != items[-1] and (ascending or all(left >= right for left, right in pairwise(items)))


def equal_or_nan(left: Tensor, right: Tensor) -> bool:
    """Whether all entries are equal; NaN equals NaN."""
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def relative_difference(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference divided by the largest entry of `right`. NaN and infinities equal themselves."""
    if not left.numel():
        return 0.0
    dtype = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(dtype), right.to(dtype)
    finite = left.isfinite() & right.isfinite()
    comparable = (left == right) | (left.isnan() & right.isnan()) | finite
    if not bool(comparable.all()):
        return float("inf")
    scale = float(torch.where(finite, right, 0).abs().max())
    difference = float(torch.where(finite, left - right, 0).abs().max())
    return difference / scale if scale else difference


def mismatch_fraction(left: Tensor, right: Tensor) -> float:
    """The fraction of entries that differ."""
    return float((left != right).double().mean()) if left.numel() else 0.0


def describe_difference(left: Tensor, right: Tensor) -> str:
    """The difference as text for an error message."""
    if left.is_floating_point() or left.is_complex():
        return f" (off by {relative_difference(left, right):.2g} of the largest)"
    return f" ({mismatch_fraction(left, right):.0%} of them differ)"


def differing_attributes(parts: Sequence[Any]) -> list[str]:
    """Names of extra attributes that differ between parts, or that hold different tensor objects."""
    first, *others = [extra_attributes(part) for part in parts]
    names = {name: None for table in (first, *others) for name in table}
    return [name for name in names if not all(_same_attribute(first, table, name) for table in others)]


def _same_attribute(left_attributes: dict[str, Any], right_attributes: dict[str, Any], name: str) -> bool:
    if name not in left_attributes or name not in right_attributes:
        return False
    left, right = left_attributes[name], right_attributes[name]
    if left is right:
        return True
    if any(True for value in (left, right) for _ in tensors_in(value)):
        return False
    try:
        return (left == right) is True
    except Exception:  # values that cannot be compared are treated as different
        return False


def plain_values_equal(left: Any, right: Any) -> bool:
    """Whether the strings, integers, keys and None in two structures are equal. Other leaves are compared by type."""
    if isinstance(left, Tensor) or handler_for(left) is not None:
        return type(left) is type(right)
    if isinstance(left, (str, bytes, bool, int)) or left is None:
        return bool(left == right)
    left_node, right_node = flatten_one_level(left), flatten_one_level(right)
    if left_node is None or right_node is None:
        return type(left) is type(right)
    return list(left_node.keys) == list(right_node.keys) and all(
        map(plain_values_equal, left_node.children, right_node.children)
    )
