"""Compares outputs of parts of a batch with outputs of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from instep.structure.infer import handler_for
from instep.structure.tree import extra_attributes, flatten_one_level, tensors_in


def restore_batch_dim(values: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """A part of one sample that has lost the dim of its batch, with that dim put back, where it can be seen."""
    whole = values[2]
    made = list(values)
    for index, size in enumerate(sizes[:2]):
        part = values[index]
        if size != 1 or part.ndim != whole.ndim - 1:
            continue
        for dim in range(whole.ndim):
            others = (*whole.shape[:dim], *whole.shape[dim + 1 :])
            if whole.shape[dim] == sizes[2] and tuple(part.shape) == others:
                made[index] = part.unsqueeze(dim)
                break
    return made


def to_comparable(value: Tensor) -> Tensor:
    """The same numbers in a type that every operation knows."""
    if value.is_complex():
        return value.to(torch.complex128)
    if value.is_floating_point():
        return value.double() if value.dtype.itemsize > 2 else value.float()
    return value if value.dtype is torch.bool else value.long()


def is_sorted(whole: Tensor) -> bool:
    """Whether a vector is in order, as `torch.unique` or `topk` gives it: parts may follow one another by chance."""
    if whole.ndim != 1 or whole.is_complex():
        return False
    return bool((whole[1:] >= whole[:-1]).all()) or bool((whole[1:] <= whole[:-1]).all())


def is_sorted_list(items: Sequence[Any]) -> bool:
    """Whether a list of words or of numbers is in order, as `sorted` gives it, and they are not all the same."""
    kinds = {type(item) for item in items}
    if len(kinds) != 1 or not kinds <= {str, int, float}:
        return False
    rising = all(one <= two for one, two in pairwise(items))
    return items[0] != items[-1] and (rising or all(one >= two for one, two in pairwise(items)))


def equal_or_nan(left: Tensor, right: Tensor) -> bool:
    """Whether every entry is equal, or NaN in both."""
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def relative_difference(left: Tensor, right: Tensor) -> float:
    """The largest difference relative to the largest entry; NaN and infinities count as equal to themselves."""
    if not left.numel():
        return 0.0
    exact = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(exact), right.to(exact)
    usual = left.isfinite() & right.isfinite()
    odd = (left == right) | (left.isnan() & right.isnan()) | usual
    if not bool(odd.all()):
        return float("inf")
    scale = float(torch.where(usual, right, 0).abs().max())
    difference = float(torch.where(usual, left - right, 0).abs().max())
    return difference / scale if scale else difference


def mismatch_fraction(left: Tensor, right: Tensor) -> float:
    """The share of entries that differ."""
    return float((left != right).double().mean()) if left.numel() else 0.0


def describe_difference(left: Tensor, right: Tensor) -> str:
    """The difference in words, for a message."""
    if left.is_floating_point() or left.is_complex():
        return f" (off by {relative_difference(left, right):.2g} of the largest)"
    return f" ({mismatch_fraction(left, right):.0%} of them differ)"


def differing_attributes(parts: Sequence[Any]) -> list[str]:
    """The attributes beside what parts hold that are not the same for all of them, or are tensors of each."""
    first, *others = [extra_attributes(part) for part in parts]
    names = {name: None for table in (first, *others) for name in table}
    return [name for name in names if not all(_same_attribute(first, table, name) for table in others)]


def _same_attribute(one: dict[str, Any], two: dict[str, Any], name: str) -> bool:
    if name not in one or name not in two:
        return False
    left, right = one[name], two[name]
    if left is right:
        return True
    if any(True for value in (left, right) for _ in tensors_in(value)):
        return False
    try:
        return (left == right) is True
    except Exception:  # values that cannot even be compared are not known to be equal
        return False


def plain_values_equal(left: Any, right: Any) -> bool:
    """Whether what is not a tensor is equal too, where equality is cheap and known to mean it."""
    if isinstance(left, Tensor) or handler_for(left) is not None:
        return type(left) is type(right)
    if isinstance(left, (str, bytes, bool, int)) or left is None:
        return bool(left == right)
    one, two = flatten_one_level(left), flatten_one_level(right)
    if one is None or two is None:
        return type(left) is type(right)
    return list(one.keys) == list(two.keys) and all(map(plain_values_equal, one.children, two.children))
