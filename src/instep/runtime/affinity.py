"""CPU placement and spin-waiting of threads that exchange messages with other processes."""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from functools import lru_cache

SPIN_SECONDS, LONG_SPIN_SECONDS = 0.002, 0.02
"""Seconds for which a thread spins before it sleeps; the second for processes that only launch work on accelerators.

In a virtual machine it can take milliseconds to wake a thread that sleeps. On the CPU the others could use the time.
"""
_LOOKS_PER_POLL = 16
"""How often a spinning thread looks into memory between two looks at file descriptors."""
_QUOTA_FILES = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


class _ThreadLocal(threading.local):
    spin_seconds = 0.0


_thread_local = _ThreadLocal()
_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def current_cpu() -> int:
    """The CPU that this thread runs on; -1 if unknown."""
    return -1 if _getcpu is None else int(_getcpu())


def set_spin_wait(processes: int, *, on_accelerator: bool = False) -> None:
    """Let this thread spin while waiting, if there is a CPU for each of `processes` processes; 0 turns it off."""
    _thread_local.spin_seconds = spin_seconds(processes, on_accelerator=on_accelerator)


def spin_seconds(processes: int, *, on_accelerator: bool = False) -> float:
    """Seconds for which one of `processes` processes may spin while waiting; 0 if there are fewer CPUs.

    `LONG_SPIN_SECONDS` needs two CPUs for each process.
    """
    if not processes:
        return 0.0
    cpus = min(_available_cpus(threading.get_ident(), int(time.monotonic())), _cpu_quota())
    if cpus < processes:
        return 0.0
    return LONG_SPIN_SECONDS if on_accelerator and cpus >= 2 * processes else SPIN_SECONDS


@lru_cache(maxsize=16)
def _available_cpus(thread: int, second: int) -> int:  # noqa: ARG001
    """The number of CPUs that a thread may use, read once a second: the system call takes as long as a message."""
    return len(os.sched_getaffinity(0))


def thread_spin_seconds() -> float:
    """Seconds for which this thread may spin while waiting."""
    return _thread_local.spin_seconds


@lru_cache(maxsize=1)
def _cpu_quota() -> float:
    """The CPU quota of the container, which spinning would use up; infinite if there is none."""
    for path in _QUOTA_FILES:
        try:
            with open(path) as file:
                limit, *period = file.read().split()
            if limit not in ("max", "-1"):
                return float(limit) / float(period[0] if period else 100_000)
        except (OSError, ValueError):  # absent, or in another format
            continue
    return math.inf


def spin_poll(
    poll: select.poll, limit: float = math.inf, is_ready: Callable[[], bool] | None = None
) -> list[tuple[int, int]] | None:
    """Poll without sleeping, for at most `limit` seconds. Returns the events, or an empty list once `is_ready()`.

    Returns None if there is nothing, and at once in threads that do not spin.
    """
    if not _thread_local.spin_seconds:
        return None
    deadline = time.monotonic() + min(_thread_local.spin_seconds, limit)
    while not (events := poll.poll(0)):
        if is_ready is not None:
            for _ in range(_LOOKS_PER_POLL):
                if is_ready():
                    return []
        if time.monotonic() >= deadline:
            return None
        os.sched_yield()  # for other threads on this CPU
    return events


class SenderCpuAvoidance:
    """Keeps a waiting thread off the CPU of the process that sends it messages.

    The kernel tends to wake a thread on the sender's CPU, assuming that the sender is about to sleep; here the sender
    continues to work. While the thread works it may run on any CPU.
    """

    def __init__(self) -> None:
        self._sender_cpu = -1
        self._allowed_cpus: Collection[int] = ()
        self._waiting_cpus: Collection[int] = ()

    def before_wait(self) -> None:
        """Before waiting: exclude the last sender's CPU."""
        self._allowed_cpus = os.sched_getaffinity(0)
        self._waiting_cpus = self._allowed_cpus - {self._sender_cpu}
        if self._waiting_cpus and self._waiting_cpus != self._allowed_cpus:
            os.sched_setaffinity(0, self._waiting_cpus)

    def after_wait(self) -> None:
        """After waiting: allow every CPU again, unless the affinity was changed meanwhile."""
        if self._waiting_cpus != self._allowed_cpus and os.sched_getaffinity(0) == self._waiting_cpus:
            os.sched_setaffinity(0, self._allowed_cpus)

    def record_sender(self, cpu: int) -> None:
        """Record the CPU that a message came from, and move off it."""
        self._sender_cpu = cpu
        if cpu >= 0 and current_cpu() == cpu:
            self.before_wait()
            self.after_wait()
