"""Large gradients in stretches: a worker says of each when it lies in its slot, while it still works on the others.

It writes the number of the stretch on a board behind the slots and rings the bell, an eventfd. Whoever has heard the
bell so many times may read as many numbers from the board, and the stretches that they stand for: the kernel's counter
orders the memory of both processes, on every kind of processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from instep.engines.processes.arena import SharedMemory

LEAST = 256 * 1024
"""Bytes of a gradient below which adding it up takes no longer than speaking of it."""
LENGTH = 1 << 20
"""Bytes of a stretch."""
_ENTRY = 8
"""Bytes of a number on the board."""


class Stretch(NamedTuple):
    """A part of one tensor's gradient, as it lies in memory."""

    number: int
    """The tensor's, in the table."""
    start: int
    """In elements."""
    stop: int


def stretches(tensors: Iterable[tuple[int, Tensor]]) -> list[Stretch]:
    """The stretches of the larger ones among tensors with their numbers; each is known by its place in the list."""
    found = []
    for number, tensor in tensors:
        count, length = tensor.numel(), max(1, LENGTH // tensor.element_size())
        if count * tensor.element_size() >= LEAST:
            found += [Stretch(number, at, min(at + length, count)) for at in range(0, count, length)]
    return found


def board_bytes(cut: list[Stretch]) -> int:
    """The bytes of a board for these."""
    return _ENTRY * len(cut)


class Bell:
    """One end of the bell. It owns its descriptor; the board is the end of the memory of the slots."""

    def __init__(self, fd: int, memory: SharedMemory, cut: list[Stretch]) -> None:
        self.fd = fd
        self._cut = cut
        self.spans: dict[int, list[Stretch]] = {}
        """By the number of a tensor: its stretches."""
        for stretch in cut:
            self.spans.setdefault(stretch.number, []).append(stretch)
        self._board = memory.view()[memory.nbytes - board_bytes(cut) : memory.nbytes].cast("Q")
        self._at = 0
        self.about = 0
        """The number of the backward that rings; 0 while that is not sure."""
        self._unfinished = 0
        """The number of one whose answer was not heard: it may still ring."""

    def __del__(self) -> None:
        os.close(self.fd)

    def begin(self) -> None:
        """A backward begins here; nothing of an earlier one is left."""
        self._at = 0

    def ring(self, place: int) -> None:
        """A stretch lies in its slot."""
        self._board[self._at] = place
        self._at += 1
        os.eventfd_write(self.fd, 1)

    def listen(self, number: int, heard: int) -> None:
        """A backward with a number is going to be asked for; `heard` is what the worker was last heard to work on.

        One that was interrupted may still ring, until something is heard that the worker was asked for later.
        """
        quiet = not self._unfinished or self._unfinished < heard
        self._unfinished, self.about = number, number if quiet else 0
        if quiet:
            self.heard()
            self.begin()

    def end(self) -> None:
        """The answer was heard: it does not ring any longer."""
        self._unfinished = self.about = 0

    def heard(self) -> list[Stretch]:
        """The stretches that came to lie in the slots since this was last asked."""
        try:
            count = os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        before, self._at = self._at, self._at + count
        return [self._cut[place] for place in self._board[before : self._at]]


def new_bell(memory: SharedMemory, cut: list[Stretch]) -> Bell:
    """A bell for slots that no other one is for."""
    return Bell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), memory, cut)
