"""Waiting for a worker: how long, what is said meanwhile, and where its messages are put."""

from __future__ import annotations

import os
import sys
import time
import warnings
from queue import Empty, SimpleQueue
from typing import Any

from instep.engines.processes.hands import Worker
from instep.engines.processes.wire import Gone, Message
from instep.errors import WorkerFailure

GLANCE = 0.5
"""Seconds after which whoever waits for a worker looks whether it still lives."""
PASSED_ON = 0.01
"""Seconds that a thread waits for another one to hear its answer, before it listens itself."""
PATIENCE = 60.0
"""Seconds after which it is said where a worker stands that has not answered."""


class Wait:
    """The time that a worker has not been heard of."""

    def __init__(self, worker: Worker, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._since = time.monotonic()
        self._said = False

    def look(self) -> None:
        """Say where a worker stands that takes long; `Stuck` when it takes too long, but never under a debugger."""
        waited = time.monotonic() - self._since
        if not self._worker.alive():
            raise Gone(f"{self._worker.name} is gone")
        if waited < min(PATIENCE, self._timeout / 2) or sys.gettrace() is not None:
            return
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self._worker.name} has not answered for {waited:.0f} s; it stands at:\n{self._worker.stack()}",
                stacklevel=2,
            )
        if waited > self._timeout:
            raise Stuck(
                f"{self._worker.name} has not answered for {waited:.0f} s and was ended; it stood at:\n"
                f"{self._worker.stack()}\nIf it only takes long: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )


class Stuck(WorkerFailure):
    """A worker did not answer in time."""


class Box:
    """Where messages about one question are put. They are dropped when nobody holds it any longer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self.kinds: set[str] = set()
        """The kinds of messages that were put here."""

    def put(self, message: Message) -> None:
        self.kinds.add(message.kind)
        self._messages.put(message)

    def has_any(self) -> bool:
        """Whether a message lies here."""
        return not self._messages.empty()

    def wait(self, seconds: float) -> Message | None:
        """The next message; None where none comes within that time."""
        try:
            return self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
        except Empty:
            return None


def place_of_script() -> tuple[str, list[str], Any, int]:
    """The folder, the import path, the environment (as it lies there, which is quicker) and the number of modules."""
    try:
        folder = os.getcwd()
    except OSError:  # somebody has removed it
        folder = os.sep
    return folder, sys.path, getattr(os.environ, "_data", os.environ), len(sys.modules)
