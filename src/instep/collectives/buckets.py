"""Buckets of gradients, and summing and moving gradients in flat buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import repeat
from operator import is_not
from typing import cast

import torch
from torch import Tensor

from instep.devices import Bucket, make_buckets, pack, unpack
from instep.runtime.torch_private import storage_use_count
from instep.structure.shapes import is_dense

MIN_REUSE_BYTES = 64 * 2**10
"""Gradients of at least this many bytes are checked for whether their memory can hold the sum."""


REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes of gradients that are reduced in the buckets of `gradient_buckets`."""

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that its reduction starts early, as in DistributedDataParallel."""
BUCKET_BYTES = 25 * 2**20


def gradient_buckets(leaves: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """The buckets of the leaves' gradients, from the last leaf to the first, as a backward usually computes them.

    All members form the same buckets, because these depend on sizes and dtypes only. A leaf whose gradient cannot be
    reduced is in no bucket.
    """
    return _make_buckets(
        tuple(
            (leaf.numel(), leaf.dtype) if leaf.dtype in REDUCIBLE_DTYPES and is_dense(leaf) else None for leaf in leaves
        )
    )


@lru_cache(maxsize=64)
def _make_buckets(leaves: tuple[tuple[int, torch.dtype] | None, ...]) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for index, leaf in reversed(list(enumerate(leaves))):
        if leaf is None:
            continue
        numel, dtype = leaf
        indices, filled = filling.pop(dtype, ([], 0))
        indices.append(index)
        filled += numel
        if filled * dtype.itemsize >= (BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES):
            buckets.append(Bucket(tuple(indices), dtype, filled))
        else:
            filling[dtype] = indices, filled
    buckets += [Bucket(tuple(indices), dtype, numel) for dtype, (indices, numel) in filling.items()]
    return tuple(buckets)


def gather_gradients(gradients: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Copy gradients to `device`; dense ones in flat buckets, sparse ones one by one."""
    result = list(gradients)
    dense: list[tuple[int, Tensor]] = []
    for index, gradient in enumerate(gradients):
        if gradient is None or gradient.device == device:
            continue
        if gradient.layout is torch.strided:
            dense.append((index, gradient))
        else:
            result[index] = gradient.to(device)
    tensors = [gradient for _, gradient in dense]
    for bucket in make_buckets(tensors):
        flat = pack(tensors, bucket).to(device, non_blocking=device.type != "cpu")
        for position, value in zip(bucket.indices, unpack(flat, tensors, bucket), strict=True):
            result[dense[position][0]] = value
    return result


def all_present(gradients: Sequence[Tensor | None]) -> bool:
    """Whether no gradient is None."""
    return all(map(is_not, gradients, repeat(None)))


def _are_dense_pairs(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    """Whether all gradients of two replicas are `is_dense_pair`."""
    if not (all_present(first) and all_present(second)):
        return False
    ones, others = cast(Sequence[Tensor], first), cast(Sequence[Tensor], second)
    return (
        [one.dtype for one in ones] == [other.dtype for other in others]
        and {one.layout for one in ones} <= _STRIDED
        and {other.layout for other in others} <= _STRIDED
    )


_STRIDED = frozenset({torch.strided})


def is_dense_pair(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are dense and have the same dtype."""
    if one is None or other is None or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.dtype == other.dtype


def reusable_gradients(gradients: Sequence[Tensor | None]) -> set[int]:
    """The indices of large gradients whose memory nothing else uses, so that sums can be written to it."""
    return {
        index
        for index, gradient in enumerate(gradients)
        if gradient is not None
        and gradient.layout is torch.strided
        and gradient.nbytes >= MIN_REUSE_BYTES
        and _is_reusable(gradient)
    }


def are_reusable(gradients: Sequence[Tensor | None]) -> bool:
    """Whether nothing else uses the memory of any of these accumulated gradients, small ones included."""
    return all(g is not None and g.layout is torch.strided and _is_reusable(g) for g in gradients)


def sum_gradients(columns: Sequence[Sequence[Tensor | None]], into: Collection[int] = ()) -> list[Tensor | None]:
    """Sum each gradient over the replicas, in the order of the replicas; None if no replica has it.

    Gradients are not written to, because autograd may use one tensor in several places. Only for the indices in `into`
    is the sum written to the first replica's gradient, which saves an allocation.
    """
    total = list(columns[0])
    writable = set(into)  # indices whose sum may be added to in place
    if len(columns) > 1 and total and all(_are_dense_pairs(total, column) for column in columns[1:]):
        first, second, *others = cast(Sequence[list[Tensor]], [list(column) for column in columns])
        sums = _sum_two(first, second, writable)
        for other in others:
            torch._foreach_add_(sums, other)
        return list(sums)
    for column in columns[1:]:
        dense: list[tuple[int, Tensor, Tensor]] = []
        for index, gradient in enumerate(column):
            partial_sum = total[index]
            if gradient is None:
                continue
            if partial_sum is None:
                total[index] = gradient
            elif is_dense_pair(partial_sum, gradient):
                dense.append((index, partial_sum, gradient))
            else:
                is_strided = partial_sum.layout is torch.strided
                total[index] = partial_sum + gradient if is_strided else gradient + partial_sum
        in_place = [entry for entry in dense if entry[0] in writable]
        if in_place:
            torch._foreach_add_([entry[1] for entry in in_place], [entry[2] for entry in in_place])
        new = [entry for entry in dense if entry[0] not in writable]
        if new:
            values = torch._foreach_add([entry[1] for entry in new], [entry[2] for entry in new])
            for (index, _, _), value in zip(new, values, strict=True):
                total[index] = value
                writable.add(index)
    return total


def _sum_two(first: list[Tensor], second: list[Tensor], writable: Collection[int]) -> list[Tensor]:
    """Sum two replicas' dense gradients."""
    if writable:
        torch._foreach_add_([first[i] for i in writable], [second[i] for i in writable])
    new = [i for i in range(len(first)) if i not in writable] if writable else range(len(first))
    sums = torch._foreach_add([first[i] for i in new], [second[i] for i in new]) if new else ()
    if not writable:
        return list(sums)
    total = list(first)
    for i, value in zip(new, sums, strict=True):
        total[i] = value
    return total


def _is_reusable(gradient: Tensor) -> bool:
    """Whether a strided gradient is contiguous, and the only user of its memory."""
    if type(gradient) is not Tensor or not gradient.is_contiguous() or storage_use_count(gradient) != 1:
        return False
    # In-place addition does not support lazy conjugation and negation.
    return not (gradient.is_inference() or gradient.is_conj() or gradient.is_neg())
