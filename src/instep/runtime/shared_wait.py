"""What processes need that exchange data through memory which all of them map: a memory fence, and a way to wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_SPIN_COUNT = 50
_YIELD_DIVISOR, _MIN_YIELD_SECONDS = 4, 0.00005
"""A waiting thread first only yields its CPU: for a quarter of the time for which it may spin, but at least so long."""
_MIN_SLEEP, _MAX_SLEEP = 0.00002, 0.001
_SLEEP_FRACTION = 8
"""Then it sleeps, each time for this fraction of the time waited so far."""
_IDLE_SECONDS = 0.02
"""Seconds between calls of a waiting thread's `on_idle`."""


class MemoryFence:
    """Orders a thread's accesses to memory that processes share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Order this thread's memory accesses before it and after it.

        A release followed by an acquire, twice: the processor may move accesses into a locked region, but not past a
        release that an acquire follows.
        """
        for _ in range(2):
            with self._lock:  # an interruption leaves it released
                pass


def wait_until(
    is_done: Callable[[], bool], is_blocked: Callable[[], bool], on_idle: Callable[[], bool], *, spin: float
) -> bool:
    """Wait until another process has written a value. Returns False if one of the other functions returned True.

    Args:
        is_blocked: Is asked before every sleep.
        on_idle: Is asked every 20 ms.
        spin: Seconds for which the thread may spin (`affinity.spin_seconds`). It uses a quarter of them.
    """
    for _ in range(_SPIN_COUNT):
        if is_done():
            return True
    started = time.monotonic()
    yield_until = started + max(spin / _YIELD_DIVISOR, _MIN_YIELD_SECONDS)
    next_idle = started + _IDLE_SECONDS
    while not is_done():
        now = time.monotonic()
        if now < yield_until:
            os.sched_yield()
            continue
        if is_blocked():
            return False
        if now >= next_idle:
            if on_idle():
                return False
            next_idle = time.monotonic() + _IDLE_SECONDS
        time.sleep(min(_MAX_SLEEP, max(_MIN_SLEEP, (now - started) / _SLEEP_FRACTION)))
    return True
