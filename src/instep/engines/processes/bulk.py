"""Many tensors between shared memory and a device in a few large copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.shore import wait_for
from instep.modes import inference
from instep.reduce import BUCKET_BYTES

_GAP = 64
"""Bytes at most between neighbours."""


class Piece(NamedTuple):
    """A tensor of a device, and where in shared memory its values are kept."""

    offset: int
    tensor: Tensor

    @property
    def end(self) -> int:
        return self.offset + self.tensor.nbytes


def to_host(memory: SharedMemory, pieces: Sequence[Piece]) -> None:
    """Write tensors' values into shared memory; they are there when this returns."""
    if not pieces:
        return
    device = pieces[0].tensor.device
    memory.pin(device)
    with torch.no_grad(), inference(False):
        for run in runs(pieces):
            first, last = run[0], run[-1]
            there = memory.tensor(first.offset, last.end - first.offset)
            if len(run) == 1:
                part_of(there, 0, first.tensor).copy_(first.tensor.detach(), non_blocking=True)
                continue
            flat = torch.empty(there.numel(), dtype=torch.uint8, device=device)
            tensors = [piece.tensor.detach() for piece in run]
            torch._foreach_copy_([part_of(flat, p.offset - first.offset, p.tensor) for p in run], tensors)
            there.copy_(flat, non_blocking=True)
    wait_for(device)


def to_device(memory: SharedMemory, pieces: Sequence[Piece]) -> None:
    """Write what shared memory holds into tensors of a device; it has been read when this returns."""
    if not pieces:
        return
    device = pieces[0].tensor.device
    memory.pin(device)
    with torch.no_grad(), inference(False):
        for run in runs(pieces):
            first, last = run[0], run[-1]
            there = memory.tensor(first.offset, last.end - first.offset)
            if len(run) == 1:
                first.tensor.detach().copy_(part_of(there, 0, first.tensor), non_blocking=True)
                continue
            flat = there.to(device, non_blocking=True)
            tensors = [piece.tensor.detach() for piece in run]
            torch._foreach_copy_(tensors, [part_of(flat, p.offset - first.offset, p.tensor) for p in run])
    wait_for(device)


def fetch(memory: SharedMemory, places: Sequence[tuple[int, Tensor]], device: torch.device) -> list[Tensor]:
    """New tensors on a device with what lies at places of shared memory, each in the shape of a tensor there."""
    found: dict[int, Tensor] = {}
    memory.pin(device)
    for run in runs([Piece(offset, like) for offset, like in places]):
        first, last = run[0], run[-1]
        flat = memory.tensor(first.offset, last.end - first.offset).to(device, non_blocking=True)
        found.update((p.offset, part_of(flat, p.offset - first.offset, p.tensor)) for p in run)
    wait_for(device)
    return [found[offset] if like.numel() else torch.empty_like(like, device=device) for offset, like in places]


def part_of(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """A part of some bytes, as a tensor like another."""
    return flat.narrow(0, offset, like.nbytes).view(like.dtype).view(like.shape)


def runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours in memory that travel together, up to a size; those without numbers stay at home."""
    run: list[Piece] = []
    for piece in sorted((p for p in pieces if p.tensor.numel()), key=lambda p: p.offset):
        if run and (piece.offset - run[-1].end > _GAP or piece.end - run[0].offset > BUCKET_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
