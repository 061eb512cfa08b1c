"""Forwarding of workers' stdout and stderr to this process, line by line, prefixed with the worker's name."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from instep.runtime.locks import ForkSafeLock

_READ_BYTES = 1 << 16
_TAIL_LINES = 40
"""Lines of what went to a worker's standard error that are kept, to say why it ended."""


class WorkerOutput:
    """The two pipes that one worker prints into."""

    def __init__(self, name: Callable[[], str]) -> None:
        """`name` is asked for each time: one worker is another replica for another wrapper."""
        self._get_name = name
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[str, bytearray]] = {}
        self.write_ends: list[int] = []
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            for target in ("stdout", "stderr"):
                read, write = os.pipe()
                os.set_blocking(read, False)
                self._streams[read] = target, bytearray()
                self.write_ends.append(write)
            _register(self, list(self._streams))
        except BaseException:
            self.close()
            raise

    def close_write_ends(self) -> None:
        """Those that the worker has inherited: it alone must hold them."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def drain(self, partial: bool = False) -> None:
        """Show all that has been printed by now; with `partial` also the beginning of a line."""
        with self._lock:
            for fd, (target, waiting) in list(self._streams.items()):
                _unfinished_fds.add(fd)
                waiting += self._read(fd)
                end = len(waiting) if partial else waiting.rfind(b"\n") + 1
                if end:
                    self._write_lines(target, bytes(waiting[:end]).decode("utf-8", "replace"))
                    del waiting[:end]
                if not waiting:
                    _unfinished_fds.discard(fd)

    @staticmethod
    def _read(fd: int) -> bytes:
        data = []
        with suppress(BlockingIOError):
            while chunk := os.read(fd, _READ_BYTES):
                data.append(chunk)
            _unregister_fd(fd)  # its last writer is gone
        return b"".join(data)

    def _write_lines(self, target: str, text: str) -> None:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if target == "stderr":
            self._tail.extend(lines)
        stream = getattr(sys, target)
        # The caller's stream may be closed, none, or of any kind. There is no other place to print to, and a worker
        # whose pipe nobody reads any longer would stand still.
        with suppress(Exception):
            stream.write("".join(f"[{self._get_name()}] {line}\n" for line in lines))
            stream.flush()

    def tail(self) -> str:
        """The last lines that went to the worker's standard error."""
        return "\n".join(self._tail)

    def close(self) -> None:
        """Show the rest and close the pipes."""
        self.close_write_ends()
        self.drain(partial=True)
        _unregister(self, list(self._streams))
        with self._lock:  # the reader may be at it still
            self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes and show nothing, as in a forked child, to which nothing is printed."""
        self.close_write_ends()
        for fd in list(self._streams):
            del self._streams[fd]
            _unfinished_fds.discard(fd)
            os.close(fd)


class _OutputThread(threading.Thread):
    """Shows what is printed as it comes."""

    def __init__(self) -> None:
        super().__init__(name="instep-prints", daemon=True)
        self.epoll = select.epoll()
        try:
            self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self.epoll.close()
            raise
        self.epoll.register(self.wake_fd, select.EPOLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll():
                if fd == self.wake_fd:
                    return
                if (printed := _outputs_by_fd.get(fd)) is not None:
                    printed.drain()

    def stop(self) -> None:
        os.eventfd_write(self.wake_fd, 1)
        self.join()
        self.close()

    def close(self) -> None:
        self.epoll.close()
        os.close(self.wake_fd)


_outputs_by_fd: dict[int, WorkerOutput] = {}
_unfinished_fds: set[int] = set()
"""Pipes that are being read, or of which the beginning of a line was read and not shown."""
_output_thread: _OutputThread | None = None


def _reset_in_child() -> None:
    """A forked child has no reader, and what workers print is its parent's."""
    global _output_thread
    _outputs_by_fd.clear()
    _unfinished_fds.clear()
    if _output_thread is not None:
        _output_thread.close()
        _output_thread = None


_lock = ForkSafeLock()
os.register_at_fork(after_in_child=_reset_in_child)


def _register(printed: WorkerOutput, fds: list[int]) -> None:
    global _output_thread
    with _lock:
        if _output_thread is None:
            _output_thread = _OutputThread()
            _output_thread.start()
        for fd in fds:
            _outputs_by_fd[fd] = printed
            _output_thread.epoll.register(fd, select.EPOLLIN)


def _unregister_fd(fd: int) -> None:
    """Wait for nothing more from a pipe: at its end it would be readable for ever."""
    with suppress(OSError, ValueError, AttributeError):  # it was forgotten already
        _output_thread.epoll.unregister(fd)  # type: ignore[union-attr]


def _unregister(printed: WorkerOutput, fds: list[int]) -> None:
    """Watch these pipes no longer; with the last of all the reader ends."""
    global _output_thread
    with _lock:
        for fd in fds:
            if _outputs_by_fd.get(fd) is printed:
                del _outputs_by_fd[fd]
                _unregister_fd(fd)
        ended, _output_thread = (_output_thread, None) if not _outputs_by_fd else (None, _output_thread)
    if ended is not None:
        ended.stop()


def flush_output() -> None:
    """Show all that workers had printed when this was called, lines that are not finished too.

    A worker lets out what it printed before it sends a message: after its answer has come, this shows all of it.
    """
    with _lock:
        # In this order: what is no longer in a pipe is being read by somebody.
        if _output_thread is None or not (_output_thread.epoll.poll(0) or _unfinished_fds):
            return
        printing = list(dict.fromkeys(_outputs_by_fd.values()))
    for printed in printing:
        printed.drain(partial=True)
