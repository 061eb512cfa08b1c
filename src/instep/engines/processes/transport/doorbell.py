"""Signals by eventfd which chunks of large gradients are ready in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from instep.engines.processes.transport.shared_memory import SharedMemory

MIN_GRADIENT_BYTES = 256 * 1024
"""Bytes of a gradient below which adding it up takes no longer than speaking of it."""
CHUNK_BYTES = 1 << 20
"""Bytes of a stretch."""
_ENTRY_BYTES = 8
"""Bytes of a number on the board."""


class GradientChunk(NamedTuple):
    """A part of one tensor's gradient, as it lies in memory."""

    tensor_index: int
    """The tensor's, in the table."""
    start: int
    """In elements."""
    stop: int


def gradient_chunks(tensors: Iterable[tuple[int, Tensor]]) -> list[GradientChunk]:
    """The stretches of the larger ones among tensors with their numbers; each is known by its place in the list."""
    found = []
    for number, tensor in tensors:
        count, length = tensor.numel(), max(1, CHUNK_BYTES // tensor.element_size())
        if count * tensor.element_size() >= MIN_GRADIENT_BYTES:
            found += [GradientChunk(number, at, min(at + length, count)) for at in range(0, count, length)]
    return found


def ready_list_bytes(cut: list[GradientChunk]) -> int:
    """The bytes of a board for these."""
    return _ENTRY_BYTES * len(cut)


class Doorbell:
    """One end of the doorbell. It owns its eventfd; the list of ready chunks follows the gradient slots in memory."""

    def __init__(self, fd: int, memory: SharedMemory, cut: list[GradientChunk]) -> None:
        self.fd = fd
        self._chunks = cut
        self.chunks_by_tensor: dict[int, list[GradientChunk]] = {}
        """By the number of a tensor: its stretches."""
        for stretch in cut:
            self.chunks_by_tensor.setdefault(stretch.tensor_index, []).append(stretch)
        self._ready_list = memory.view()[memory.nbytes - ready_list_bytes(cut) : memory.nbytes].cast("Q")
        self._position = 0
        self.backward_id = 0
        """The number of the backward that rings; 0 while that is not sure."""
        self._unfinished_id = 0
        """The number of one whose answer was not heard: it may still ring."""

    def __del__(self) -> None:
        os.close(self.fd)

    def reset(self) -> None:
        """Start a backward."""
        self._position = 0

    def ring(self, place: int) -> None:
        """Signal that a chunk is ready in its slot."""
        self._ready_list[self._position] = place
        self._position += 1
        os.eventfd_write(self.fd, 1)

    def expect(self, number: int, heard: int) -> None:
        """A backward with a number is going to be asked for; `heard` is what the worker was last heard to work on.

        One that was interrupted may still ring, until something is heard that the worker was asked for later.
        """
        quiet = not self._unfinished_id or self._unfinished_id < heard
        self._unfinished_id, self.backward_id = number, number if quiet else 0
        if quiet:
            self.poll()
            self.reset()

    def finish(self) -> None:
        """The reply was received: the worker rings no more."""
        self._unfinished_id = self.backward_id = 0

    def poll(self) -> list[GradientChunk]:
        """The chunks that became ready since the last call."""
        try:
            count = os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        before, self._position = self._position, self._position + count
        return [self._chunks[place] for place in self._ready_list[before : self._position]]


def make_doorbell(memory: SharedMemory, cut: list[GradientChunk]) -> Doorbell:
    """A new doorbell for the gradient slots in `memory`."""
    return Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), memory, cut)
