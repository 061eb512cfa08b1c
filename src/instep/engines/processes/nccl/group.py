"""A private NCCL process group for the parent and its workers, abortable from any thread.

Members find each other through a store in an anonymous memory file whose descriptor each of them receives. Nothing is
in the file system, and no other process can join. NCCL's sockets are restricted to the loopback interface.

If a member dies, the others would wait in a collective forever. Any thread that notices calls `abort`, which signals an
eventfd that all members poll and aborts the group for all of them.
"""

from __future__ import annotations

import ctypes
import math
import os
import pkgutil
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.engines.processes.messages import JoinGroupRequest
from instep.engines.processes.transport.copy_streams import synchronize_stream
from instep.errors import EngineError
from instep.runtime.locks import ForkSafeLock, start_thread
from instep.runtime.torch_private import abort_group, make_file_store, make_gloo_group, make_nccl_group

CONNECT_SECONDS = 60
"""Timeout for members to connect."""

NCCL_ENVIRONMENT: dict[str, str | None] = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_COMM_ID": None,
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(CONNECT_SECONDS),
}
"""NCCL listens on loopback only, and torch does not terminate a process because a group failed.

TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC: torch sleeps for four times this value, a minute by default, before it releases a
group that has failed.
"""


_original_values: dict[str, str | None] = {}
"""Original values of overridden environment variables."""
_num_overrides = 0


@contextmanager
def override_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables. Of several threads in this block, the last one to leave restores them."""
    global _num_overrides
    with _environment_lock:
        _num_overrides += 1
        for name, value in values.items():
            _original_values.setdefault(name, os.environ.get(name))
            _set_variable(name, value)
    try:
        yield
    finally:
        with _environment_lock:
            _num_overrides -= 1
            if _num_overrides <= 0:
                _restore_environment()


def _restore_environment() -> None:
    global _num_overrides
    _num_overrides = 0
    while _original_values:
        _set_variable(*_original_values.popitem())


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


_environment_lock = ForkSafeLock(_restore_environment)

_GROUP_FACTORIES: dict[str, Callable[..., Any]] = {"nccl": make_nccl_group, "gloo": make_gloo_group}
_POLL_SECONDS = 0.02
_ABORT_SECONDS = 60
"""How long an abort waits for the last collective."""
_QUEUE_SECONDS = 1.0
"""How long an abort waits for a thread that is queueing a collective."""
_TIMEOUT = timedelta(minutes=10)


def _group_factory(backend: str) -> Callable[..., Any]:
    """The function that creates a group; for tests and benchmarks, that of another backend as `module:function`."""
    factory: Callable[..., Any] = _GROUP_FACTORIES.get(backend) or pkgutil.resolve_name(backend)
    return factory


class GroupAborted(EngineError):
    """An NCCL group was aborted. Its tensors are sent through host memory or a new group instead."""


class NcclGroup:
    """One member's handle of an NCCL group (gloo in tests without GPUs)."""

    def __init__(self, config: JoinGroupRequest, store: int, abort_fd: int) -> None:
        """Takes ownership of the descriptors of the store and of the eventfd that signals an abort."""
        self.rank, self.size, self.device = config.rank, config.world_size, config.device
        self.abort_reason = ""
        """Empty unless the group was aborted."""
        self.last_sequence_number = config.sequence_base
        self._config, self._store_fd, self._abort_fd = config, store, abort_fd
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._backend: _Backend | None = None
        self._init_done = threading.Event()
        self._init_error: Exception | None = None
        self.last_end: torch.cuda.Event | None = None
        """The end, on the device, of the last collective in which all members take part: an abort waits for it."""

    def connect(self) -> None:
        """Connect to the other members. Raises `GroupAborted` on failure, or if the group is aborted meanwhile.

        Waiting for a missing member cannot be interrupted. It is done in a thread, which is abandoned on abort and
        ends after a timeout.
        """
        with override_environment(self._config.environment):
            start_thread(threading.Thread(target=self._watch_abort, name="instep-abort", daemon=True))
            start_thread(threading.Thread(target=self._init_backend, name="instep-group", daemon=True))
            while not self._init_done.wait(_POLL_SECONDS) and not self.abort_reason:
                pass
        if self._init_error is not None:
            self.abort(str(self._init_error))
        self.raise_if_aborted()

    def _init_backend(self) -> None:
        backend = _Backend(self._store_fd)
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            store = make_file_store(f"/proc/self/fd/{self._store_fd}", self.size)
            backend.group = _group_factory(self._config.backend)(store, self.rank, self.size, _TIMEOUT)
            tensor = torch.zeros(1, device=self.device)
            # The first collective of each kind opens connections, which may block.
            backend.broadcast(tensor)
            backend.reduce(tensor)
            synchronize_stream(self.device)
        except Exception as error:
            self._init_error = error
        with self._lock:
            if not self.abort_reason:
                self._backend = backend
        if self.abort_reason and backend.group is not None:
            backend.abort()
        self._init_done.set()

    def _watch_abort(self) -> None:
        """Abort the group when another member does."""
        poll = select.poll()
        poll.register(self._abort_fd, select.POLLIN)
        poll.poll()
        self.abort("another member aborted the group", at_once=True)
        os.close(self._abort_fd)

    def broadcast(self, tensor: Tensor) -> None:
        """Broadcast from rank 0. Makes the current stream wait, not this thread."""
        self._run("broadcast", tensor)

    def reduce(self, tensor: Tensor) -> None:
        """Sum to rank 0. Makes the current stream wait, not this thread."""
        self._run("reduce", tensor)

    def start_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum to rank 0. Returns a function that makes the current stream wait for it, not this thread.

        On the CPU, that function does it all: Gloo cannot abort what it has started.
        """
        if self.device.type == "cpu":
            return partial(self.reduce, tensor)
        wait = self._run("start_reduce", tensor)

        def wait_for_sum() -> None:
            try:
                wait()
            except RuntimeError as error:
                raise GroupAborted(str(error)) from error

        return wait_for_sum

    def _run(self, operation: str, tensor: Tensor) -> Any:
        backend = self._backend
        if backend is None:
            raise GroupAborted(self.abort_reason or "the group is not connected")
        try:
            return getattr(backend, operation)(tensor)
        except RuntimeError as error:
            raise GroupAborted(str(error)) from error

    @contextmanager
    def collective(self, sequence_number: int) -> Iterator[None]:
        """Run the collective with this sequence number. Aborts the group on an exception or a number out of order."""
        try:
            self.begin(sequence_number)
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def begin(self, sequence_number: int) -> None:
        """Begin the collective with this sequence number. A number out of order aborts the group."""
        self.raise_if_aborted()
        if sequence_number != self.last_sequence_number + 1:
            self.abort(f"collective {sequence_number} follows {self.last_sequence_number}")
            self.raise_if_aborted()
        self.last_sequence_number = sequence_number

    def record_end(self) -> torch.cuda.Event | None:
        """The end of a collective that the current stream waits for; None on the CPU, where it has ended."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def raise_if_aborted(self) -> None:
        """Raise `GroupAborted` if the group was aborted: earlier collectives may be incomplete."""
        if self.abort_reason:
            raise GroupAborted(self.abort_reason)

    def is_aborted(self) -> bool:
        """Whether any member has aborted the group, also if the thread that watches for that has not noticed it yet."""
        with self._lock:
            if self.abort_reason:
                return True
            poll = select.poll()
            poll.register(self._abort_fd, select.POLLIN)  # open until the watching thread has set the reason
            return bool(poll.poll(0))

    def abort(self, reason: str, *, at_once: bool = False) -> None:
        """Abort the group for all members; nothing waits for it any longer, on the host or on a device.

        The collective that ends at `last_end` completes before, unless it cannot because a member is lost: then the
        group is aborted `at_once`. In a forked child the parent's group is left alone.
        """
        if self._owner_pid != os.getpid():
            self.abort_reason = reason
            return
        if not at_once:
            self.wait_for_last_end(_ABORT_SECONDS)
        with self._lock:
            if self.abort_reason:
                return
            self.abort_reason = reason or "it was aborted"
            os.eventfd_write(self._abort_fd, 1)
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def wait_for_last_end(self, seconds: float = math.inf) -> None:
        """Wait in this thread until the last collective is complete, or the group is aborted."""
        event, deadline = self.last_end, time.monotonic() + seconds
        with suppress(RuntimeError):  # the device has failed
            while event is not None and not self.abort_reason and time.monotonic() < deadline and not event.query():
                time.sleep(0.001)


class _Backend:
    """Torch's process group. Keeps the store's descriptor open, because the store opens it again by number."""

    def __init__(self, store: int) -> None:
        self.group: Any = None
        self._store_fd = store
        self._queueing = threading.Lock()
        """Held while a collective is queued: an abort would free what that uses."""
        _live_backends.add(self)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._queueing:
            work = self.group.broadcast([tensor], options)
        work.wait()

    def reduce(self, tensor: Tensor) -> None:
        self.start_reduce(tensor)()

    def start_reduce(self, tensor: Tensor) -> Callable[[], None]:
        options = dist.ReduceOptions()
        options.rootRank = options.rootTensor = 0
        with self._queueing:
            work = self.group.reduce([tensor], options)
        return _Started(self, work).wait

    def abort(self) -> None:
        """Abort the running collectives. One that is stuck while it is queued, because a member is lost, ends too."""
        is_idle = self._queueing.acquire(timeout=_QUEUE_SECONDS)
        try:
            with suppress(RuntimeError):  # it has already failed
                abort_group(self.group)
        finally:
            if is_idle:
                self._queueing.release()

    def __del__(self) -> None:
        self.group = None
        with suppress(OSError):
            os.close(self._store_fd)


class _Started:
    """A collective that was started. Keeps the backend alive, because torch's object refers to its store."""

    def __init__(self, backend: _Backend, work: Any) -> None:
        self._backend, self._work = backend, work

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self._work.wait()

    def __del__(self) -> None:
        self._work = None  # before the backend, which closes the store's descriptor


_live_backends: weakref.WeakSet[_Backend] = weakref.WeakSet()


def _keep_backends_in_child() -> None:
    """Never destroy a backend in a forked child: its destructor waits for threads that do not exist there."""
    for backend in list(_live_backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_keep_backends_in_child)
