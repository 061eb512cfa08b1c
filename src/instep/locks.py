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
    """A re-entrant lock that is new in a forked child, where `in_child` is called before it is first taken."""

    def __init__(self, in_child: Callable[[], object] = _nothing) -> None:
        self._in_child = in_child
        self._process = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._lock = threading.RLock()
            self._process = os.getpid()
            self._in_child()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
