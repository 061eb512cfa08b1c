"""What the exchanges of rows in shared memory and on a device have in common: digests of labels, and a memory fence."""

from __future__ import annotations

import hashlib
import threading
from functools import lru_cache


@lru_cache(maxsize=4096)
def label_digest(label: str) -> int:
    """The 64 bits by which replicas compare the labels of a collective."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)


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
            self._lock.acquire()
            self._lock.release()
