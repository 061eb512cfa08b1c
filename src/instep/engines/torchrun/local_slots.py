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
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from instep.runtime.affinity import has_cpus_for
from instep.runtime.shared_wait import MemoryFence, wait_until

SLOT_BYTES = 2048
"""What each rank sends in every exchange. A longer message takes a second all-gather, by Gloo."""
_FOLDER = "/dev/shm"
_NUMBER_BYTES = 64
"""Bytes between the numbers of two ranks: each has its own cache line."""


def machine_identity() -> str:
    """A text that is equal for processes that can exchange messages through memory; empty if none can.

    Processes in different network namespaces count as different machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return f"{boot} {' '.join(spaces)} {os.stat(_FOLDER).st_dev}" if hasattr(os, "pidfd_open") else ""
    except OSError:
        return ""


class ExchangeFailed(RuntimeError):
    """A rank has ended, has given up, or did not arrive in time."""


class LocalSlots:
    """The memory of the ranks of one machine."""

    def __init__(self, fd: int, rank: int, count: int, timeout: float) -> None:
        """Maps the memory of a descriptor."""
        self._memory = mmap.mmap(fd, _nbytes(count))
        self._rank, self._timeout = rank, timeout
        words = _NUMBER_BYTES // 8
        numbers = np.frombuffer(self._memory, np.int64, (count + 1) * words).reshape(count + 1, words)[:, 0]
        self._numbers = memoryview(numbers)  # type: ignore[arg-type]
        """The number that each rank has reached, and then whether a rank has given up."""
        self._given_up = count
        self._peers = [peer for peer in range(count) if peer != rank]
        self._slots = np.frombuffer(self._memory, np.uint8, offset=(count + 1) * _NUMBER_BYTES)
        self._slots = self._slots.reshape(2, count, SLOT_BYTES)
        self._number = 0
        self._fence, self._spin = MemoryFence(), has_cpus_for(count)
        self._exits: dict[int, select.poll] = {}
        """By rank: reports the exit of its process."""

    @classmethod
    def create(cls, count: int) -> str:
        """The path of new memory. `open` it in every rank, then `remove` it."""
        path = os.path.join(_FOLDER, f"instep-{uuid.uuid4().hex}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(fd, 0, _nbytes(count))  # fails if there is no room, instead of a signal later
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path

    @classmethod
    def open(cls, path: str, rank: int, count: int, timeout: float) -> LocalSlots:
        fd = os.open(path, os.O_RDWR)
        try:
            return cls(fd, rank, count, timeout)
        finally:
            os.close(fd)

    @staticmethod
    def remove(path: str) -> None:
        """Remove the name of the memory, which stays mapped."""
        with suppress(OSError):
            os.unlink(path)

    def watch(self, pids: Sequence[int]) -> None:
        """Notice the exits of the other ranks' processes."""
        for peer in self._peers:
            self._exits[peer] = select.poll()
            self._exits[peer].register(os.pidfd_open(pids[peer]), select.POLLIN)

    def gather(self, message: Any) -> Any:
        """All-gather of an array of bytes, at most `SLOT_BYTES`. Returns the slots of all ranks, `[count, SLOT_BYTES]`.

        They are valid until the next exchange. What follows the message in a slot is left from earlier ones.
        """
        number, numbers = self._number + 1, self._numbers
        self._check_given_up()
        slots = self._slots[number & 1]
        slots[self._rank, : len(message)] = message
        self._fence()
        numbers[self._rank] = self._number = number
        deadline = time.monotonic() + self._timeout
        for peer in self._peers:
            if not 0 <= numbers[peer] - number <= 1 and not self._wait_for(peer, deadline):
                numbers[self._given_up] = 1
                raise ExchangeFailed(f"rank {peer} has ended, or did not arrive within {self._timeout:g} s.")
        self._check_given_up()
        self._fence()
        return slots

    def _check_given_up(self) -> None:
        if self._numbers[self._given_up]:
            raise ExchangeFailed("a rank has given up waiting for the others.")

    def _wait_for(self, peer: int, deadline: float) -> bool:
        number, numbers = self._number, self._numbers
        return wait_until(
            lambda: 0 <= numbers[peer] - number <= 1,
            lambda: bool(numbers[self._given_up]),
            lambda: time.monotonic() > deadline or self._has_exited(peer),
            spin=self._spin,
        )

    def _has_exited(self, peer: int) -> bool:
        # It may have arrived before it ended.
        return bool(self._exits[peer].poll(0)) and not 0 <= self._numbers[peer] - self._number <= 1


def _nbytes(count: int) -> int:
    return (count + 1) * _NUMBER_BYTES + 2 * count * SLOT_BYTES
