"""Creates the NCCL group of an engine's workers and starts its collectives."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from instep.engines.processes import messages
from instep.engines.processes.controller.client import WorkerClient, client_for
from instep.engines.processes.controller.remote_module import RemoteModuleState
from instep.engines.processes.controller.requests import WorkerProvider
from instep.engines.processes.controller.shared_parameters import find_shared_memory
from instep.engines.processes.lifecycle.pool import StartTimeout
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import ReplyTimeout
from instep.engines.processes.messages import BroadcastRequest, JoinGroupRequest
from instep.engines.processes.nccl.broadcast import broadcast_coalesced
from instep.engines.processes.nccl.group import NCCL_ENVIRONMENT, NcclGroup
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.thread_pool import ReplicaThreads, is_replica_thread
from instep.errors import WorkerFailure
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.env import is_nccl_enabled
from instep.runtime.locks import ForkSafeLock
from instep.runtime.torch_private import nccl_group_class

BACKEND = "nccl"
EXTRA_ENVIRONMENT: dict[int, dict[str, str | None]] = {}
"""By rank: additional environment variables."""
_group_ids = itertools.count(1)
_UNUSED = "no engine uses it any longer"


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
        self.process_group = NcclGroup(self.join_request(0, device), os.dup(self.store_fd), os.dup(self.abort_fd))
        self.lock = threading.Lock()
        """Held while the members are sent their requests for a collective. Taken before the lock of any client."""
        self.in_backward = False
        """Whether a backward holds the lock. Calls that begin before its end send their tensors through host memory."""
        for worker in self.workers:
            client_for(worker).groups.add(self)

    def begin_backward(self) -> bool:
        """Take the lock for a whole backward; False if somebody else has it."""
        if self.in_backward:
            return False
        self.in_backward = True  # before the lock is taken: after an interruption in between, nobody waits for it
        if not self.lock.acquire(blocking=False):
            self.in_backward = False
        return self.in_backward

    def end_backward(self) -> None:
        """Release the lock at the end of a backward."""
        self.lock.release()
        self.in_backward = False

    def on_worker_exit(self) -> None:
        """Abort the group: all threads may wait for a device that waits for the worker in a collective."""
        self.worker_lost = True
        self.process_group.abort("a worker ended", at_once=True)

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
            self._disable("this torch has no NCCL group that can be aborted when a worker dies")
            return False
        return not is_replica_thread()  # a collective runs in the replica threads: it would wait for this one

    def describe(self) -> str:
        """Describes how parameters and gradients are sent; continues the engine's description."""
        if self._group is not None and not self._group.process_group.abort_reason:
            return ", weights and gradients by NCCL"
        return f", weights and gradients too, because NCCL cannot be used ({self.refusal})" if self.refusal else ""

    def get_group(self) -> ControllerGroup | None:
        """The group of the current workers; None if a worker has just died or NCCL cannot be used.

        After a worker was replaced, the next call creates a new group.
        """
        with self._group_lock:
            try:
                workers = [self._provider.get_worker(index)[0] for index in range(1, len(self._devices))]
            except ConnectionClosed:  # the next request to the worker replaces it
                return None
            if self._group is None or self._group.process_group.abort_reason or self._group.workers != workers:
                self.leave()
                self._group = self._find_group(workers) or self._create_group(workers)
            return self._group

    def _find_group(self, workers: Sequence[WorkerProcess]) -> ControllerGroup | None:
        """A group of the same workers that another engine created."""
        with _groups_lock:
            group = next((g for g in _groups if g.workers == workers and not g.process_group.abort_reason), None)
            if group is not None:
                group.users.add(self)
            return group

    def _create_group(self, workers: Sequence[WorkerProcess]) -> ControllerGroup | None:
        group = ControllerGroup(workers, self._devices[0])
        group.users.add(self)
        _warn_existing_groups()
        tasks: list[Callable[[], None]] = [partial(_init_group, group)]
        tasks += [partial(self._send_join, group, index) for index in range(1, len(self._devices))]
        try:
            self._provider.threads.run(
                tasks, on_interrupt=lambda: group.process_group.abort("the call was interrupted")
            )
        except Exception as error:
            if group.failure is not None:
                raise group.failure from None
            if not group.worker_lost:
                self._disable(str(error))
            return None
        finally:
            group.close_fds()
        with _groups_lock:
            _groups.append(group)
        return group

    def _disable(self, reason: str) -> None:
        self.refusal = reason.strip().splitlines()[0] if reason.strip() else "no reason was given"
        warn_caller(
            f"weights and gradients are sent between GPUs through host memory, because NCCL cannot be used: "
            f"{self.refusal}\nTo silence this warning, set INSTEP_NCCL=0.",
        )

    def _send_join(self, group: ControllerGroup, index: int) -> None:
        """Make a worker join a group."""
        worker: WorkerProcess | None = None
        try:
            worker, client = self._provider.get_worker(index)
            if worker is not group.workers[index - 1]:
                raise ConnectionClosed(f"{worker.name} was replaced")
            with client.lock:
                client.prepare_device(self._devices[index], None)
                pending = client.send(
                    messages.JOIN_GROUP,
                    group.join_request(index, self._devices[index]),
                    (group.store_fd, group.abort_fd),
                )
            client.wait_reply(pending, None)
        except BaseException as error:
            group.worker_lost = group.worker_lost or isinstance(error, (ConnectionClosed, StartTimeout, ReplyTimeout))
            group.process_group.abort(f"{type(error).__name__}: {error}")
            if isinstance(error, ConnectionClosed) and worker is group.workers[index - 1]:
                self._replace_dead(group, index, error)
            raise

    def _replace_dead(self, group: ControllerGroup, index: int, closed: ConnectionClosed) -> None:
        try:
            self._provider.replace_dead(index, group.workers[index - 1], closed)
        except WorkerFailure as failure:
            group.failure = failure

    def abort_groups_of(self, worker: WorkerProcess | None) -> None:
        """Abort all groups of a worker that died or got stuck."""
        with _groups_lock:
            groups = [group for group in (*_groups, self._group) if group is not None and worker in group.workers]
        for group in groups:
            group.process_group.abort("a worker ended", at_once=True)

    def leave(self) -> None:
        """Leave the group; abort it if no engine uses it."""
        group, self._group = self._group, None
        if group is None:
            return
        with _groups_lock:
            group.users.discard(self)
            is_unused = not group.users or bool(group.process_group.abort_reason)
            if is_unused and group in _groups:
                _groups.remove(group)
        if is_unused:
            group.process_group.abort(_UNUSED)

    def close(self) -> None:
        """Leave the group, and abort all groups without users, such as those of engines that were freed."""
        self.leave()
        with _groups_lock:
            unused = [group for group in _groups if not group.users]
            _groups[:] = [group for group in _groups if group not in unused]
        for group in unused:
            group.process_group.abort(_UNUSED)


def _init_group(group: ControllerGroup) -> None:
    try:
        group.process_group.connect()
    except BaseException as error:
        group.process_group.abort(f"{type(error).__name__}: {error}")
        raise


def _warn_existing_groups() -> None:
    """Warn if the process already uses NCCL: it keeps the network interface chosen first."""
    global _warned
    if not _warned and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        _warned = True
        warn_caller(
            "this process already has an NCCL group, so the sockets of instep's own group listen on the interface of "
            "that group, not on loopback. To use no NCCL between workers, set INSTEP_NCCL=0.",
        )


def abort_all_groups() -> None:
    """Abort every group of this process; engines create new ones on their next use."""
    with _groups_lock:
        groups, _groups[:] = list(_groups), []
    for group in groups:
        group.process_group.abort("this process aborts its groups")


_warned = False
_groups: list[ControllerGroup] = []
_groups_lock = ForkSafeLock(_groups.clear)
atexit.register(abort_all_groups)


class GroupCollective:
    """One collective of a group, used as a context. The first worker to join starts it.

    If each worker has its own thread, that of the first one also runs the controller's part. In a call that the calling
    thread makes alone, the controller's part is `deferred` until all workers were sent their requests: it may wait for
    them. The caller then calls `run_deferred`.
    """

    def __init__(self, group: ControllerGroup, *, deferred: bool = False) -> None:
        self._group, self._is_deferred = group, deferred
        self._lock = threading.Lock()
        self._has_group_lock = False
        self._num_joining = len(group.workers)
        """The number of workers that have not joined yet."""
        self._workers_seen: list[WorkerProcess] = []
        self._started = threading.Event()
        self._was_sent = self._has_failed = False
        self._sequence_number = 0
        self._deferred_run: Callable[[], None] | None = None

    def __enter__(self) -> GroupCollective:
        self._group.lock.acquire()
        self._has_group_lock = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Abort the group if a member was not sent its request or did not take part."""
        is_interrupted = kind is not None and not issubclass(kind, Exception)
        if is_interrupted and (self._has_group_lock or not self._was_sent):  # the lock may be taken without a record
            self._group.process_group.abort("the call was interrupted")
        elif self._deferred_run is not None:
            self.fail("the call ended")
        elif kind is not None and len(set(self._workers_seen)) < len(self._group.workers):
            self.fail("not every worker was sent its request")
        self._release()

    def _release(self) -> None:
        with self._lock:
            held, self._has_group_lock = self._has_group_lock, False
        if held:
            self._group.lock.release()

    def join(self, worker: WorkerProcess, run: Callable[[NcclGroup], None], send: Callable[[int], object]) -> int:
        """Make a worker take part in the collective.

        Args:
            worker: The worker.
            run: Runs the controller's part; called for the first worker only.
            send: Sends the worker its request, given the sequence number.

        Returns:
            The sequence number. 0 if the worker cannot take part: the request was sent to it before, it is not in the
            group, or the group was aborted.
        """
        with self._lock:
            can_join = worker in self._group.workers and worker not in self._workers_seen and not self._has_failed
            is_first = can_join and not self._was_sent
            self._was_sent = self._was_sent or can_join
            self._workers_seen.append(worker)
        if not can_join:
            self.fail("a worker does not take part")
            return 0
        try:
            if is_first:
                return self._start(run, send)
            self._started.wait()
            return 0 if self._has_failed else self._send(self._sequence_number, send)
        finally:
            with self._lock:
                self._num_joining -= 1
            if not self._num_joining and not self._is_deferred:
                self._release()

    def _start(self, run: Callable[[NcclGroup], None], send: Callable[[int], object]) -> int:
        group = self._group.process_group
        try:
            self._sequence_number = group.last_sequence_number + 1
            with group.collective(self._sequence_number):
                self._send(self._sequence_number, send)
                self._started.set()
                if self._is_deferred:
                    self._deferred_run = partial(run, group)
                else:
                    run(group)
        except RuntimeError:  # of NCCL, or out of memory: the tensors are sent through host memory instead
            self._has_failed = True
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._started.set()
        return 0 if self._has_failed else self._sequence_number

    def _send(self, sequence_number: int, send: Callable[[int], object]) -> int:
        try:
            send(sequence_number)
        except BaseException:
            self.fail("no request could be sent to a worker")
            raise
        return sequence_number

    def run_deferred(self) -> None:
        """Run the controller's part, if the collective has begun and every worker was sent its request."""
        if self._deferred_run is not None and not self._has_failed:
            try:
                self._deferred_run()
            except RuntimeError as error:
                self.fail(f"{type(error).__name__}: {error}")
        self._deferred_run = None  # at the end: after an interruption, the group is aborted
        self._release()

    @property
    def was_aborted(self) -> bool:
        """Whether the group was aborted after the collective began, so that workers may have incomplete tensors.

        Unless it was deferred, that was somebody else: after its own failure the workers are sent the tensors again.
        """
        has_begun, failed_alone = self._sequence_number != 0, self._has_failed and not self._is_deferred
        return has_begun and not failed_alone and bool(self._group.process_group.abort_reason)

    def fail(self, reason: str) -> None:
        """Abort the collective because a worker cannot take part."""
        with self._lock:
            self._has_failed = True
        if self._was_sent:
            self._group.process_group.abort(reason)


class ParameterBroadcast(GroupCollective):
    """Broadcasts the values of a module's tensors to all workers at the start of a call."""

    def send_to(self, client: WorkerClient, module_id: int, module_state: RemoteModuleState) -> int:
        """Include one worker; returns the sequence number, or 0 if its tensors go through host memory."""
        staging = module_state.staging
        if staging is None or not module_state.staged_offsets:
            self.fail("a worker needs no tensors")
            return 0
        tensors = staging.regions(module_state.staged_offsets)
        nbytes = sum(staged.tensor.nbytes for staged in tensors)

        def send(sequence_number: int) -> None:
            request = BroadcastRequest(module_id, sequence_number, len(tensors), nbytes)
            client.channel.send(messages.BROADCAST, 0, request)

        return self.join(client.worker, lambda group: broadcast_coalesced(group, tensors, find_shared_memory), send)
