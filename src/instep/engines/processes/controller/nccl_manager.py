"""Creates the NCCL group of an engine's workers and starts its collectives."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from instep.engines.processes import messages
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.remote_module import RemoteModuleState
from instep.engines.processes.controller.requests import WorkerProvider
from instep.engines.processes.lifecycle.pool import StartTimeout
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import ReplyTimeout
from instep.engines.processes.messages import BroadcastRequest, JoinGroupRequest
from instep.engines.processes.nccl.collectives import broadcast_coalesced
from instep.engines.processes.nccl.group import NCCL_ENVIRONMENT, NcclGroup
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.thread_pool import ReplicaThreads, is_replica_thread
from instep.errors import WorkerFailure
from instep.runtime.env import is_nccl_enabled
from instep.runtime.locks import ForkSafeLock
from instep.runtime.torch_private import nccl_group_class

BACKEND = "nccl"
EXTRA_ENVIRONMENT: dict[int, dict[str, str | None]] = {}
"""By the number of a member: further variables of the environment that it is made in."""
_group_ids = itertools.count(1)
_UNUSED = "nobody uses it any longer"


def are_distinct_gpus(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL can join these devices: GPUs, and no two of them the same."""
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices) > 1


class ControllerGroup:
    """A group as its first member has it, which is this process."""

    def __init__(self, workers: Sequence[WorkerProcess], device: torch.device) -> None:
        self.workers = list(workers)
        self.users: weakref.WeakSet[NcclManager] = weakref.WeakSet()
        self.sequence_base = next(_group_ids) << 32
        self.worker_lost = False
        """Whether a worker ended, or did not answer, as the group was made."""
        self.failure: WorkerFailure | None = None
        """That too many have ended by then."""
        self.store_fd, self.abort_fd = os.memfd_create("instep-group", os.MFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
        self.group = NcclGroup(self.join_request(0, device), os.dup(self.store_fd), os.dup(self.abort_fd))
        self.lock = threading.Lock()
        """Held by whoever begins a collective, until this process's part of it has begun."""

    def join_request(self, rank: int, device: torch.device) -> JoinGroupRequest:
        """What a member is told."""
        return JoinGroupRequest(
            BACKEND,
            rank,
            len(self.workers) + 1,
            device,
            {**NCCL_ENVIRONMENT, **EXTRA_ENVIRONMENT.get(rank, {})},
            self.sequence_base,
        )

    def close_fds(self) -> None:
        """All members have come: nobody is sent these any more."""
        for fd in (self.store_fd, self.abort_fd):
            os.close(fd)


class ThreadedWorkerProvider(WorkerProvider, Protocol):
    """An office that has threads for its workers."""

    @property
    def threads(self) -> ReplicaThreads: ...


class NcclManager:
    """An engine's way to the group of its workers."""

    def __init__(self, office: ThreadedWorkerProvider, devices: Sequence[torch.device]) -> None:
        self._provider, self._devices = office, list(devices)
        self._group: ControllerGroup | None = None
        self._group_lock = ForkSafeLock()
        self._is_supported = are_distinct_gpus(devices)
        self.refusal = ""
        """Why there is no group, and will be none."""

    def can_use(self, count: int) -> bool:
        """Whether weights and gradients of a call with so many replicas go through a group."""
        if not self._is_supported or self.refusal or count != len(self._devices) or not is_nccl_enabled():
            return False
        if BACKEND == "nccl" and nccl_group_class() is None:
            self._disable("this torch has none that can be given up when a worker dies")
            return False
        return not is_replica_thread()  # whoever waits for itself waits for ever

    def describe(self) -> str:
        """What is to be said of how weights and gradients cross, after how tensors do."""
        if self._group is not None and not self._group.group.abort_reason:
            return ", weights and gradients by NCCL"
        return f", weights and gradients too, because NCCL is of no use here ({self.refusal})" if self.refusal else ""

    def get_group(self, passage: CallStreams) -> ControllerGroup | None:
        """The group of the workers that there are now; None where one has just died, or where there can be none.

        One that died makes way for another: who calls this again gets the group of those that there are then.
        """
        with self._group_lock:
            try:
                workers = [self._provider.get_worker(index)[0] for index in range(1, len(self._devices))]
            except ConnectionClosed:  # whoever asks it for something sees to that
                return None
            if self._group is None or self._group.group.abort_reason or self._group.workers != workers:
                self.leave()
                self._group = self._find_group(workers) or self._create_group(workers, passage)
            return self._group

    def _find_group(self, workers: Sequence[WorkerProcess]) -> ControllerGroup | None:
        """The group that another engine has made of the same workers."""
        with _groups_lock:
            home = next((h for h in _groups if h.workers == workers and not h.group.abort_reason), None)
            if home is not None:
                home.users.add(self)
            return home

    def _create_group(self, workers: Sequence[WorkerProcess], passage: CallStreams) -> ControllerGroup | None:
        home = ControllerGroup(workers, self._devices[0])
        home.users.add(self)
        _warn_existing_groups()
        tasks: list[Callable[[], None]] = [partial(_init_group, home)]
        tasks += [partial(self._send_join, home, index, passage) for index in range(1, len(self._devices))]
        try:
            self._provider.threads.run(tasks, on_interrupt=lambda: home.group.abort("the call was interrupted"))
        except Exception as error:
            if home.failure is not None:
                raise home.failure from None
            if not home.worker_lost:
                self._disable(str(error))
            return None
        finally:
            home.close_fds()
        with _groups_lock:
            _groups.append(home)
        return home

    def _disable(self, why: str) -> None:
        self.refusal = why.strip().splitlines()[0] if why.strip() else "no reason was given"
        warnings.warn(
            f"weights and gradients cross between GPUs by host memory, because NCCL is of no use here: {self.refusal}\n"
            f"INSTEP_NCCL=0 says that this is known.",
            stacklevel=2,
        )

    def _send_join(self, home: ControllerGroup, index: int, passage: CallStreams) -> None:
        """Have a worker take its place in a group."""
        worker: WorkerProcess | None = None
        try:
            worker, desk = self._provider.get_worker(index)
            if worker is not home.workers[index - 1]:
                raise ConnectionClosed(f"{worker.name} was replaced")
            with desk.lock:
                self._provider.prepare_device(index, desk, passage, False)
                box = desk.send(
                    messages.JOIN_GROUP, home.join_request(index, self._devices[index]), (home.store_fd, home.abort_fd)
                )
            desk.wait_reply(box, None)
        except BaseException as error:
            home.worker_lost = home.worker_lost or isinstance(error, (ConnectionClosed, StartTimeout, ReplyTimeout))
            home.group.abort(f"{type(error).__name__}: {error}")
            if isinstance(error, ConnectionClosed) and worker is home.workers[index - 1]:
                self._replace_dead(home, index, error)
            raise

    def _replace_dead(self, home: ControllerGroup, index: int, gone: ConnectionClosed) -> None:
        try:
            self._provider.replace_dead(index, home.workers[index - 1], gone)
        except WorkerFailure as failure:
            home.failure = failure

    def abort_groups_of(self, worker: WorkerProcess | None) -> None:
        """A worker is no more, or does not answer: nobody waits for it in a collective."""
        with _groups_lock:
            homes = [home for home in (*_groups, self._group) if home is not None and worker in home.workers]
        for home in homes:
            home.group.abort("a worker ended")

    def leave(self) -> None:
        """Give the group back; one that nobody else uses ends."""
        home, self._group = self._group, None
        if home is None:
            return
        with _groups_lock:
            home.users.discard(self)
            ends = not home.users or bool(home.group.abort_reason)
            if ends and home in _groups:
                _groups.remove(home)
        if ends:
            home.group.abort(_UNUSED)

    def close(self) -> None:
        """Give the group back, and end all that nobody uses: those of engines that were dropped stay until now."""
        self.leave()
        with _groups_lock:
            ended = [home for home in _groups if not home.users]
            _groups[:] = [home for home in _groups if home not in ended]
        for home in ended:
            home.group.abort(_UNUSED)


def _init_group(home: ControllerGroup) -> None:
    try:
        home.group.connect()
    except BaseException as error:
        home.group.abort(f"{type(error).__name__}: {error}")
        raise


def _warn_existing_groups() -> None:
    """NCCL keeps to the interface that it began with: another group's, if there is one in this process."""
    global _warned
    if not _warned and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        _warned = True
        warnings.warn(
            "this process has an NCCL group of its own already, so the sockets by which workers meet listen on its "
            "interface, and not on loopback. INSTEP_NCCL=0 does without them.",
            stacklevel=2,
        )


def abort_all_groups() -> None:
    """End every group of this process; engines make new ones when they are used again."""
    with _groups_lock:
        homes, _groups[:] = list(_groups), []
    for home in homes:
        home.group.abort("this process ends its groups")


_warned = False
_groups: list[ControllerGroup] = []
_groups_lock = ForkSafeLock(_groups.clear)
atexit.register(abort_all_groups)


class GroupCollective:
    """One collective. The desk that comes first begins it; those that come to it all come in their own threads."""

    def __init__(self, home: ControllerGroup) -> None:
        self._group = home
        self._lock = threading.Lock()
        self._workers_seen: list[WorkerProcess] = []
        self._started = threading.Event()
        self._was_sent = self._has_failed = False
        self._sequence_number = 0

    def join(self, worker: WorkerProcess, work: Callable[[NcclGroup], None], say: Callable[[int], object]) -> int:
        """Have a worker take part, by what `say` tells it; returns the number of the collective.

        It is 0 where the worker has to do without: it was asked once more, is not of the group, or that is no more.
        """
        with self._lock:
            comes = worker in self._group.workers and worker not in self._workers_seen and not self._has_failed
            first = comes and not self._was_sent
            self._was_sent = self._was_sent or comes
            self._workers_seen.append(worker)
        if not comes:
            self.fail("a worker does not take part")
            return 0
        if first:
            return self._start(work, say)
        self._started.wait()
        if self._has_failed:
            return 0
        return self._send(self._sequence_number, say)

    def _start(self, work: Callable[[NcclGroup], None], say: Callable[[int], object]) -> int:
        group = self._group.group
        try:
            with self._group.lock:
                self._sequence_number = group.last_sequence_number + 1
                with group.collective(self._sequence_number):
                    self._send(self._sequence_number, say)
                    self._started.set()
                    work(group)
        except RuntimeError:  # of NCCL, or no memory for it: there is another way
            self._has_failed = True
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._started.set()
        return 0 if self._has_failed else self._sequence_number

    def _send(self, ticket: int, say: Callable[[int], object]) -> int:
        try:
            say(ticket)
        except BaseException:
            self.fail("a worker could not be asked")
            raise
        return ticket

    def abandon(self) -> None:
        """The call is over; a worker that was not asked will not be."""
        if len(set(self._workers_seen)) < len(self._group.workers):
            self.fail("not every worker was asked")

    def fail(self, why: str) -> None:
        """Not every worker comes: those that were asked already wait no longer."""
        with self._lock:
            self._has_failed = True
        if self._was_sent:
            self._group.group.abort(why)


class ParameterBroadcast(GroupCollective):
    """The values of a module's tensors on their way to all workers, at the beginning of a call."""

    def send_to(self, desk: WorkerClient, number: int, told: RemoteModuleState) -> int:
        """Send them to one more worker, which knows the module by this number; 0 where they come by host memory."""
        image = told.staging
        if image is None or not told.staged_offsets:  # there is nothing to send, to anybody
            self.fail("a worker has nothing to be sent")
            return 0
        pieces = image.regions(told.staged_offsets)
        nbytes = sum(piece.tensor.nbytes for piece in pieces)

        def say(ticket: int) -> None:
            desk.channel.send(messages.BROADCAST, 0, BroadcastRequest(number, ticket, len(pieces), nbytes))

        return self.join(desk.worker, lambda group: broadcast_coalesced(group, pieces), say)
