"""Calls functions when worker processes exit, from a thread of its own."""

from __future__ import annotations

import os
import select
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.runtime.locks import ForkSafeLock


class _ExitMonitor:
    """A thread that waits for processes. It ends when there are none."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._poll = select.poll()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._wakeup, select.POLLIN)
        self._callbacks: dict[int, weakref.WeakMethod[Any]] = {}
        self.has_ended = False
        threading.Thread(target=self._run, name="instep-exits", daemon=True).start()

    def add(self, pidfd: int, callback: Callable[[], None]) -> None:
        """Call a method when a process exits. Takes ownership of the descriptor. Call under the lock."""
        self._callbacks[pidfd] = weakref.WeakMethod(callback)
        self._poll.register(pidfd, select.POLLIN)
        os.eventfd_write(self._wakeup, 1)  # a running poll does not see new descriptors

    def _run(self) -> None:
        while not self.has_ended:
            for fd, _ in self._poll.poll():
                if fd == self._wakeup:
                    os.eventfd_read(fd)
                    continue
                callback = self._callbacks.pop(fd)()
                self._poll.unregister(fd)
                os.close(fd)
                if callback is not None and not sys.is_finalizing():
                    try:
                        callback()
                    except Exception:  # the other processes are still awaited
                        traceback.print_exc()
                del callback
            with _lock:
                self.has_ended = not self._callbacks
        os.close(self._wakeup)


_monitor: _ExitMonitor | None = None
_lock = ForkSafeLock()


def call_at_exit_of(worker: WorkerProcess, callback: Callable[[], None]) -> bool:
    """Call a method in another thread when a worker exits, unless its object is freed before.

    This works while all other threads wait for a device. Returns False if the kernel does not report exits.
    """
    global _monitor
    pidfd = worker.duplicate_pidfd()
    if pidfd is None:
        return False
    with _lock:
        if _monitor is None or _monitor.has_ended or _monitor.pid != os.getpid():
            _monitor = _ExitMonitor()
        _monitor.add(pidfd, callback)
    return True
