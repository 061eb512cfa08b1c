"""Forwarding of workers' stdout and stderr to this process, line by line, prefixed with the worker's name."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from instep.runtime.locks import ForkSafeLock

_READ_BYTES = 1 << 16
_TAIL_LINES = 40
"""Lines of a worker's stderr that are kept to explain why it exited."""


class WorkerOutput:
    """The stdout and stderr pipes of one worker."""

    def __init__(self, name: Callable[[], str]) -> None:
        """`name` is a function because a worker can be a different replica for each wrapper."""
        self._get_name = name
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[str, bytearray]] = {}
        self.write_ends: list[int] = []
        self._stderr_tail: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            for target in ("stdout", "stderr"):
                read, write = os.pipe()
                os.set_blocking(read, False)
                self._streams[read] = target, bytearray()
                self.write_ends.append(write)
            _register(self, self._streams)
        except BaseException:
            self.close()
            raise

    def close_write_ends(self) -> None:
        """Close the write ends in this process, so that the pipes end with the worker."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def drain(self, partial: bool = False) -> None:
        """Print the complete lines received so far; with `partial`, an incomplete last line too."""
        with self._lock:
            for fd, (target, buffer) in list(self._streams.items()):
                _unfinished_fds.add(fd)
                buffer += self._read(fd)
                end = len(buffer) if partial else buffer.rfind(b"\n") + 1
                if end:
                    self._write_lines(target, bytes(buffer[:end]).decode("utf-8", "replace"))
                    del buffer[:end]
                if not buffer:
                    _unfinished_fds.discard(fd)

    @staticmethod
    def _read(fd: int) -> bytes:
        data = []
        with suppress(BlockingIOError):
            while chunk := os.read(fd, _READ_BYTES):
                data.append(chunk)
            _unregister_fd(fd)  # end of file
        return b"".join(data)

    def _write_lines(self, target: str, text: str) -> None:
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        if target == "stderr":
            self._stderr_tail.extend(lines)
        stream = getattr(sys, target)
        # The caller's stream may be None, closed, or any object. An error must not end the thread that reads the pipes:
        # a worker blocks when its pipe is full.
        with suppress(Exception):
            stream.write("".join(f"[{self._get_name()}] {line}\n" for line in lines))
            stream.flush()

    def stderr_tail(self) -> str:
        """The last lines of the worker's stderr."""
        return "\n".join(self._stderr_tail)

    def close(self) -> None:
        """Print the rest and close the pipes."""
        self.close_write_ends()
        self.drain(partial=True)
        _unregister(self, self._streams)
        with self._lock:  # the output thread may still be reading
            self.close_pipes()

    def close_pipes(self) -> None:
        """Close the pipes without printing the rest, as in a forked child."""
        self.close_write_ends()
        for fd in list(self._streams):
            del self._streams[fd]
            _unfinished_fds.discard(fd)
            os.close(fd)


class _OutputThread(threading.Thread):
    """Prints the output of all workers as it arrives."""

    def __init__(self) -> None:
        super().__init__(name="instep-output", daemon=True)
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
                if (output := _outputs_by_fd.get(fd)) is not None:
                    output.drain()

    def stop(self) -> None:
        os.eventfd_write(self.wake_fd, 1)
        self.join()
        self.close()

    def close(self) -> None:
        self.epoll.close()
        os.close(self.wake_fd)


_outputs_by_fd: dict[int, WorkerOutput] = {}
_unfinished_fds: set[int] = set()
"""Pipes that are being read, or whose last line is incomplete and not printed yet."""
_output_thread: _OutputThread | None = None


def _reset_in_child() -> None:
    """Forget workers and the output thread in a forked child. The workers belong to its parent."""
    global _output_thread
    _outputs_by_fd.clear()
    _unfinished_fds.clear()
    if _output_thread is not None:
        _output_thread.close()
        _output_thread = None


_lock = ForkSafeLock()
os.register_at_fork(after_in_child=_reset_in_child)


def _register(output: WorkerOutput, fds: Iterable[int]) -> None:
    global _output_thread
    with _lock:
        if _output_thread is None:
            _output_thread = _OutputThread()
            _output_thread.start()
        for fd in fds:
            _outputs_by_fd[fd] = output
            _output_thread.epoll.register(fd, select.EPOLLIN)


def _unregister_fd(fd: int) -> None:
    """Stop polling a pipe. At end of file it would be readable forever."""
    with suppress(OSError, ValueError, AttributeError):  # already unregistered
        _output_thread.epoll.unregister(fd)  # type: ignore[union-attr]


def _unregister(output: WorkerOutput, fds: Iterable[int]) -> None:
    """Remove pipes. The output thread ends with the last one."""
    global _output_thread
    with _lock:
        for fd in fds:
            if _outputs_by_fd.get(fd) is output:
                del _outputs_by_fd[fd]
                _unregister_fd(fd)
        ended, _output_thread = (_output_thread, None) if not _outputs_by_fd else (None, _output_thread)
    if ended is not None:
        ended.stop()


def flush_output() -> None:
    """Print everything that workers have written so far, including incomplete lines.

    A worker flushes its streams before it sends a message. After its reply has arrived, this prints all output that
    precedes the reply.
    """
    with _lock:
        # In this order: data that has left its pipe is marked in `_unfinished_fds`.
        if _output_thread is None or not (_output_thread.epoll.poll(0) or _unfinished_fds):
            return
        outputs = list(dict.fromkeys(_outputs_by_fd.values()))
    for output in outputs:
        output.drain(partial=True)
