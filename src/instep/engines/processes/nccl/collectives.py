"""Coalesced broadcast and reduce of many tensors over an NCCL group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from instep.devices import Bucket
from instep.engines.processes.nccl.group import NcclGroup
from instep.engines.processes.transport.copy_streams import StagedTensor, contiguous_runs, view_like
from instep.runtime.modes import set_inference_mode

REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes of gradients that a group reduces."""


def broadcast_coalesced(
    group: NcclGroup,
    tensors_to_send: Sequence[StagedTensor],
    find_memory: Callable[[Sequence[StagedTensor]], Tensor | None] = lambda _: None,
) -> None:
    """Broadcast tensors from rank 0. They have the same offsets on every member.

    `find_memory` returns the memory of neighbouring tensors, as bytes, if they are neighbours in this process too.
    Otherwise they are copied.
    """
    with torch.no_grad(), set_inference_mode(False):
        for run in contiguous_runs(tensors_to_send):
            tensors = [staged.tensor for staged in run]
            memory = find_memory(run)
            if memory is None and len(run) == 1 and tensors[0].is_contiguous():
                memory = tensors[0]
            if memory is not None:
                group.broadcast(memory)
                continue
            start = run[0].offset
            flat = torch.empty(run[-1].end - start, dtype=torch.uint8, device=group.device)
            parts = [view_like(flat, staged.offset - start, staged.tensor) for staged in run]
            if group.rank == 0:
                torch._foreach_copy_(parts, tensors)
            group.broadcast(flat)
            if group.rank:
                torch._foreach_copy_(tensors, parts)


def reduce_coalesced(
    group: NcclGroup, buckets: Sequence[Bucket], sizes: Sequence[int], gradients: Mapping[int, Tensor]
) -> list[Tensor]:
    """Sum gradients to rank 0, bucket by bucket. Returns the flat buckets.

    `gradients` are this member's, by index; a missing one counts as zero.

    A member's part is complete when it has sent its data, perhaps before rank 0 has received them. So rank 0 broadcasts
    a word at the end: members that have received it know that the sums are complete.
    """
    sums = []
    with torch.no_grad(), set_inference_mode(False):
        for bucket in buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=group.device)
            parts = dict(zip(bucket.indices, flat.split([sizes[i] for i in bucket.indices]), strict=True))
            present = [index for index in bucket.indices if index in gradients]
            if present:
                torch._foreach_copy_([parts[i] for i in present], [gradients[i].detach().reshape(-1) for i in present])
            group.reduce(flat)
            sums.append(flat)
        group.broadcast(torch.zeros(1, dtype=torch.uint8, device=group.device))
    return sums
