"""Waiting for a worker's reply: warnings, timeouts, and `breakpoint()` in workers."""

from __future__ import annotations

import os
import sys
import time
import warnings
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.transport.connection import ConnectionClosed, Message
from instep.errors import WorkerFailure
from instep.runtime.debugger import is_debugger_attached

POLL_SECONDS = 0.5
"""Seconds after which whoever waits for a worker looks whether it still lives."""
HANDOFF_SECONDS = 0.01
"""Seconds that a thread waits for another one to hear its answer, before it listens itself."""
WARN_SECONDS = 60.0
"""Seconds after which it is said where a worker stands that has not answered."""


class ReplyWatchdog:
    """The time that a worker has not been heard of."""

    def __init__(self, worker: WorkerProcess, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._started = time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Say where a worker stands that takes long; `Stuck` when it takes too long, but never under a debugger."""
        waited = time.monotonic() - self._started
        if not self._worker.is_alive():
            raise ConnectionClosed(f"{self._worker.name} is gone")
        if waited < min(WARN_SECONDS, self._timeout / 2) or is_debugger_attached():
            return
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._worker.name} has not answered for {waited:.0f} s; it stands at:\n{self._worker.python_stacks()}",
                stacklevel=2,
            )
        if waited > self._timeout:
            raise ReplyTimeout(
                f"{self._worker.name} has not answered for {waited:.0f} s and was ended; it stood at:\n"
                f"{self._worker.python_stacks()}\nIf it only takes long: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )


class ReplyTimeout(WorkerFailure):
    """A worker did not answer in time."""


class PendingReply:
    """Where messages about one question are put. They are dropped when nobody holds it any longer."""

    def __init__(self, number: int) -> None:
        self.request_id = number
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self.received_kinds: set[str] = set()
        """The kinds of messages that were put here."""

    def put(self, message: Message) -> None:
        self.received_kinds.add(message.kind)
        self._messages.put(message)

    def has_message(self) -> bool:
        """Whether a message lies here."""
        return not self._messages.empty()

    def get(self, seconds: float) -> Message | None:
        """The next message; None where none comes within that time."""
        try:
            return self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
        except Empty:
            return None


def script_environment() -> tuple[str, list[str], Any, int]:
    """The folder, the import path, the environment (as it lies there, which is quicker) and the number of modules."""
    try:
        folder = os.getcwd()
    except OSError:  # somebody has removed it
        folder = os.sep
    return folder, sys.path, getattr(os.environ, "_data", os.environ), len(sys.modules)


def skip_breakpoint(*_: Any, **__: Any) -> None:
    """Go on, and say so once, unless breakpoints were switched off."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _print_skip_notice()


@cache
def _print_skip_notice() -> None:
    sys.stderr.write(
        "breakpoint() is passed over in a worker process, which has no terminal: the first replica stops in yours. "
        "With engine='serial' each one does.\n"
    )
