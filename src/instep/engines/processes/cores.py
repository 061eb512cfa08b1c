"""Two processes that work at the same time want two cores, and the kernel does not always see that.

Whoever is woken by a message is put on the core of the one who sent it, unless another core is idle: the kernel takes
it that the sender is about to wait. Here the sender goes on working. So a message says where it was sent from, and a
worker that waits for the next one stays away from there meanwhile, and moves if it meets the sender all the same.

A core that went to sleep wakes up late, and the next message of a step is never far: where there is a core for each
process, a thread that has nothing else to do stays awake for it, as those of OpenMP do, but not for long.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from collections.abc import Collection
from functools import lru_cache

AWAKE = 0.002
"""Seconds for which one waits awake."""
_QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_here = threading.local()
_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def this_core() -> int:
    """The core that this thread runs on; -1 where the system does not say."""
    return -1 if _getcpu is None else int(_getcpu())


def watch_for(processes: int) -> None:
    """Let this thread wait awake if there is a core for each of so many processes; 0 for no longer."""
    _here.awake = 0 < processes <= min(len(os.sched_getaffinity(0)), _quota())


@lru_cache(maxsize=1)
def _quota() -> float:
    """The cores that a container's share of the time comes to: whoever wakes for nothing uses that up."""
    for place in _QUOTAS:
        try:
            with open(place) as file:
                limit, *period = file.read().split()
            if limit not in ("max", "-1"):
                return float(limit) / float(period[0] if period else 100_000)
        except (OSError, ValueError):  # there is none, or it is written otherwise
            continue
    return math.inf


def stay_awake(poll: select.poll) -> list[tuple[int, int]]:
    """What a poll finds before it is time to sleep; that is at once in threads that do not `watch_for` anything."""
    if not getattr(_here, "awake", False):
        return []
    until = time.monotonic() + AWAKE
    while not (found := poll.poll(0)) and time.monotonic() < until:
        os.sched_yield()  # whoever else wants this core
    return found


class Elsewhere:
    """Keeps a thread that waits for messages off the core that they come from. It may go anywhere when it works."""

    def __init__(self) -> None:
        self._core = -1
        self._allowed: Collection[int] = ()
        self._resting: Collection[int] = ()

    def rest(self) -> None:
        """Before waiting: do not wake up on the core of the last sender."""
        self._allowed = os.sched_getaffinity(0)
        self._resting = self._allowed - {self._core}
        if self._resting and self._resting != self._allowed:
            os.sched_setaffinity(0, self._resting)

    def rise(self) -> None:
        """After waiting: go anywhere again, unless somebody has decided otherwise meanwhile."""
        if self._resting != self._allowed and os.sched_getaffinity(0) == self._resting:
            os.sched_setaffinity(0, self._allowed)

    def came_from(self, core: int) -> None:
        """A message came from a core. It is left to the sender, who goes on working there."""
        self._core = core
        if core >= 0 and this_core() == core:
            self.rest()
            self.rise()
