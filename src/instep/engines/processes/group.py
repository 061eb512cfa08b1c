"""A private group of processes for NCCL: how it is made, what is sent in it, and how it is given up in the middle.

Members find one another by a store in memory that has no name, whose descriptor each of them was sent: nothing of it is
in the file system, and nobody else can join. NCCL's own sockets are kept to the loopback interface.

A member that dies or fails leaves the others in the middle of a collective, where they would wait for ever: whoever
learns of it calls `abort`, in any thread. That rings a bell which all members hear, and ends the group for all of them.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.engines.processes.orders import Join
from instep.engines.processes.shore import wait_for
from instep.engines.processes.variables import Variables
from instep.errors import EngineError
from instep.locks import start
from instep.private import abort_group, file_store, make_gloo_group, make_nccl_group

_MAKERS = {"nccl": make_nccl_group, "gloo": make_gloo_group}
_GLANCE = 0.02
_PATIENCE = timedelta(minutes=10)


class Broken(EngineError):
    """A group was given up; what it was to bring comes by host memory instead, or in another group."""


class Group:
    """One member's place in a group."""

    def __init__(self, order: Join, store: int, bell: int) -> None:
        """The descriptors of the common memory and of the bell belong to this object from now on."""
        self.rank, self.size, self.device = order.rank, order.size, order.device
        self.over = ""
        """Why it was given up; empty as long as it was not."""
        self.last = order.first
        """The number of the last collective."""
        self._order, self._store, self._bell = order, store, bell
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._backend: _Backend | None = None
        self._ended = threading.Event()
        self._failure: Exception | None = None

    def make(self) -> None:
        """Meet the other members; `Broken` where that fails, or where the group is given up meanwhile.

        Whoever waits for a member that does not come cannot be interrupted: that is done by a thread of its own, which
        is left to itself then and ends after a while.
        """
        variables = Variables(self._order.variables)
        try:
            start(threading.Thread(target=self._listen, name="instep-bell", daemon=True))
            start(threading.Thread(target=self._meet, name="instep-group", daemon=True))
            while not self._ended.wait(_GLANCE) and not self.over:
                pass
        finally:
            variables.put_back()
        if self._failure is not None:
            self.abort(str(self._failure))
        self.check()

    def _meet(self) -> None:
        backend = _Backend(self._store)
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            store = file_store(f"/proc/self/fd/{self._store}", self.size)
            backend.group = _MAKERS[self._order.kind](store, self.rank, self.size, _PATIENCE)
            first = torch.zeros(1, device=self.device)
            # Connections are made by the first collective of each kind, for which one may have to wait.
            backend.broadcast(first)
            backend.reduce(first)
            wait_for(self.device)
        except Exception as error:
            self._failure = error
        with self._lock:
            if not self.over:
                self._backend = backend
        if self.over and backend.group is not None:
            _end(backend)
        self._ended.set()

    def _listen(self) -> None:
        """Give the group up when another member does."""
        watch = select.poll()
        watch.register(self._bell, select.POLLIN)
        watch.poll()
        self.abort("another member gave the group up")
        os.close(self._bell)

    def broadcast(self, tensor: Tensor) -> None:
        """Every member gets the first one's values; the current stream waits for it, this thread does not."""
        self._do("broadcast", tensor)

    def reduce(self, tensor: Tensor) -> None:
        """The first member gets the sum over all; the current stream waits for it, this thread does not."""
        self._do("reduce", tensor)

    def _do(self, what: str, tensor: Tensor) -> None:
        backend = self._backend
        if backend is None:
            raise Broken(self.over or "the group was not made")
        try:
            getattr(backend, what)(tensor)
        except RuntimeError as error:
            raise Broken(str(error)) from error

    @contextmanager
    def turn(self, ticket: int) -> Iterator[None]:
        """The collective with this number; whoever cannot take part in it, or not at this point, ends the group."""
        try:
            self.check()
            if ticket != self.last + 1:
                raise Broken(f"collective {ticket} came after {self.last}")
            self.last = ticket
            yield
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        """Raise `Broken` if the group was given up: what came before may not have come to its end."""
        if self.over:
            raise Broken(self.over)

    def abort(self, why: str) -> None:
        """Give the group up; whoever waits for it, in any member and on any device, waits no longer.

        In a forked child it is the parent's, and is left alone.
        """
        if self._owner != os.getpid():
            self.over = why
            return
        with self._lock:
            if self.over:
                return
            self.over = why or "it was given up"
            os.eventfd_write(self._bell, 1)
            backend, self._backend = self._backend, None
        if backend is not None:
            _end(backend)


class _Backend:
    """Torch's group. The descriptor of its store is open for as long as anybody may look there, by its number."""

    def __init__(self, store: int) -> None:
        self.group: Any = None
        self._store = store
        _backends.add(self)

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
            os.close(self._store)


def _end(backend: _Backend) -> None:
    with suppress(RuntimeError):  # it has failed before: there is nothing left to be ended
        abort_group(backend.group)


_backends: weakref.WeakSet[_Backend] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has none of the threads that the end of a group waits for: there it never ends."""
    for backend in list(_backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


os.register_at_fork(after_in_child=_in_child)
