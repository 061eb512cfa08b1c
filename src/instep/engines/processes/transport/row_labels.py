"""Digests of labels, for exchanges of rows in shared memory and on a device."""

from __future__ import annotations

import hashlib
from functools import lru_cache


@lru_cache(maxsize=4096)
def label_digest(label: str) -> int:
    """The 64 bits by which replicas compare the labels of a collective."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)
