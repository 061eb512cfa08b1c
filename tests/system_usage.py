"""What the system says of a process: which sockets it holds, and that it is gone with all that it had."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path


def sockets_of(pid: int | str) -> set[str]:
    """The numbers of the sockets that a process holds."""
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
    """A process ends by itself, and leaves nothing in shared memory that was not there before, nor in a folder."""
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/dev/shm")) <= set(before)
    assert not list(folder.iterdir())


def wait_for_threads(name: str, seconds: float) -> None:
    """Wait until no thread of this process is called so, or for so long."""
    deadline = time.monotonic() + seconds
    while any(thread.name == name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.1)
