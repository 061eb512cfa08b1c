"""One worker process: started, watched, asked where it stands, ended, and what it died of."""

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

from instep.engines.pages import AHEAD, KEPT, LARGEST
from instep.engines.processes import boot
from instep.engines.processes.prints import Printed
from instep.engines.processes.wire import Garbled, Gone, Line
from instep.errors import EngineError

MAIN = "instep.engines.processes.worker:main"
"""What a worker runs when it is up, as `module:function`; it is called with the worker's end of the line."""

_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(LARGEST),
    "MALLOC_TRIM_THRESHOLD_": str(KEPT),
    "MALLOC_TOP_PAD_": str(AHEAD),
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""A worker keeps the memory of a step for the next one, where new pages would take longer than the copy of gradients.

What is larger than the C library keeps, torch asks large pages for. Settings of the user's own come first.
"""
_PACKAGE = Path(__file__).parents[2] / "__init__.py"
_STOP_SECONDS = 1.0
_STACK_SECONDS = 2.0
_REAP_SECONDS = 5.0
_GLANCE = 0.005

_MEANINGS = {
    signal.SIGKILL: "killed by SIGKILL, which is usually the kernel's or a container's out-of-memory killer",
    signal.SIGSEGV: "segmentation fault (SIGSEGV)",
    signal.SIGBUS: "bus error (SIGBUS), which is usually shared memory that could not be had",
    signal.SIGABRT: "aborted (SIGABRT), which is usually a check in native code",
    signal.SIGFPE: "arithmetic error in native code (SIGFPE)",
    signal.SIGILL: "illegal instruction (SIGILL), which is usually a library built for another processor",
    signal.SIGTERM: "ended by SIGTERM, which somebody sent",
}

_started: dict[int, Worker] = {}
"""The workers of this process that were not yet collected, by pid."""
_lingering: list[subprocess.Popen[bytes]] = []
"""Those that the kernel could not end in time; they are collected when they have ended."""


class Worker:
    """One worker process and the line to it. It belongs to the process that started it."""

    def __init__(self, name: str, main: str) -> None:
        """Use `Worker.start`."""
        if not sys.executable:
            raise EngineError("no worker can be started: this program does not say what its interpreter is.")
        _lingering[:] = [process for process in _lingering if process.poll() is None]
        self.name = name
        self.ready = False
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        """Whoever holds it; one that is dropped is none, without a finalizer that would need a lock."""
        self._owner = os.getpid()
        self._coming_up = threading.Lock()
        self._status: int | None = None
        self._death: str | None = None
        self._fds: dict[str, int] = {}
        with ExitStack() as opened:
            try:
                near, far = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                self._printed = Printed(lambda: self.name)
                opened.callback(self._printed.close)
                opened.callback(self._close_fds)
                self._process = self._spawn(main, near, far)
            except OSError as error:
                raise _not_started(name, error) from error
            opened.pop_all()
            far.close()
        self.pid = self._process.pid
        _started[self.pid] = self
        if (pidfd := _pidfd(self.pid)) is not None:
            self._fds["pidfd"] = pidfd
        self.line = Line(near, pidfd)
        self._printed.close_write_ends()

    @classmethod
    def start(cls, name: str, main: str | None = None) -> Worker:
        """A new worker. This returns at once; its interpreter comes up in parallel."""
        return cls(name, main or MAIN)

    def _spawn(self, main: str, near: socket.socket, far: socket.socket) -> subprocess.Popen[bytes]:
        """The process, with what it inherits; the first frame waits for it on the line."""
        life, self._fds["life"] = os.pipe()
        passed = {"life": life}
        try:
            for memory in ("crash", "stacks"):
                passed[memory] = self._fds[memory] = os.memfd_create(f"instep-{memory}", os.MFD_CLOEXEC)
            if (parent := _pidfd(os.getpid())) is not None:
                passed["parent"] = parent
            frame = boot.first_frame(main, str(_PACKAGE), passed)
            if len(frame) > boot.LONGEST:
                raise EngineError(f"no worker can be started: sys.path is {len(frame):,} bytes long.")
            near.send(frame)
            out, err = self._printed.write_ends
            return subprocess.Popen(
                boot.command(far.fileno(), self.name),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[far.fileno(), *passed.values()],
                env={**_MEMORY, **boot.NATIVE, **os.environ},
                start_new_session=True,
            )
        finally:
            for word in passed.keys() & {"life", "parent"}:
                os.close(passed[word])

    def own(self) -> bool:
        """Whether this process started it, and not one that this process was forked from."""
        return self._owner == os.getpid()

    def comes_up(self, deadline: float) -> bool:
        """Whether it is ready by then (a moment of `time.monotonic`); `Gone` with the reason where it ended instead."""
        self._check_own()
        with self._coming_up:
            while not self.ready:
                try:
                    message = self.line.receive(max(0.0, deadline - time.monotonic()))
                except (Gone, Garbled) as error:
                    why = self.death() if isinstance(error, Gone) else str(error)
                    raise Gone(f"{self.name} did not come up: {why}") from None
                if message is None:
                    return False
                self.ready = message.kind == "ready"
        return True

    def alive(self) -> bool:
        """Whether the process runs; it is not collected by asking."""
        return self._ended() is None

    def _ended(self) -> int | None:
        """How it ended, as Popen writes it: minus a signal, or a status; None while it runs."""
        self._check_own()
        if self._status is None and "pidfd" in self._fds and not _readable(self._fds["pidfd"], 0):
            return None
        if self._status is None:
            try:
                result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                self._status = _UNKNOWN  # something in this program collects every child
            else:
                if result is not None:
                    self._status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return self._status

    def wait_end(self, deadline: float) -> bool:
        """Whether it has ended by then (a moment of `time.monotonic`)."""
        while self.alive():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if "pidfd" in self._fds:
                _readable(self._fds["pidfd"], left)
            else:
                time.sleep(_GLANCE)
        return True

    def death(self) -> str:
        """Why it ended, in words."""
        self._check_own()
        if self._death is None:
            # The line ends a moment before the process does.
            if not self.wait_end(time.monotonic() + _STOP_SECONDS):
                return "it still runs, and closed its line"
            self._death = self._words(self._status)
        return self._death

    def _words(self, status: int | None) -> str:
        if status is None or status == _UNKNOWN:
            return "ended; how is not known, because something in this program collects every child process"
        if status >= 0:
            self._printed.drain()
            printed = self._printed.tail()
            return f"exited with status {status}" + (f", having printed:\n{printed}" if status and printed else "")
        number = -status
        known = number in signal.valid_signals() and number <= signal.SIGSYS
        words = _MEANINGS.get(signal.Signals(number)) if known else None
        words = words or f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
        crash = self._fds.get("crash")  # another thread may have seen to its end
        stack = "" if crash is None else _stacks(crash)
        return f"{words}, at:\n{stack}" if stack else words

    def stack(self) -> str:
        """The Python stacks that it stands in now, also where it hangs in native code."""
        if not self.alive():
            return f"It has ended: {self.death()}."
        if not _handles(self.pid, signal.SIGUSR1):  # the signal would end it
            return "Its interpreter is still coming up."
        memory = self._fds["stacks"]
        os.ftruncate(memory, 0)
        os.lseek(memory, 0, os.SEEK_SET)
        os.kill(self.pid, signal.SIGUSR1)
        deadline, text, before = time.monotonic() + _STACK_SECONDS, "", None
        while (not text or text != before) and time.monotonic() < deadline:
            time.sleep(10 * _GLANCE)
            before, text = text, _stacks(memory)
        return text or "It does not answer a signal: it is stopped, or waits in the kernel."

    def ask_to_stop(self) -> None:
        """Ask it to end; one that does not listen, or is not up yet, is not waited for."""
        if self.own() and self.ready and self.pid in _started:
            with suppress(Gone, TimeoutError, EngineError, OSError):
                self.line.send("stop", timeout=0)
        else:
            self.kill()

    def stop(self) -> None:
        """Ask it to end, and end it after a short while."""
        self.ask_to_stop()
        if self.own() and self.pid in _started:
            self.wait_end(time.monotonic() + _STOP_SECONDS)
        self.kill()

    def kill(self, why: str = "ended by this process") -> None:
        """End it, with whatever it has started itself, and collect it. A forked child ends nothing of its parent's."""
        if not self.own() or _started.pop(self.pid, None) is None:
            return
        if self.alive():
            self._death = why
        else:
            self.death()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            _lingering.append(self._process)
        if self._status is None:
            self._status = self._process.returncode
        self.line.close()
        self._printed.close()
        self._close_fds()

    def abandon(self) -> None:
        """In a forked child: hold nothing of the parent's worker open, and do nothing to it."""
        self.line.close()
        self._printed.abandon()
        self._close_fds()
        self._process.returncode = 0  # it is not this process's to collect

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _check_own(self) -> None:
        if not self.own():
            raise EngineError(
                f"{self.name} is a worker of the process that this one was forked from; make a new wrapper here."
            )


_UNKNOWN = 1 << 16


def _not_started(name: str, error: OSError) -> EngineError:
    full = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = "\nLook at `ulimit -n`, and at what this program holds open." if full else ""
    return EngineError(f"no worker process could be started for {name}: {error}.{hint}")


def own_workers() -> list[Worker]:
    """Every worker of this process that was not ended."""
    return list(_started.values())


def _in_child() -> None:
    for worker in own_workers():
        worker.abandon()
    _started.clear()
    _lingering.clear()


os.register_at_fork(after_in_child=_in_child)


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable when a process has ended; None where the system has none to give."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _stacks(memory: int) -> str:
    """The stacks that faulthandler wrote, but for the thread that watches the parent and the list of libraries."""
    text = os.pread(memory, os.fstat(memory).st_size, 0).decode("utf-8", "replace")
    parts = (part.strip() for part in text.split("\n\n"))
    return "\n".join(part for part in parts if "in until_it_ends" not in part and not part.startswith("Extension mod"))


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
