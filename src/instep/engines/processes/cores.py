"""Two processes that work at the same time want two cores, and the kernel does not always see that.

Whoever is woken by a message is put on the core of the one who sent it, unless another core is idle: the kernel takes
it that the sender is about to wait. Here the sender goes on working. So a message says where it was sent from, and a
worker that waits for the next one stays away from there meanwhile, and moves if it meets the sender all the same.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection

_getcpu = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def this_core() -> int:
    """The core that this thread runs on; -1 where the system does not say."""
    return -1 if _getcpu is None else int(_getcpu())


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
