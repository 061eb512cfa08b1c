"""Signals by eventfd which chunks of large gradients are ready in shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from instep.engines.processes.transport.shared_memory import SharedMemory

MIN_GRADIENT_BYTES = 256 * 1024
"""Minimum size of a gradient that is signalled. For smaller ones signalling takes longer than adding them."""
CHUNK_BYTES = 1 << 20
"""Size of a chunk."""
_ENTRY_BYTES = 8
"""Size of an entry of the ready list."""


class GradientChunk(NamedTuple):
    """A part of one tensor's gradient, as it lies in memory."""

    tensor_index: int
    """Index in the tensor table."""
    start: int
    """First element."""
    stop: int


def gradient_chunks(tensors: Iterable[tuple[int, Tensor]]) -> list[GradientChunk]:
    """Cut the large ones of the given tensors, with their indices, into chunks. Both ends compute the same list."""
    chunks = []
    for index, tensor in tensors:
        numel, length = tensor.numel(), max(1, CHUNK_BYTES // tensor.element_size())
        if numel * tensor.element_size() >= MIN_GRADIENT_BYTES:
            chunks += [GradientChunk(index, start, min(start + length, numel)) for start in range(0, numel, length)]
    return chunks


def ready_list_bytes(chunks: list[GradientChunk]) -> int:
    """Size of the ready list for these chunks."""
    return _ENTRY_BYTES * len(chunks)


class Doorbell:
    """One end of the doorbell. It owns its eventfd.

    The ready list is at the end of the memory, after the gradient slots. The worker appends the index of each chunk
    that is ready and increments the eventfd; the parent reads that many entries.
    """

    def __init__(self, fd: int, memory: SharedMemory, chunks: list[GradientChunk]) -> None:
        self.fd = fd
        self._chunks = chunks
        self.chunks_by_tensor: dict[int, list[GradientChunk]] = {}
        for chunk in chunks:
            self.chunks_by_tensor.setdefault(chunk.tensor_index, []).append(chunk)
        self._ready_list = memory.view()[memory.nbytes - ready_list_bytes(chunks) : memory.nbytes].cast("Q")
        self._position = 0
        self.backward_id = 0
        """Id of the backward that rings; 0 if an earlier one may still ring."""
        self._unfinished_id = 0
        """Id of the last backward without a reply: it may still ring."""

    def __del__(self) -> None:
        os.close(self.fd)

    def reset(self) -> None:
        """Start a backward."""
        self._position = 0

    def ring(self, chunk_index: int) -> None:
        """Signal that a chunk is ready in its slot."""
        self._ready_list[self._position] = chunk_index
        self._position += 1
        os.eventfd_write(self.fd, 1)

    def expect(self, backward_id: int, last_received_id: int) -> None:
        """Prepare for a backward. `last_received_id` is the latest request that the worker has sent a message for.

        A backward that was interrupted may ring until the worker sends a message for a later request.
        """
        is_quiet = not self._unfinished_id or self._unfinished_id < last_received_id
        self._unfinished_id, self.backward_id = backward_id, backward_id if is_quiet else 0
        if is_quiet:
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
        return [self._chunks[index] for index in self._ready_list[before : self._position]]


def make_doorbell(memory: SharedMemory, chunks: list[GradientChunk]) -> Doorbell:
    """A new doorbell for the gradient slots in `memory`."""
    return Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), memory, chunks)
