"""Summing and moving gradients in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from instep.devices import make_buckets, pack, unpack
from instep.runtime.torch_private import storage_use_count

MIN_REUSE_BYTES = 64 * 2**10
"""Gradients of at least this many bytes are checked for whether their memory can hold the sum."""


def gather_gradients(gradients: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Copy gradients to `device`; dense ones in flat buckets, sparse ones one by one."""
    result = list(gradients)
    far = [index for index, g in enumerate(gradients) if g is not None and g.device != device]
    dense = [index for index in far if gradients[index].layout is torch.strided]  # type: ignore[union-attr]
    for index in set(far) - set(dense):
        gradient = gradients[index]
        assert gradient is not None
        result[index] = gradient.to(device)
    tensors = [g for g in (gradients[index] for index in dense) if g is not None]
    for bucket in make_buckets(tensors):
        there = pack(tensors, bucket).to(device, non_blocking=device.type != "cpu")
        for place, value in zip(bucket.indices, unpack(there, tensors, bucket), strict=True):
            result[dense[place]] = value
    return result


def is_dense_pair(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are dense and have the same dtype."""
    if one is None or other is None or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.dtype == other.dtype


def reusable_gradients(gradients: Sequence[Tensor | None]) -> set[int]:
    """The indices of large gradients whose memory nothing else uses, so that sums can be written to it."""
    return {place for place, gradient in enumerate(gradients) if gradient is not None and _is_reusable(gradient)}


def sum_gradients(columns: Sequence[Sequence[Tensor | None]], into: Collection[int] = ()) -> list[Tensor | None]:
    """Sum each gradient over the replicas, in the order of the replicas; None if no replica has it.

    Gradients are not written to, because autograd may use one tensor in several places. Only for the indices in `into`
    is the sum written to the first replica's gradient, which saves an allocation.
    """
    total = list(columns[0])
    own = set(into)  # own sums, to which later columns may be added in place
    if len(columns) > 1 and total and all(all(map(is_dense_pair, total, column)) for column in columns[1:]):
        one, other, *others = (cast(list[Tensor], list(column)) for column in columns)
        summed = _sum_two(one, other, own)
        for more in others:
            torch._foreach_add_(summed, more)
        return list(summed)
    for column in columns[1:]:
        dense: list[tuple[int, Tensor, Tensor]] = []
        for index, gradient in enumerate(column):
            held = total[index]
            if gradient is None:
                continue
            if held is None:
                total[index] = gradient
            elif held.layout is torch.strided and gradient.layout is torch.strided and held.dtype == gradient.dtype:
                dense.append((index, held, gradient))
            else:
                total[index] = held + gradient if held.layout is torch.strided else gradient + held
        again = [(held, gradient) for index, held, gradient in dense if index in own]
        fresh = [entry for entry in dense if entry[0] not in own]
        if again:
            torch._foreach_add_([held for held, _ in again], [gradient for _, gradient in again])
        if fresh:
            sums = torch._foreach_add([held for _, held, _ in fresh], [gradient for _, _, gradient in fresh])
            for (index, _, _), value in zip(fresh, sums, strict=True):
                total[index] = value
                own.add(index)
    return total


def _sum_two(one: list[Tensor], other: list[Tensor], own: Collection[int]) -> list[Tensor]:
    """Sum two replicas' dense gradients."""
    if own:
        torch._foreach_add_([one[place] for place in own], [other[place] for place in own])
    fresh = [place for place in range(len(one)) if place not in own] if own else range(len(one))
    sums = torch._foreach_add([one[place] for place in fresh], [other[place] for place in fresh]) if fresh else ()
    total = list(one)
    for place, value in zip(fresh, sums, strict=True):
        total[place] = value
    return total


def _is_reusable(gradient: Tensor) -> bool:
    """Whether a gradient is large, contiguous, and the only user of its memory."""
    if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.nbytes < MIN_REUSE_BYTES:
        return False
    if not gradient.is_contiguous():
        return False
    lazy = gradient.is_conj() or gradient.is_neg()  # in-place addition is not supported
    return not lazy and not gradient.is_inference() and storage_use_count(gradient) == 1
