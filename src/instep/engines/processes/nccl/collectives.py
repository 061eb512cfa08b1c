"""Coalesced broadcast and reduce of many tensors over an NCCL group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.devices import Bucket
from instep.engines.processes.nccl.group import NcclGroup
from instep.engines.processes.transport.copy_streams import StagedTensor, contiguous_runs, view_like
from instep.runtime.modes import set_inference_mode

REDUCIBLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes of gradients that are summed in a group."""


def broadcast_coalesced(group: NcclGroup, pieces: Sequence[StagedTensor]) -> None:
    """Every member's pieces get the values of the first one's; all have them at the same offsets."""
    with torch.no_grad(), set_inference_mode(False):
        for run in contiguous_runs(pieces):
            tensors = [piece.tensor for piece in run]
            if len(run) == 1 and tensors[0].is_contiguous():
                group.broadcast(tensors[0])
                continue
            start = run[0].offset
            flat = torch.empty(run[-1].end - start, dtype=torch.uint8, device=group.device)
            parts = [view_like(flat, piece.offset - start, piece.tensor) for piece in run]
            if group.rank == 0:
                torch._foreach_copy_(parts, tensors)
            group.broadcast(flat)
            if group.rank:
                torch._foreach_copy_(tensors, parts)


def reduce_coalesced(
    group: NcclGroup, buckets: Sequence[Bucket], sizes: Sequence[int], have: Mapping[int, Tensor]
) -> list[Tensor]:
    """The sum of every member's tensors, bucket by bucket, which the first member gets.

    `have` are this member's, by their indices in the buckets; those that it does not have count as zero.
    """
    sums = []
    with torch.no_grad(), set_inference_mode(False):
        for bucket in buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=group.device)
            parts = dict(zip(bucket.indices, flat.split([sizes[i] for i in bucket.indices]), strict=True))
            mine = [index for index in bucket.indices if index in have]
            if mine:
                torch._foreach_copy_([parts[i] for i in mine], [have[i].detach().reshape(-1) for i in mine])
            group.reduce(flat)
            sums.append(flat)
    return sums
