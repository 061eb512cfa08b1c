"""glibc malloc settings that keep freed memory in the process between steps."""

from __future__ import annotations

import ctypes
import os
from functools import cache

MMAP_THRESHOLD_BYTES = 32 << 20
"""Bytes of the largest piece that is kept: as far as the C library goes by itself, in time."""
TRIM_THRESHOLD_BYTES = 2**31 - 1
"""Bytes that are kept at the end of what it has."""
TOP_PAD_BYTES = 16 << 20
"""Bytes that it asks for at a time."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""What `malloc.h` calls these settings."""


@cache
def retain_freed_memory() -> bool:
    """Have this process keep the memory of a step for the next one; settings of the user's own come first."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    if setting is None:  # another system, or another C library
        return False
    for name, value in (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_TOP_PAD, TOP_PAD_BYTES),
    ):
        setting(name, value)
    return True
