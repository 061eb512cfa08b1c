"""CPU placement and spin-waiting of threads that exchange messages with other processes."""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from collections.abc import Collection
from functools import lru_cache

SPIN_SECONDS = 0.002
"""Seconds for which one waits awake."""
_QUOTA_FILES = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_thread_local = threading.local()
_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def current_cpu() -> int:
    """The core that this thread runs on; -1 where the system does not say."""
    return -1 if _getcpu is None else int(_getcpu())


def set_spin_wait(processes: int) -> None:
    """Let this thread wait awake if there is a core for each of so many processes; 0 for no longer."""
    _thread_local.awake = 0 < processes <= min(len(os.sched_getaffinity(0)), _cpu_quota())


@lru_cache(maxsize=1)
def _cpu_quota() -> float:
    """The cores that a container's share of the time comes to: whoever wakes for nothing uses that up."""
    for place in _QUOTA_FILES:
        try:
            with open(place) as file:
                limit, *period = file.read().split()
            if limit not in ("max", "-1"):
                return float(limit) / float(period[0] if period else 100_000)
        except (OSError, ValueError):  # there is none, or it is written otherwise
            continue
    return math.inf


def spin_poll(poll: select.poll) -> list[tuple[int, int]]:
    """What a poll finds before it is time to sleep; that is at once in threads that do not `watch_for` anything."""
    if not getattr(_thread_local, "awake", False):
        return []
    until = time.monotonic() + SPIN_SECONDS
    while not (found := poll.poll(0)) and time.monotonic() < until:
        os.sched_yield()  # whoever else wants this core
    return found


class SenderCpuAvoidance:
    """Keeps a thread that waits for messages off the core that they come from. It may go anywhere when it works."""

    def __init__(self) -> None:
        self._sender_cpu = -1
        self._allowed_cpus: Collection[int] = ()
        self._waiting_cpus: Collection[int] = ()

    def before_wait(self) -> None:
        """Before waiting: do not wake up on the core of the last sender."""
        self._allowed_cpus = os.sched_getaffinity(0)
        self._waiting_cpus = self._allowed_cpus - {self._sender_cpu}
        if self._waiting_cpus and self._waiting_cpus != self._allowed_cpus:
            os.sched_setaffinity(0, self._waiting_cpus)

    def after_wait(self) -> None:
        """After waiting: go anywhere again, unless somebody has decided otherwise meanwhile."""
        if self._waiting_cpus != self._allowed_cpus and os.sched_getaffinity(0) == self._waiting_cpus:
            os.sched_setaffinity(0, self._allowed_cpus)

    def record_sender(self, core: int) -> None:
        """A message came from a core. It is left to the sender, who goes on working there."""
        self._sender_cpu = core
        if core >= 0 and current_cpu() == core:
            self.before_wait()
            self.after_wait()
