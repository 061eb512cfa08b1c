"""What workers print comes out of this process, line by line, with the worker's name before it."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from instep.locks import ProcessLock

_CHUNK = 1 << 16
_TAIL = 40
"""Lines of what went to a worker's standard error that are kept, to say why it ended."""


class Printed:
    """The two pipes that one worker prints into."""

    def __init__(self, name: Callable[[], str]) -> None:
        """`name` is asked for each time: one worker is another replica for another wrapper."""
        self._name = name
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[str, bytearray]] = {}
        self.write_ends: list[int] = []
        self._tail: deque[str] = deque(maxlen=_TAIL)
        try:
            for target in ("stdout", "stderr"):
                read, write = os.pipe()
                os.set_blocking(read, False)
                self._streams[read] = target, bytearray()
                self.write_ends.append(write)
            _add(self, list(self._streams))
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
                _begun.add(fd)
                waiting += self._read(fd)
                end = len(waiting) if partial else waiting.rfind(b"\n") + 1
                if end:
                    self._show(target, bytes(waiting[:end]).decode("utf-8", "replace"))
                    del waiting[:end]
                if not waiting:
                    _begun.discard(fd)

    @staticmethod
    def _read(fd: int) -> bytes:
        data = []
        with suppress(BlockingIOError):
            while chunk := os.read(fd, _CHUNK):
                data.append(chunk)
            _forget(fd)  # its last writer is gone
        return b"".join(data)

    def _show(self, target: str, text: str) -> None:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if target == "stderr":
            self._tail.extend(lines)
        stream = getattr(sys, target)
        # The caller's stream may be closed, none, or of any kind. There is no other place to print to, and a worker
        # whose pipe nobody reads any longer would stand still.
        with suppress(Exception):
            stream.write("".join(f"[{self._name()}] {line}\n" for line in lines))
            stream.flush()

    def tail(self) -> str:
        """The last lines that went to the worker's standard error."""
        return "\n".join(self._tail)

    def close(self) -> None:
        """Show the rest and close the pipes."""
        self.close_write_ends()
        self.drain(partial=True)
        _remove(self, list(self._streams))
        with self._lock:  # the reader may be at it still
            self.abandon()

    def abandon(self) -> None:
        """Close the pipes and show nothing, as in a forked child, to which nothing is printed."""
        self.close_write_ends()
        for fd in list(self._streams):
            del self._streams[fd]
            _begun.discard(fd)
            os.close(fd)


class _Reader(threading.Thread):
    """Shows what is printed as it comes."""

    def __init__(self) -> None:
        super().__init__(name="instep-prints", daemon=True)
        self.epoll = select.epoll()
        try:
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            self.epoll.close()
            raise
        self.epoll.register(self.bell, select.EPOLLIN)

    def run(self) -> None:
        while True:
            for fd, _ in self.epoll.poll():
                if fd == self.bell:
                    return
                if (printed := _open.get(fd)) is not None:
                    printed.drain()

    def end(self) -> None:
        os.eventfd_write(self.bell, 1)
        self.join()
        self.close()

    def close(self) -> None:
        self.epoll.close()
        os.close(self.bell)


_open: dict[int, Printed] = {}
_begun: set[int] = set()
"""Pipes that are being read, or of which the beginning of a line was read and not shown."""
_reader: _Reader | None = None


def _in_child() -> None:
    """A forked child has no reader, and what workers print is its parent's."""
    global _reader
    _open.clear()
    _begun.clear()
    if _reader is not None:
        _reader.close()
        _reader = None


_lock = ProcessLock()
os.register_at_fork(after_in_child=_in_child)


def _add(printed: Printed, fds: list[int]) -> None:
    global _reader
    with _lock:
        if _reader is None:
            _reader = _Reader()
            _reader.start()
        for fd in fds:
            _open[fd] = printed
            _reader.epoll.register(fd, select.EPOLLIN)


def _forget(fd: int) -> None:
    """Wait for nothing more from a pipe: at its end it would be readable for ever."""
    with suppress(OSError, ValueError, AttributeError):  # it was forgotten already
        _reader.epoll.unregister(fd)  # type: ignore[union-attr]


def _remove(printed: Printed, fds: list[int]) -> None:
    """Watch these pipes no longer; with the last of all the reader ends."""
    global _reader
    with _lock:
        for fd in fds:
            if _open.get(fd) is printed:
                del _open[fd]
                _forget(fd)
        ended, _reader = (_reader, None) if not _open else (None, _reader)
    if ended is not None:
        ended.end()


def flush_output() -> None:
    """Show all that workers had printed when this was called, lines that are not finished too.

    A worker lets out what it printed before it sends a message: after its answer has come, this shows all of it.
    """
    with _lock:
        # In this order: what is no longer in a pipe is being read by somebody.
        if _reader is None or not (_reader.epoll.poll(0) or _begun):
            return
        printing = list(dict.fromkeys(_open.values()))
    for printed in printing:
        printed.drain(partial=True)
