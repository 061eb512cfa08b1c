"""Memory that a step frees, and that the next one needs again.

The C library gives large pieces of it back to the system as they are freed. Every page of the next step's gradients and
activations then has to be had anew, which on a CPU can take longer than filling it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

LARGEST = 32 << 20
"""Bytes of the largest piece that is kept: as far as the C library goes by itself, in time."""
KEPT = 2**31 - 1
"""Bytes that are kept at the end of what it has."""
AHEAD = 16 << 20
"""Bytes that it asks for at a time."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""What `malloc.h` calls these settings."""


@cache
def keep_pages() -> bool:
    """Have this process keep the memory of a step for the next one; settings of the user's own come first."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is None:  # another system, or another C library
        return False
    for name, value in ((_MMAP_THRESHOLD, LARGEST), (_TRIM_THRESHOLD, KEPT), (_TOP_PAD, AHEAD)):
        setting(name, value)
    return True
