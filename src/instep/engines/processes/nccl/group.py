"""A private NCCL process group for the parent and its workers, abortable from any thread."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
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
"""Members that have not met by then do not come."""

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
"""What NCCL listens on is loopback, nothing else of it listens, and torch ends no process because of a group.

The last but one: torch sleeps four times as long before it lets go of a group that has failed, a minute by default.
"""


class EnvironmentOverride:
    """Values in force from when this is made until `put_back`; where several are, the first one's came before all."""

    def __init__(self, wanted: Mapping[str, str | None]) -> None:
        with _environment_lock:
            for name, value in wanted.items():
                _original_values.setdefault(name, os.environ.get(name))
                _set_variable(name, value)
            _active_overrides.append(self)

    def restore(self) -> None:
        """The environment is the user's own again, unless another one is in force."""
        with _environment_lock:
            if self in _active_overrides:
                _active_overrides.remove(self)
            if not _active_overrides:
                while _original_values:
                    _set_variable(*_original_values.popitem())


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _reset_overrides() -> None:
    _active_overrides.clear()
    while _original_values:
        _set_variable(*_original_values.popitem())


_active_overrides: list[EnvironmentOverride] = []
_original_values: dict[str, str | None] = {}
_environment_lock = ForkSafeLock(_reset_overrides)

_GROUP_FACTORIES = {"nccl": make_nccl_group, "gloo": make_gloo_group}
_POLL_SECONDS = 0.02
_TIMEOUT = timedelta(minutes=10)


class GroupAborted(EngineError):
    """A group was given up; what it was to bring comes by host memory instead, or in another group."""


class NcclGroup:
    """One member's place in a group."""

    def __init__(self, order: JoinGroupRequest, store: int, bell: int) -> None:
        """The descriptors of the common memory and of the bell belong to this object from now on."""
        self.rank, self.size, self.device = order.rank, order.world_size, order.device
        self.abort_reason = ""
        """Why it was given up; empty as long as it was not."""
        self.last_sequence_number = order.sequence_base
        """The number of the last collective."""
        self._config, self._store_fd, self._abort_fd = order, store, bell
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._backend: _Backend | None = None
        self._init_done = threading.Event()
        self._init_error: Exception | None = None

    def connect(self) -> None:
        """Meet the other members; `Broken` where that fails, or where the group is given up meanwhile.

        Whoever waits for a member that does not come cannot be interrupted: that is done by a thread of its own, which
        is left to itself then and ends after a while.
        """
        variables = EnvironmentOverride(self._config.environment)
        try:
            start_thread(threading.Thread(target=self._watch_abort, name="instep-bell", daemon=True))
            start_thread(threading.Thread(target=self._init_backend, name="instep-group", daemon=True))
            while not self._init_done.wait(_POLL_SECONDS) and not self.abort_reason:
                pass
        finally:
            variables.restore()
        if self._init_error is not None:
            self.abort(str(self._init_error))
        self.raise_if_aborted()

    def _init_backend(self) -> None:
        backend = _Backend(self._store_fd)
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            store = make_file_store(f"/proc/self/fd/{self._store_fd}", self.size)
            backend.group = _GROUP_FACTORIES[self._config.backend](store, self.rank, self.size, _TIMEOUT)
            first = torch.zeros(1, device=self.device)
            # Connections are made by the first collective of each kind, for which one may have to wait.
            backend.broadcast(first)
            backend.reduce(first)
            synchronize_stream(self.device)
        except Exception as error:
            self._init_error = error
        with self._lock:
            if not self.abort_reason:
                self._backend = backend
        if self.abort_reason and backend.group is not None:
            _abort_backend(backend)
        self._init_done.set()

    def _watch_abort(self) -> None:
        """Give the group up when another member does."""
        watch = select.poll()
        watch.register(self._abort_fd, select.POLLIN)
        watch.poll()
        self.abort("another member gave the group up")
        os.close(self._abort_fd)

    def broadcast(self, tensor: Tensor) -> None:
        """Every member gets the first one's values; the current stream waits for it, this thread does not."""
        self._run("broadcast", tensor)

    def reduce(self, tensor: Tensor) -> None:
        """The first member gets the sum over all; the current stream waits for it, this thread does not."""
        self._run("reduce", tensor)

    def _run(self, what: str, tensor: Tensor) -> None:
        backend = self._backend
        if backend is None:
            raise GroupAborted(self.abort_reason or "the group was not made")
        try:
            getattr(backend, what)(tensor)
        except RuntimeError as error:
            raise GroupAborted(str(error)) from error

    @contextmanager
    def collective(self, ticket: int) -> Iterator[None]:
        """The collective with this number; whoever cannot take part in it, or not at this point, ends the group."""
        try:
            self.raise_if_aborted()
            if ticket != self.last_sequence_number + 1:
                raise GroupAborted(f"collective {ticket} came after {self.last_sequence_number}")
            self.last_sequence_number = ticket
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def raise_if_aborted(self) -> None:
        """Raise `Broken` if the group was given up: what came before may not have come to its end."""
        if self.abort_reason:
            raise GroupAborted(self.abort_reason)

    def abort(self, why: str) -> None:
        """Give the group up; whoever waits for it, in any member and on any device, waits no longer.

        In a forked child it is the parent's, and is left alone.
        """
        if self._owner_pid != os.getpid():
            self.abort_reason = why
            return
        with self._lock:
            if self.abort_reason:
                return
            self.abort_reason = why or "it was given up"
            os.eventfd_write(self._abort_fd, 1)
            backend, self._backend = self._backend, None
        if backend is not None:
            _abort_backend(backend)


class _Backend:
    """Torch's group. The descriptor of its store is open for as long as anybody may look there, by its number."""

    def __init__(self, store: int) -> None:
        self.group: Any = None
        self._store_fd = store
        _live_backends.add(self)

    def broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([tensor], options).wait()

    def reduce(self, tensor: Tensor) -> None:
        options = dist.ReduceOptions()
        options.rootRank = options.rootTensor = 0
        self.group.reduce([tensor], options).wait()

    def __del__(self) -> None:
        self.group = None
        with suppress(OSError):
            os.close(self._store_fd)


def _abort_backend(backend: _Backend) -> None:
    with suppress(RuntimeError):  # it has failed before: there is nothing left to be ended
        abort_group(backend.group)


_live_backends: weakref.WeakSet[_Backend] = weakref.WeakSet()


def _keep_backends_in_child() -> None:
    """A forked child has none of the threads that the end of a group waits for: there it never ends."""
    for backend in list(_live_backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_keep_backends_in_child)
