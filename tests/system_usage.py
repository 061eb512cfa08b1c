"""Sockets, threads and remains of processes, read from the operating system."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path


def sockets_of(pid: int | str) -> set[str]:
    """The inode numbers of the sockets that a process has open."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def assert_gone(pid: int, before: Collection[str], folder: Path) -> None:
    """Assert that a process ends by itself and leaves no new shared memory and no file in a folder."""
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/dev/shm")) <= set(before)
    assert not list(folder.iterdir())


def wait_for_threads(name: str, seconds: float) -> None:
    """Wait until this process has no thread with this name, but at most `seconds`."""
    deadline = time.monotonic() + seconds
    while any(thread.name == name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.1)
