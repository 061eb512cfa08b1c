"""Waiting for a worker's reply: queues, warnings and timeouts."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.transport.connection import ConnectionClosed, Message
from instep.errors import WorkerFailure
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.debugger import is_debugger_attached

POLL_SECONDS = 0.5
"""Seconds between checks that a worker is alive."""
HANDOFF_SECONDS = 0.01
"""Seconds that a thread waits for another thread to receive its reply, before it receives itself."""
WARN_SECONDS = 60.0
"""Seconds after which a warning shows the stack of a worker that has not replied."""


class ReplyWatchdog:
    """Measures how long a worker has not replied; warns, then raises."""

    def __init__(self, worker: WorkerProcess, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._started = time.monotonic()
        self._warned = False

    def check(self) -> None:
        """Warn if the worker takes long. Raises `ReplyTimeout` after the timeout, except under a debugger."""
        waited = time.monotonic() - self._started
        if not self._worker.is_alive():
            raise ConnectionClosed(f"{self._worker.name} has exited")
        if waited < min(WARN_SECONDS, self._timeout / 2) or is_debugger_attached():
            return
        if not self._warned:
            self._warned = True
            warn_caller(
                f"{self._worker.name} has not replied for {waited:.0f} s. Its stack:\n{self._worker.python_stacks()}",
            )
        if waited > self._timeout:
            raise ReplyTimeout(
                f"{self._worker.name} has not replied for {waited:.0f} s and was killed. Its stack:\n"
                f"{self._worker.python_stacks()}\nTo wait longer: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )


class ReplyTimeout(WorkerFailure):
    """A worker did not reply in time."""


class PendingReply:
    """The queue of messages that reply to one request."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self.received_kinds: set[str] = set()
        self.holds_lock = False
        """Whether the call holds the client's lock until it ends."""

    def put(self, message: Message) -> None:
        self.received_kinds.add(message.kind)
        self._messages.put(message)

    def has_message(self) -> bool:
        return not self._messages.empty()

    def get(self, seconds: float) -> Message | None:
        """The next message; None if none arrives within `seconds`."""
        try:
            return self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
        except Empty:
            return None
