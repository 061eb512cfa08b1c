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
"""By rank: additional environment variables."""
_group_ids = itertools.count(1)
_UNUSED = "nobody uses it any longer"


def are_distinct_gpus(devices: Sequence[torch.device]) -> bool:
    """Whether these are several GPUs, all different, as NCCL requires."""
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices) > 1


class ControllerGroup:
    """The controller's side of a group, in which it is rank 0."""

    def __init__(self, workers: Sequence[WorkerProcess], device: torch.device) -> None:
        self.workers = list(workers)
        self.users: weakref.WeakSet[NcclManager] = weakref.WeakSet()
        self.sequence_base = next(_group_ids) << 32
        self.worker_lost = False
        """Whether a worker died or got stuck while the group was created."""
        self.failure: WorkerFailure | None = None
        """Set if too many workers died while the group was created."""
        self.store_fd, self.abort_fd = os.memfd_create("instep-group", os.MFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
        self.group = NcclGroup(self.join_request(0, device), os.dup(self.store_fd), os.dup(self.abort_fd))
        self.lock = threading.Lock()
        """Held while a collective is started."""

    def join_request(self, rank: int, device: torch.device) -> JoinGroupRequest:
        """The request that makes a worker join."""
        return JoinGroupRequest(
            BACKEND,
            rank,
            len(self.workers) + 1,
            device,
            {**NCCL_ENVIRONMENT, **EXTRA_ENVIRONMENT.get(rank, {})},
            self.sequence_base,
        )

    def close_fds(self) -> None:
        """Close the descriptors that were sent to the members."""
        for fd in (self.store_fd, self.abort_fd):
            os.close(fd)


class ThreadedWorkerProvider(WorkerProvider, Protocol):
    """A worker provider with one thread per worker."""

    @property
    def threads(self) -> ReplicaThreads: ...


class NcclManager:
    """Provides the NCCL group of an engine's workers. Created on first use, and again after a death."""

    def __init__(self, provider: ThreadedWorkerProvider, devices: Sequence[torch.device]) -> None:
        self._provider, self._devices = provider, list(devices)
        self._group: ControllerGroup | None = None
        self._group_lock = ForkSafeLock()
        self._is_supported = are_distinct_gpus(devices)
        self.refusal = ""
        """Why NCCL is disabled; empty if it is not."""

    def can_use(self, count: int) -> bool:
        """Whether parameters and gradients of a call with this many replicas are sent over NCCL."""
        if not self._is_supported or self.refusal or count != len(self._devices) or not is_nccl_enabled():
            return False
        if BACKEND == "nccl" and nccl_group_class() is None:
            self._disable("this torch has none that can be given up when a worker dies")
            return False
        return not is_replica_thread()  # whoever waits for itself waits for ever

    def describe(self) -> str:
        """Describes how parameters and gradients are sent; continues the engine's description."""
        if self._group is not None and not self._group.group.abort_reason:
            return ", weights and gradients by NCCL"
        return f", weights and gradients too, because NCCL is of no use here ({self.refusal})" if self.refusal else ""

    def get_group(self, streams: CallStreams) -> ControllerGroup | None:
        """The group of the current workers; None if a worker has just died or NCCL cannot be used.

        One that died makes way for another: who calls this again gets the group of those that there are then.
        """
        with self._group_lock:
            try:
                workers = [self._provider.get_worker(index)[0] for index in range(1, len(self._devices))]
            except ConnectionClosed:  # whoever asks it for something sees to that
                return None
            if self._group is None or self._group.group.abort_reason or self._group.workers != workers:
                self.leave()
                self._group = self._find_group(workers) or self._create_group(workers, streams)
            return self._group

    def _find_group(self, workers: Sequence[WorkerProcess]) -> ControllerGroup | None:
        """A group of the same workers that another engine created."""
        with _groups_lock:
            home = next((h for h in _groups if h.workers == workers and not h.group.abort_reason), None)
            if home is not None:
                home.users.add(self)
            return home

    def _create_group(self, workers: Sequence[WorkerProcess], streams: CallStreams) -> ControllerGroup | None:
        home = ControllerGroup(workers, self._devices[0])
        home.users.add(self)
        _warn_existing_groups()
        tasks: list[Callable[[], None]] = [partial(_init_group, home)]
        tasks += [partial(self._send_join, home, index, streams) for index in range(1, len(self._devices))]
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

    def _send_join(self, home: ControllerGroup, index: int, streams: CallStreams) -> None:
        """Make a worker join a group."""
        worker: WorkerProcess | None = None
        try:
            worker, client = self._provider.get_worker(index)
            if worker is not home.workers[index - 1]:
                raise ConnectionClosed(f"{worker.name} was replaced")
            with client.lock:
                self._provider.prepare_device(index, client, streams, False)
                pending = client.send(
                    messages.JOIN_GROUP, home.join_request(index, self._devices[index]), (home.store_fd, home.abort_fd)
                )
            client.wait_reply(pending, None)
        except BaseException as error:
            home.worker_lost = home.worker_lost or isinstance(error, (ConnectionClosed, StartTimeout, ReplyTimeout))
            home.group.abort(f"{type(error).__name__}: {error}")
            if isinstance(error, ConnectionClosed) and worker is home.workers[index - 1]:
                self._replace_dead(home, index, error)
            raise

    def _replace_dead(self, home: ControllerGroup, index: int, closed: ConnectionClosed) -> None:
        try:
            self._provider.replace_dead(index, home.workers[index - 1], closed)
        except WorkerFailure as failure:
            home.failure = failure

    def abort_groups_of(self, worker: WorkerProcess | None) -> None:
        """Abort all groups of a worker that died or got stuck."""
        with _groups_lock:
            homes = [home for home in (*_groups, self._group) if home is not None and worker in home.workers]
        for home in homes:
            home.group.abort("a worker ended")

    def leave(self) -> None:
        """Leave the group; abort it if no engine uses it."""
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
        """Leave the group, and abort all groups without users, such as those of engines that were freed."""
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
    """Warn if the process already uses NCCL: it keeps the network interface chosen first."""
    global _warned
    if not _warned and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        _warned = True
        warnings.warn(
            "this process has an NCCL group of its own already, so the sockets by which workers meet listen on its "
            "interface, and not on loopback. INSTEP_NCCL=0 does without them.",
            stacklevel=2,
        )


def abort_all_groups() -> None:
    """Abort every group of this process; engines create new ones on their next use."""
    with _groups_lock:
        homes, _groups[:] = list(_groups), []
    for home in homes:
        home.group.abort("this process ends its groups")


_warned = False
_groups: list[ControllerGroup] = []
_groups_lock = ForkSafeLock(_groups.clear)
atexit.register(abort_all_groups)


class GroupCollective:
    """One collective of a group. The first thread to join starts it; each worker has its own thread."""

    def __init__(self, home: ControllerGroup) -> None:
        self._group = home
        self._lock = threading.Lock()
        self._workers_seen: list[WorkerProcess] = []
        self._started = threading.Event()
        self._was_sent = self._has_failed = False
        self._sequence_number = 0

    def join(self, worker: WorkerProcess, work: Callable[[NcclGroup], None], say: Callable[[int], object]) -> int:
        """Make a worker take part by calling `say`; returns the sequence number of the collective.

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

    def _send(self, sequence_number: int, say: Callable[[int], object]) -> int:
        try:
            say(sequence_number)
        except BaseException:
            self.fail("a worker could not be asked")
            raise
        return sequence_number

    def abandon(self) -> None:
        """Abort the group if the call ended before every worker was sent its request."""
        if len(set(self._workers_seen)) < len(self._group.workers):
            self.fail("not every worker was asked")

    def fail(self, why: str) -> None:
        """Abort the collective because a worker cannot take part."""
        with self._lock:
            self._has_failed = True
        if self._was_sent:
            self._group.group.abort(why)


class ParameterBroadcast(GroupCollective):
    """Broadcasts the values of a module's tensors to all workers at the start of a call."""

    def send_to(self, client: WorkerClient, number: int, module_state: RemoteModuleState) -> int:
        """Include one worker; returns the sequence number, or 0 if its tensors go through host memory."""
        staging = module_state.staging
        if staging is None or not module_state.staged_offsets:  # there is nothing to send, to anybody
            self.fail("a worker has nothing to be sent")
            return 0
        pieces = staging.regions(module_state.staged_offsets)
        nbytes = sum(piece.tensor.nbytes for piece in pieces)

        def say(sequence_number: int) -> None:
            client.channel.send(messages.BROADCAST, 0, BroadcastRequest(number, sequence_number, len(pieces), nbytes))

        return self.join(client.worker, lambda group: broadcast_coalesced(group, pieces), say)
