"""Many tensors as a few flat ones: for sending parameters to another device and gradients back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from instep.modes import inference
from instep.private import storage_users

BUCKET_BYTES = 64 * 2**20
WORTH_IT = 64 * 2**10
"""Bytes of a gradient from which on new memory for a sum costs more than to ask whether its own can be used."""


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device that travel as one."""

    indices: tuple[int, ...]
    dtype: torch.dtype
    numel: int


def buckets_of(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Dense tensors grouped by dtype and device, in order, up to `limit` bytes a bucket."""
    found: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        filling.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + tensor.numel()
        if sizes[key] * tensor.element_size() >= limit:
            found.append(Bucket(tuple(filling.pop(key)), tensor.dtype, sizes.pop(key)))
    found += [Bucket(tuple(indices), key[0], sizes[key]) for key, indices in filling.items()]
    return found


def pack(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The bucket's tensors as one flat tensor on their device."""
    return torch.cat([tensors[index].detach().reshape(-1) for index in bucket.indices])


def unpack(flat: Tensor, like: Sequence[Tensor], bucket: Bucket) -> list[Tensor]:
    """The tensors of a bucket as views of a flat tensor, in the shapes of `like`."""
    sizes = [like[index].numel() for index in bucket.indices]
    parts = flat.split(sizes)
    return [part.view(like[index].shape) for part, index in zip(parts, bucket.indices, strict=True)]


def send(tensors: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> None:
    """Write the values of `tensors` into each list of counterparts, in flat buckets where devices differ.

    Version counters of the counterparts do not move: a graph that was built on them meets the new values exactly as a
    graph on one device meets a parameter that was changed without notice.
    """
    with torch.no_grad(), inference(False):
        for bucket in buckets_of(tensors):
            flat: Tensor | None = None
            for targets in into:
                mine = [targets[index].data for index in bucket.indices]
                if mine[0].device == tensors[bucket.indices[0]].device:
                    torch._foreach_copy_(mine, [tensors[index].detach() for index in bucket.indices])
                    continue
                if flat is None:
                    flat = pack(tensors, bucket)
                there = flat.to(mine[0].device, non_blocking=mine[0].device.type != "cpu")
                torch._foreach_copy_(mine, unpack(there, tensors, bucket))


def gather(gradients: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Gradients on `device`; those that lie elsewhere travel in flat buckets, sparse ones by themselves."""
    result = list(gradients)
    far = [index for index, g in enumerate(gradients) if g is not None and g.device != device]
    dense = [index for index in far if gradients[index].layout is torch.strided]  # type: ignore[union-attr]
    for index in set(far) - set(dense):
        gradient = gradients[index]
        assert gradient is not None
        result[index] = gradient.to(device)
    tensors = [g for g in (gradients[index] for index in dense) if g is not None]
    for bucket in buckets_of(tensors):
        there = pack(tensors, bucket).to(device, non_blocking=device.type != "cpu")
        for place, value in zip(bucket.indices, unpack(there, tensors, bucket), strict=True):
            result[dense[place]] = value
    return result


def are_alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two gradients are dense and of one dtype."""
    if one is None or other is None or one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return one.dtype == other.dtype


def free_to_use(gradients: Sequence[Tensor | None]) -> set[int]:
    """The places of large gradients, just off a backward, that sums can be made in: nobody else has their memory."""
    return {place for place, gradient in enumerate(gradients) if gradient is not None and _is_free(gradient)}


def add_up(columns: Sequence[Sequence[Tensor | None]], into: Collection[int] = ()) -> list[Tensor | None]:
    """The sum over replicas of each gradient, in the order of the replicas; None where no replica has one.

    No gradient is written to, for autograd may have left one tensor in several places; but for those of the first
    replica that are `into`, in whose memory the sums are made: no new pages have to be had.
    """
    total = list(columns[0])
    own = set(into)  # sums of ours, which later columns may be added into
    if len(columns) > 1 and total and all(all(map(are_alike, total, column)) for column in columns[1:]):
        one, other, *others = (cast(list[Tensor], list(column)) for column in columns)
        summed = _two(one, other, own)
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


def _two(one: list[Tensor], other: list[Tensor], own: Collection[int]) -> list[Tensor]:
    """The sums of two replicas' gradients, all dense."""
    if own:
        torch._foreach_add_([one[place] for place in own], [other[place] for place in own])
    fresh = [place for place in range(len(one)) if place not in own] if own else range(len(one))
    sums = torch._foreach_add([one[place] for place in fresh], [other[place] for place in fresh]) if fresh else ()
    total = list(one)
    for place, value in zip(fresh, sums, strict=True):
        total[place] = value
    return total


def _is_free(gradient: Tensor) -> bool:
    """Whether a gradient is large, nobody else has its memory, and each of its elements has its own."""
    if type(gradient) is not Tensor or gradient.layout is not torch.strided or gradient.nbytes < WORTH_IT:
        return False
    if not gradient.is_contiguous():
        return False
    lazy = gradient.is_conj() or gradient.is_neg()  # nothing is added to such in place
    return not lazy and not gradient.is_inference() and storage_users(gradient) == 1
