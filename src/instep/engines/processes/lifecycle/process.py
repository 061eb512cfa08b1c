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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from instep.engines.processes.lifecycle import launch
from instep.engines.processes.lifecycle.output import WorkerOutput
from instep.engines.processes.transport.connection import Connection, ConnectionClosed, ProtocolError
from instep.errors import EngineError
from instep.runtime.allocator import MMAP_THRESHOLD_BYTES, TOP_PAD_BYTES, TRIM_THRESHOLD_BYTES

ENTRY_POINT = "instep.engines.processes.worker.server:main"
"""What a worker runs, as `module:function`; it is called with the worker's end of the connection."""

_ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES),
    "MALLOC_TOP_PAD_": str(TOP_PAD_BYTES),
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Makes a worker's allocator keep freed memory: page faults would cost more than the copy of gradients.

For larger blocks torch requests huge pages. Variables that the user has set take precedence.
"""
_PACKAGE_INIT = Path(__file__).parents[3] / "__init__.py"
_EXIT_SECONDS = 1.0
"""Seconds in which a worker that closed its connection is expected to exit."""
_STACK_SECONDS = 2.0
_REAP_SECONDS = 5.0
_POLL_SECONDS = 0.005

_SIGNAL_DESCRIPTIONS: dict[int, str] = {
    **{number: f"killed by {number.name}" for number in signal.Signals},
    signal.SIGKILL: "killed by SIGKILL, which is usually the kernel's or a container's out-of-memory killer",
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGBUS: "bus error (SIGBUS), which usually means that shared memory ran out",
    signal.SIGABRT: "aborted (SIGABRT), which is usually a failed check in native code",
    signal.SIGFPE: "arithmetic error in native code (SIGFPE)",
    signal.SIGILL: "illegal instruction (SIGILL), which is usually a library built for another processor",
    signal.SIGTERM: "terminated by SIGTERM",
}

_running: dict[int, WorkerProcess] = {}
"""Workers of this process that were not killed or reaped, by pid."""
_pending_reap: list[subprocess.Popen[bytes]] = []
"""Killed processes that have not exited yet; they are reaped later."""


class WorkerProcess:
    """A worker process and the connection to it. Only the process that started it may use it."""

    def __init__(self, name: str) -> None:
        """Start a worker without waiting for its interpreter."""
        if not sys.executable:
            raise EngineError("cannot start a worker process: sys.executable is empty.")
        _pending_reap[:] = [process for process in _pending_reap if process.poll() is None]
        self.name = name
        self.ready = False
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Pools that hold this worker. Weak, so that a dropped pool needs no finalizer, which would need a lock."""
        self.before_stop: Callable[[], object] | None = None
        """Called before the worker is asked to stop."""
        self._owner_pid = os.getpid()
        self._ready_lock = threading.Lock()
        self._exit_status: int | None = None
        self._exit_reason: str | None = None
        self._fds: dict[str, int] = {}
        with ExitStack() as opened:
            try:
                parent_end, worker_end = map(
                    opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                )
                self._output = WorkerOutput(lambda: self.name)
                opened.callback(self._output.close)
                opened.callback(self._close_fds)
                self._process = self._spawn(parent_end, worker_end)
            except OSError as error:
                raise _start_error(name, error) from error
            opened.pop_all()
            worker_end.close()
        self.pid = self._process.pid
        _running[self.pid] = self
        if (pidfd := _open_pidfd(self.pid)) is not None:
            self._fds["pidfd"] = pidfd
        self.connection = Connection(parent_end, pidfd)
        self._output.close_write_ends()

    def _spawn(self, parent_end: socket.socket, worker_end: socket.socket) -> subprocess.Popen[bytes]:
        """Start the process. Its configuration is sent first and waits in the socket."""
        life, self._fds["life"] = os.pipe()
        passed = {"life": life}
        try:
            for name in ("crash", "stacks"):
                passed[name] = self._fds[name] = os.memfd_create(f"instep-{name}", os.MFD_CLOEXEC)
            if (parent := _open_pidfd(os.getpid())) is not None:
                passed["parent"] = parent
            config = launch.encode_config(ENTRY_POINT, str(_PACKAGE_INIT), passed)
            if len(config) > launch.MAX_CONFIG_BYTES:
                raise EngineError(
                    f"cannot start a worker process: its configuration has {len(config):,} bytes; the maximum is "
                    f"{launch.MAX_CONFIG_BYTES:,}. Shorten sys.path."
                )
            parent_end.send(config)
            out, err = self._output.write_ends
            return subprocess.Popen(
                launch.worker_command(worker_end.fileno(), self.name),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[worker_end.fileno(), *passed.values()],
                env={**_ALLOCATOR_ENVIRONMENT, **launch.NATIVE_ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        finally:
            for inherited in passed.keys() & {"life", "parent"}:
                os.close(passed[inherited])

    def duplicate_pidfd(self) -> int | None:
        """A new descriptor that becomes readable when the worker exits; None if the kernel has none."""
        return os.dup(self._fds["pidfd"]) if "pidfd" in self._fds else None

    def is_owned(self) -> bool:
        """Whether this process started the worker; False in a forked child."""
        return self._owner_pid == os.getpid()

    def wait_ready(self, deadline: float) -> bool:
        """Wait until the worker is ready, or until `deadline` (of `time.monotonic`). Returns whether it is ready.

        Raises `ConnectionClosed` with the reason if the worker has exited.
        """
        self._check_owner()
        with self._ready_lock:
            while not self.ready:
                try:
                    message = self.connection.receive(max(0.0, deadline - time.monotonic()))
                except (ConnectionClosed, ProtocolError) as error:
                    reason = self.exit_reason() if isinstance(error, ConnectionClosed) else str(error)
                    raise ConnectionClosed(f"{self.name} did not start: {reason}") from None
                if message is None:
                    return False
                self.ready = message.kind == "ready"
        return True

    def is_alive(self) -> bool:
        """Whether the process runs. Does not reap it."""
        return self._poll_exit() is None

    def _poll_exit(self) -> int | None:
        """The exit status, negative for a signal as in `Popen.returncode`; None while the process runs."""
        self._check_owner()
        if self._exit_status is None and "pidfd" in self._fds and not _is_readable(self._fds["pidfd"], 0):
            return None
        if self._exit_status is None:
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                self._exit_status = _UNKNOWN_STATUS  # something in this program reaps every child
            else:
                if result is not None:
                    self._exit_status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._exit_status

    def wait_exit(self, deadline: float) -> bool:
        """Wait until the process exits, or until `deadline` (of `time.monotonic`). Returns whether it has exited."""
        while self.is_alive():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            if "pidfd" in self._fds:
                _is_readable(self._fds["pidfd"], remaining)
            else:
                time.sleep(_POLL_SECONDS)
        return True

    def exit_reason(self) -> str:
        """A description of why the process exited, for error messages."""
        self._check_owner()
        if self._exit_reason is None:
            # The connection closes a moment before the process exits.
            if not self.wait_exit(time.monotonic() + _EXIT_SECONDS):
                return "it still runs, but closed its connection"
            self._exit_reason = self._describe_exit(self._exit_status)
        return self._exit_reason

    def _describe_exit(self, status: int | None) -> str:
        if status is None or status == _UNKNOWN_STATUS:
            return "exited with an unknown status, because something in this program reaps every child process"
        if status >= 0:
            self._output.drain()
            stderr = self._output.stderr_tail()
            return f"exited with status {status}" + (f" after printing:\n{stderr}" if status and stderr else "")
        description = _SIGNAL_DESCRIPTIONS.get(-status, f"killed by signal {-status}")
        crash = self._fds.get("crash")  # closed if another thread has killed the worker
        stack = "" if crash is None else _read_stacks(crash)
        return f"{description}, at:\n{stack}" if stack else description

    def python_stacks(self) -> str:
        """The current Python stacks of the worker's threads, even if it hangs in native code."""
        if not self.is_alive():
            return f"It has exited: {self.exit_reason()}."
        if not _has_signal_handler(self.pid, signal.SIGUSR1):  # the signal would kill it
            return "Its interpreter is still starting."
        fd = self._fds["stacks"]
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        os.kill(self.pid, signal.SIGUSR1)
        deadline, text, before = time.monotonic() + _STACK_SECONDS, "", None
        while (not text or text != before) and time.monotonic() < deadline:  # until it is complete
            time.sleep(10 * _POLL_SECONDS)
            before, text = text, _read_stacks(fd)
        return text or "It does not respond to signals: it is stopped, or blocked in the kernel."

    def request_stop(self) -> None:
        """Ask the worker to stop, without waiting. Kills one that has not started."""
        if self.is_owned() and self.ready and self.pid in _running:
            with suppress(ConnectionClosed, TimeoutError, EngineError, OSError):
                self.connection.send("stop", timeout=0)
        else:
            self.kill()

    def kill(self, reason: str = "killed by this process") -> None:
        """Kill the worker and the processes that it started, and reap it. Does nothing in a forked child."""
        if not self.is_owned() or _running.pop(self.pid, None) is None:
            return
        if self.is_alive():
            self._exit_reason = reason
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
        """In a forked child: close the descriptors of the parent's worker and leave the worker alone."""
        self.connection.close()
        self._output.close_pipes()
        self._close_fds()
        self._process.returncode = 0  # not a child of this process: Popen must not wait for it

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _check_owner(self) -> None:
        if not self.is_owned():
            raise EngineError(
                f"{self.name} is a worker of the process that this one was forked from. Create a new wrapper here."
            )


_UNKNOWN_STATUS = 1 << 16


def _start_error(name: str, error: OSError) -> EngineError:
    out_of_fds = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = "\nRaise `ulimit -n`, or close files that this program holds open." if out_of_fds else ""
    return EngineError(f"cannot start a worker process for {name}: {error}.{hint}")


def running_workers() -> list[WorkerProcess]:
    """Workers of this process that were not killed."""
    return list(_running.values())


def _detach_workers_in_child() -> None:
    for worker in running_workers():
        worker.detach()
    _running.clear()
    _pending_reap.clear()


os.register_at_fork(after_in_child=_detach_workers_in_child)


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process exits; None if the system cannot provide one."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read_stacks(fd: int) -> str:
    """The stacks that faulthandler wrote, without the thread that watches the parent and the list of libraries."""
    text = os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace")
    parts = (part.strip() for part in text.split("\n\n"))
    hidden = "in wait_for_parent_exit"  # a function of bootstrap.py
    return "\n".join(part for part in parts if hidden not in part and not part.startswith("Extension mod"))


def _has_signal_handler(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
