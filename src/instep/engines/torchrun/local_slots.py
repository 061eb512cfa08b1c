"""All-gather of short messages between the ranks of one machine, through memory that all of them map.

Gloo passes a message through several threads and sockets, which takes about a millisecond while the CPUs compute.

Every rank has a number and two slots. To take part it writes its message to a slot, then the number of the exchange,
and waits until the other ranks have that number. Two slots are enough: a rank that reaches exchange n + 2 has seen
every other rank reach n + 1, i.e. finish reading n.
"""

from __future__ import annotations

import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from instep.engines.torchrun.local_memory import CACHE_LINE
from instep.runtime.affinity import spin_seconds
from instep.runtime.shared_wait import MemoryFence, wait_until

SLOT_BYTES = 2**15
"""The largest message."""


class ExchangeFailed(RuntimeError):
    """A rank has ended, has given up, or did not arrive in time."""


class LocalSlots:
    """The slots of the ranks of one machine."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        count: int,
        pids: Sequence[int],
        timeout: float,
        *,
        on_accelerator: bool = False,
    ) -> None:
        """
        Args:
            memory: Memory of `nbytes(count)` bytes that all ranks map.
            rank: This rank.
            count: The number of ranks.
            pids: The process of each rank. Raises `OSError` if its exit cannot be noticed.
            timeout: Seconds to wait for the other ranks.
            on_accelerator: Whether the ranks compute on accelerators, so that their CPUs have time to spin.
        """
        self._rank, self._timeout = rank, timeout
        words = CACHE_LINE // 8
        numbers = np.frombuffer(memory, np.int64, (count + 1) * words).reshape(count + 1, words)[:, 0]
        self._numbers = memoryview(numbers)  # type: ignore[arg-type]
        """The number that each rank has reached, and then whether a rank has given up."""
        self._given_up = count
        self.peers = [peer for peer in range(count) if peer != rank]
        starts = range((count + 1) * CACHE_LINE, self.nbytes(count), SLOT_BYTES)
        slots = [memoryview(memory)[start : start + SLOT_BYTES] for start in starts]
        self._slots = slots[:count], slots[count:]
        self._number = 0
        self.fence, self._spin = MemoryFence(), spin_seconds(count, on_accelerator=on_accelerator)
        self._exits: dict[int, select.poll] = {}
        """By rank: reports the exit of its process."""
        fds: list[int] = []
        weakref.finalize(self, _close_all, fds)
        for peer in self.peers:
            fds.append(os.pidfd_open(pids[peer]))
            self._exits[peer] = select.poll()
            self._exits[peer].register(fds[-1], select.POLLIN)

    @staticmethod
    def nbytes(count: int) -> int:
        """The size of the memory."""
        return (count + 1) * CACHE_LINE + 2 * count * SLOT_BYTES

    def gather(self, message: bytes | memoryview) -> list[memoryview]:
        """All-gather of at most `SLOT_BYTES` bytes. Returns the slots of all ranks.

        They are valid until the next exchange. What follows the message in a slot is left from earlier ones.
        """
        number, numbers = self._number + 1, self._numbers
        self._check_given_up()
        slots = self._slots[number & 1]
        slots[self._rank][: len(message)] = message
        self.fence()
        numbers[self._rank] = self._number = number
        self.wait(lambda peer: 0 <= numbers[peer] - number <= 1)
        self._check_given_up()
        self.fence()
        return slots

    def wait(self, has_arrived: Callable[[int], bool]) -> None:
        """Wait until a function of its rank is true for every other rank. Raises `ExchangeFailed`."""
        deadline = 0.0
        for peer in self.peers:
            if has_arrived(peer):
                continue
            deadline = deadline or time.monotonic() + self._timeout
            if not self._wait_for(peer, has_arrived, deadline):
                self._numbers[self._given_up] = 1
                raise ExchangeFailed(f"rank {peer} has ended, or did not arrive within {self._timeout:g} s.")

    def _check_given_up(self) -> None:
        if self._numbers[self._given_up]:
            raise ExchangeFailed("a rank has given up waiting for the others.")

    def _wait_for(self, peer: int, has_arrived: Callable[[int], bool], deadline: float) -> bool:
        def is_lost() -> bool:
            has_exited = bool(self._exits[peer].poll(0))
            # It may have arrived before it ended.
            return time.monotonic() > deadline or (has_exited and not has_arrived(peer))

        return wait_until(
            lambda: has_arrived(peer), lambda: bool(self._numbers[self._given_up]), is_lost, spin=self._spin
        )


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
