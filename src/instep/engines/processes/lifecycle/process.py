"""One worker process: starting, watching and ending it, and why it exited."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

from instep.engines.processes.lifecycle import launch
from instep.engines.processes.lifecycle.output import WorkerOutput
from instep.engines.processes.transport.connection import Connection, ConnectionClosed, ProtocolError
from instep.errors import EngineError
from instep.runtime.allocator import MMAP_THRESHOLD_BYTES, TOP_PAD_BYTES, TRIM_THRESHOLD_BYTES

ENTRY_POINT = "instep.engines.processes.worker.server:main"
"""What a worker runs when it is up, as `module:function`; it is called with the worker's end of the line."""

_ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES),
    "MALLOC_TOP_PAD_": str(TOP_PAD_BYTES),
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""A worker keeps the memory of a step for the next one, where new pages would take longer than the copy of gradients.

What is larger than the C library keeps, torch asks large pages for. Settings of the user's own come first.
"""
_PACKAGE_INIT = Path(__file__).parents[3] / "__init__.py"
_STOP_SECONDS = 1.0
_STACK_SECONDS = 2.0
_REAP_SECONDS = 5.0
_POLL_SECONDS = 0.005

_SIGNAL_DESCRIPTIONS = {
    signal.SIGKILL: "killed by SIGKILL, which is usually the kernel's or a container's out-of-memory killer",
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGBUS: "bus error (SIGBUS), which is usually shared memory that could not be had",
    signal.SIGABRT: "aborted (SIGABRT), which is usually a check in native code",
    signal.SIGFPE: "arithmetic error in native code (SIGFPE)",
    signal.SIGILL: "illegal instruction (SIGILL), which is usually a library built for another processor",
    signal.SIGTERM: "ended by SIGTERM, which somebody sent",
}

_running: dict[int, WorkerProcess] = {}
"""The workers of this process that were not yet collected, by pid."""
_pending_reap: list[subprocess.Popen[bytes]] = []
"""Those that the kernel could not end in time; they are collected when they have ended."""


class WorkerProcess:
    """One worker process and the line to it. It belongs to the process that started it."""

    def __init__(self, name: str, main: str) -> None:
        """Use `Worker.start`."""
        if not sys.executable:
            raise EngineError("no worker can be started: this program does not say what its interpreter is.")
        _pending_reap[:] = [process for process in _pending_reap if process.poll() is None]
        self.name = name
        self.ready = False
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Whoever holds it; one that is dropped is none, without a finalizer that would need a lock."""
        self._owner_pid = os.getpid()
        self._ready_lock = threading.Lock()
        self._exit_status: int | None = None
        self._exit_reason: str | None = None
        self._fds: dict[str, int] = {}
        with ExitStack() as opened:
            try:
                near, far = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                self._output = WorkerOutput(lambda: self.name)
                opened.callback(self._output.close)
                opened.callback(self._close_fds)
                self._process = self._spawn(main, near, far)
            except OSError as error:
                raise _start_error(name, error) from error
            opened.pop_all()
            far.close()
        self.pid = self._process.pid
        _running[self.pid] = self
        if (pidfd := _open_pidfd(self.pid)) is not None:
            self._fds["pidfd"] = pidfd
        self.connection = Connection(near, pidfd)
        self._output.close_write_ends()

    @classmethod
    def start(cls, name: str, main: str | None = None) -> WorkerProcess:
        """A new worker. This returns at once; its interpreter comes up in parallel."""
        return cls(name, main or ENTRY_POINT)

    def _spawn(self, main: str, near: socket.socket, far: socket.socket) -> subprocess.Popen[bytes]:
        """The process, with what it inherits; the first frame waits for it on the line."""
        life, self._fds["life"] = os.pipe()
        passed = {"life": life}
        try:
            for memory in ("crash", "stacks"):
                passed[memory] = self._fds[memory] = os.memfd_create(f"instep-{memory}", os.MFD_CLOEXEC)
            if (parent := _open_pidfd(os.getpid())) is not None:
                passed["parent"] = parent
            frame = launch.encode_config(main, str(_PACKAGE_INIT), passed)
            if len(frame) > launch.MAX_CONFIG_BYTES:
                raise EngineError(f"no worker can be started: sys.path is {len(frame):,} bytes long.")
            near.send(frame)
            out, err = self._output.write_ends
            return subprocess.Popen(
                launch.worker_command(far.fileno(), self.name),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[far.fileno(), *passed.values()],
                env={**_ALLOCATOR_ENVIRONMENT, **launch.NATIVE_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        finally:
            for word in passed.keys() & {"life", "parent"}:
                os.close(passed[word])

    def is_owned(self) -> bool:
        """Whether this process started it, and not one that this process was forked from."""
        return self._owner_pid == os.getpid()

    def wait_ready(self, deadline: float) -> bool:
        """Whether it is ready by then (a moment of `time.monotonic`); `Gone` with the reason where it ended instead."""
        self._check_owner()
        with self._ready_lock:
            while not self.ready:
                try:
                    message = self.connection.receive(max(0.0, deadline - time.monotonic()))
                except (ConnectionClosed, ProtocolError) as error:
                    why = self.exit_reason() if isinstance(error, ConnectionClosed) else str(error)
                    raise ConnectionClosed(f"{self.name} did not come up: {why}") from None
                if message is None:
                    return False
                self.ready = message.kind == "ready"
        return True

    def is_alive(self) -> bool:
        """Whether the process runs; it is not collected by asking."""
        return self._poll_exit() is None

    def _poll_exit(self) -> int | None:
        """How it ended, as Popen writes it: minus a signal, or a status; None while it runs."""
        self._check_owner()
        if self._exit_status is None and "pidfd" in self._fds and not _is_readable(self._fds["pidfd"], 0):
            return None
        if self._exit_status is None:
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                self._exit_status = _UNKNOWN_STATUS  # something in this program collects every child
            else:
                if result is not None:
                    self._exit_status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._exit_status

    def wait_exit(self, deadline: float) -> bool:
        """Whether it has ended by then (a moment of `time.monotonic`)."""
        while self.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if "pidfd" in self._fds:
                _is_readable(self._fds["pidfd"], left)
            else:
                time.sleep(_POLL_SECONDS)
        return True

    def exit_reason(self) -> str:
        """Why it ended, in words."""
        self._check_owner()
        if self._exit_reason is None:
            # The line ends a moment before the process does.
            if not self.wait_exit(time.monotonic() + _STOP_SECONDS):
                return "it still runs, and closed its line"
            self._exit_reason = self._describe_exit(self._exit_status)
        return self._exit_reason

    def _describe_exit(self, status: int | None) -> str:
        if status is None or status == _UNKNOWN_STATUS:
            return "ended; how is not known, because something in this program collects every child process"
        if status >= 0:
            self._output.drain()
            printed = self._output.tail()
            return f"exited with status {status}" + (f", having printed:\n{printed}" if status and printed else "")
        number = -status
        known = number in signal.valid_signals() and number <= signal.SIGSYS
        words = _SIGNAL_DESCRIPTIONS.get(signal.Signals(number)) if known else None
        words = words or f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
        crash = self._fds.get("crash")  # another thread may have seen to its end
        stack = "" if crash is None else _read_stacks(crash)
        return f"{words}, at:\n{stack}" if stack else words

    def python_stacks(self) -> str:
        """The Python stacks that it stands in now, also where it hangs in native code."""
        if not self.is_alive():
            return f"It has ended: {self.exit_reason()}."
        if not _has_signal_handler(self.pid, signal.SIGUSR1):  # the signal would end it
            return "Its interpreter is still coming up."
        memory = self._fds["stacks"]
        os.ftruncate(memory, 0)
        os.lseek(memory, 0, os.SEEK_SET)
        os.kill(self.pid, signal.SIGUSR1)
        deadline, text, before = time.monotonic() + _STACK_SECONDS, "", None
        while (not text or text != before) and time.monotonic() < deadline:
            time.sleep(10 * _POLL_SECONDS)
            before, text = text, _read_stacks(memory)
        return text or "It does not answer a signal: it is stopped, or waits in the kernel."

    def request_stop(self) -> None:
        """Ask it to end; one that does not listen, or is not up yet, is not waited for."""
        if self.is_owned() and self.ready and self.pid in _running:
            with suppress(ConnectionClosed, TimeoutError, EngineError, OSError):
                self.connection.send("stop", timeout=0)
        else:
            self.kill()

    def stop(self) -> None:
        """Ask it to end, and end it after a short while."""
        self.request_stop()
        if self.is_owned() and self.pid in _running:
            self.wait_exit(time.monotonic() + _STOP_SECONDS)
        self.kill()

    def kill(self, why: str = "ended by this process") -> None:
        """End it, with whatever it has started itself, and collect it. A forked child ends nothing of its parent's."""
        if not self.is_owned() or _running.pop(self.pid, None) is None:
            return
        if self.is_alive():
            self._exit_reason = why
        else:
            self.exit_reason()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            _pending_reap.append(self._process)
        if self._exit_status is None:
            self._exit_status = self._process.returncode
        self.connection.close()
        self._output.close()
        self._close_fds()

    def detach(self) -> None:
        """In a forked child: hold nothing of the parent's worker open, and do nothing to it."""
        self.connection.close()
        self._output.close_pipes()
        self._close_fds()
        self._process.returncode = 0  # it is not this process's to collect

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _check_owner(self) -> None:
        if not self.is_owned():
            raise EngineError(
                f"{self.name} is a worker of the process that this one was forked from; make a new wrapper here."
            )


_UNKNOWN_STATUS = 1 << 16


def _start_error(name: str, error: OSError) -> EngineError:
    full = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = "\nLook at `ulimit -n`, and at what this program holds open." if full else ""
    return EngineError(f"no worker process could be started for {name}: {error}.{hint}")


def running_workers() -> list[WorkerProcess]:
    """Every worker of this process that was not ended."""
    return list(_running.values())


def _detach_workers_in_child() -> None:
    for worker in running_workers():
        worker.detach()
    _running.clear()
    _pending_reap.clear()


os.register_at_fork(after_in_child=_detach_workers_in_child)


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable when a process has ended; None where the system has none to give."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read_stacks(memory: int) -> str:
    """The stacks that faulthandler wrote, but for the thread that watches the parent and the list of libraries."""
    text = os.pread(memory, os.fstat(memory).st_size, 0).decode("utf-8", "replace")
    parts = (part.strip() for part in text.split("\n\n"))
    return "\n".join(part for part in parts if "in until_it_ends" not in part and not part.startswith("Extension mod"))


def _has_signal_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
