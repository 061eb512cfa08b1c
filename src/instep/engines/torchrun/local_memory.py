"""Memory that all ranks of one machine map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

CACHE_LINE = 64
"""Bytes between two numbers that different ranks write."""


def machine_identity() -> str:
    """A text that is equal for processes that can share memory; empty if none can.

    Processes in different network namespaces, such as containers, count as different machines.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return f"{boot} {' '.join(spaces)}" if hasattr(os, "pidfd_open") and hasattr(os, "memfd_create") else ""
    except OSError:
        return ""


def share_memory(nbytes: int, rank: int, exchange: Callable[[Any], list[Any]]) -> mmap.mmap | None:
    """New memory of zeros that every rank maps; None if one of them cannot.

    All ranks have to call it. `exchange` is an all-gather of objects. The memory has no name, so that nothing is left
    of it when the ranks end in any way; the other ranks open it through the descriptor of rank 0.
    """
    fd, path, memory = -1, "", None
    try:
        with suppress(OSError):
            if rank == 0:
                fd = os.memfd_create("instep", os.MFD_CLOEXEC)
                os.ftruncate(fd, nbytes)
                path = f"/proc/{os.getpid()}/fd/{fd}"
        path = exchange(path)[0]
        with suppress(OSError):
            memory = _map(path, nbytes) if path else None
        return memory if all(exchange(memory is not None)) else None
    finally:
        if fd >= 0:
            os.close(fd)


def _map(path: str, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
