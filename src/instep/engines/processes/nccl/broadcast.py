"""Coalesced broadcast of many tensors over an NCCL group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from instep.engines.processes.nccl.group import NcclGroup
from instep.engines.processes.transport.copy_streams import StagedTensor, contiguous_runs, view_like
from instep.runtime.modes import set_inference_mode


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
