"""A lock that a forked child does not inherit as taken.

A child has none of its parent's other threads: a lock that one of them held at the fork would stay locked for
ever. What such a thread was in the middle of is in no known state either, so whoever shares it says what to do then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def _nothing() -> None:
    """There is nothing to begin anew."""


class ProcessLock:
    """A re-entrant lock that is new in a forked child, where `in_child` is called before it is first taken.

    `when_free` is called each time nobody holds it any longer.
    """

    def __init__(
        self, in_child: Callable[[], object] = _nothing, *, when_free: Callable[[], object] = _nothing
    ) -> None:
        self._in_child = in_child
        self._when_free = when_free
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._depth = 0
        """How often the thread that holds it has taken it."""

    def __enter__(self) -> None:
        self._renew_in_child()
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        free = not self._depth
        self._lock.release()
        if free:
            self._when_free()

    def take_if_free(self) -> bool:
        """Take it if nobody holds it, not even this thread; never waits. What is taken is given back by `__exit__`."""
        self._renew_in_child()
        if not self._lock.acquire(blocking=False):
            return False
        if self._depth:  # this thread is in the middle of something
            self._lock.release()
            return False
        self._depth = 1
        return True

    def _renew_in_child(self) -> None:
        if self._process != os.getpid():
            self._lock = threading.RLock()
            self._depth = 0
            self._process = os.getpid()
            self._in_child()
