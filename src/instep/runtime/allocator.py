"""glibc malloc settings that keep freed memory in the process between steps."""

from __future__ import annotations

import ctypes
import os
from functools import cache

MMAP_THRESHOLD_BYTES = 32 << 20
"""M_MMAP_THRESHOLD: allocations up to this size come from the heap. glibc's own adaptive limit ends here too."""
TRIM_THRESHOLD_BYTES = 2**31 - 1
"""M_TRIM_THRESHOLD: free bytes at the top of the heap that are kept."""
TOP_PAD_BYTES = 16 << 20
"""M_TOP_PAD: bytes by which the heap grows at least."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameter numbers from `malloc.h`."""


@cache
def retain_freed_memory() -> bool:
    """Make malloc keep freed memory for the next step; returns False if the user's settings or the libc prevent it."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    for parameter, value in (
        (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
        (_M_TOP_PAD, TOP_PAD_BYTES),
    ):
        mallopt(parameter, value)
    return True
