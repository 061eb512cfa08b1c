"""The `processes` engine: replica 0 runs in this process, every other replica in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from instep.autograd.bridge import CallGraph, Gradients
from instep.autograd.graph_walk import ReachedCollectives
from instep.collectives.buckets import reusable_gradients, sum_gradients
from instep.engines.base import ReplicaCall, raise_first_error, run_forward
from instep.engines.concurrent import BackwardTask, ConcurrentEngine
from instep.engines.processes.controller.backward import ReplicaBackward
from instep.engines.processes.controller.client import WorkerClient, client_for, drop_dead_clients
from instep.engines.processes.controller.forward import ReplicaForward
from instep.engines.processes.controller.nccl_manager import NcclManager, ParameterBroadcast, abort_all_groups
from instep.engines.processes.controller.nccl_reduction import GradientReduction
from instep.engines.processes.controller.overlap import OverlappedSum
from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.rendezvous import ControllerRendezvous, run_as_replica, run_replicas
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator, run_to_end, unwrap_stop_iteration
from instep.engines.processes.controller.requests import IpcCheck, ReachabilityRequest, RetryingRequest, send_and_wait
from instep.engines.processes.controller.shared_parameters import share_parameters
from instep.engines.processes.lifecycle.pool import WorkerPool, stop_all
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.cuda_driver import DriverError
from instep.engines.processes.transport.cuda_ipc import allocate_shared
from instep.engines.processes.worker.rng import PythonRngMonitor
from instep.engines.rendezvous import LEFT_FORWARD
from instep.engines.thread_pool import is_replica_thread
from instep.errors import EngineError, RemoteArgumentError, WorkerFailure
from instep.replicas.mutable_arguments import ArgumentSnapshot, mutable_arguments
from instep.replicas.replica import Replica, ReplicaResult
from instep.runtime.locks import ForkSafeLock
from instep.runtime.torch_private import has_no_saved_tensor_hooks

RESTART_WINDOW = 60.0
"""Seconds for which the death of a worker counts against `restarts`."""


class ProcessesEngine(ConcurrentEngine):
    """Runs replica 0 in this process and each other replica in a worker process."""

    name = "processes"
    out_of_process = True

    def __init__(self, devices: Sequence[torch.device], *, restarts: int = 3, timeout: float = 600.0) -> None:
        if any(device.type not in ("cpu", "cuda") for device in devices):
            raise EngineError("engine='processes' runs replicas on the CPU and on CUDA; write engine='threads'.")
        super().__init__(devices, timeout=timeout)
        self.restarts = restarts
        self._pool = WorkerPool(devices)
        self._death_times: list[float] = []
        self._death_lock = ForkSafeLock()
        self.ipc_status: dict[int, str | None] = {}
        """By replica index: why CUDA IPC is not used (see `WorkerClient.ipc_refusal`)."""
        self._streams: CallStreams
        """The streams of the running backward."""
        self._overlap = OverlappedSum()
        """The overlapped sum of the running backward."""
        self._nccl = NcclManager(self, devices)
        self._python_rng = PythonRngMonitor()

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> ProcessesEngine:
        return cls(devices, restarts=restarts, timeout=timeout)

    @classmethod
    def shutdown(cls) -> None:
        """Abort the NCCL groups and stop the worker processes of this process."""
        abort_all_groups()
        stop_all()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        home = self._devices[0]
        if home.type == "cpu":
            share_parameters(tensors)
            return
        beside = [index for index, device in enumerate(self._devices) if index and device == home]
        near: bool = bool(beside) and send_and_wait(self, beside[0], IpcCheck(), CallStreams(self._devices), True)
        if near:
            # Where there is no memory for it, it stays where it is, and workers get copies.
            with suppress(DriverError):
                share_parameters(tensors, partial(allocate_shared, device=home), home)

    def describe_transport(self) -> str:
        if self._on_cpu or not self.ipc_status:
            return ""
        near = [index for index, why in self.ipc_status.items() if why == ""]
        refused = next((why for why in self.ipc_status.values() if why), None)
        if refused is not None:
            return f"tensors cross by host memory, because device memory cannot be shared here ({refused})"
        ways = ["CUDA IPC"] * bool(near) + ["host memory"] * (len(near) < len(self.ipc_status))
        return f"tensors cross by {' or '.join(ways)}{self._nccl.describe()}"

    def replica_classes(self) -> list[type[Replica]]:
        return [Replica, *[RemoteReplica] * (len(self._devices) - 1)]

    def get_worker(self, index: int) -> tuple[WorkerProcess, WorkerClient]:
        worker = self._pool.get(index, self.timeout)
        client = client_for(worker)
        client.timeout = self.timeout
        return worker, client

    def prepare_device(self, index: int, client: WorkerClient, streams: CallStreams, near: bool) -> None:
        client.prepare_device(self._devices[index], near)
        self.ipc_status[index] = client.ipc_refusal if near else None
        client.worker.connection.receiver = streams.receiver()

    def replace_dead(self, index: int, worker: WorkerProcess | None, closed: ConnectionClosed) -> None:
        why = str(closed) if worker is None else f"the worker of {worker.name} ended: {worker.exit_reason()}"
        self.abort_groups(worker)
        self._pool.kill(index)
        with self._death_lock:
            now = time.monotonic()
            self._death_times = [*(then for then in self._death_times if now - then < RESTART_WINDOW), now]
            too_many = len(self._death_times) > self.restarts
            if too_many:
                self._death_times = []
        if too_many:
            raise WorkerFailure(
                f"{why}\n"
                f"That was death number {self.restarts + 1} within {RESTART_WINDOW:.0f} seconds, so the step is not "
                f"tried again. The module is as it was before the call."
            ) from closed

    def kill_stuck(self, index: int) -> None:
        self.abort_groups(self._pool.last_worker(index))
        self._pool.kill(index)

    def abort_groups(self, worker: WorkerProcess | None) -> None:
        self._nccl.abort_groups_of(worker)

    def make_group(self, names: Sequence[str], exit_description: str, **options: Any) -> ControllerRendezvous:
        return ControllerRendezvous(names, exit_description, timeout=self.timeout, **options)

    def forward(self, replica_call: ReplicaCall) -> list[ReplicaResult]:
        replica_call.device_transfer, replica_call.python_seed = (
            CallStreams(self._devices),
            self._python_rng.begin_call(),
        )
        # The first replica is in one place at a time. On accelerators a gradient that it takes on its way comes from
        # another thread, which must not wait for this one.
        arguments = _snapshot_arguments(replica_call)
        try:
            with self._lock if self._on_cpu else self._broadcast_parameters(replica_call):
                return (
                    self._forward_in_caller(replica_call)
                    if self._can_run_in_caller(replica_call)
                    else super().forward(replica_call)
                )
        except RemoteArgumentError:
            if arguments is not None:
                arguments.restore()
            raise

    @contextmanager
    def _broadcast_parameters(self, replica_call: ReplicaCall) -> Iterator[None]:
        """Broadcast the module's tensors over NCCL, if the workers form a group."""
        in_group = (
            replica_call.sync_state
            and not replica_call.rng.serialized
            and self._nccl.can_use(len(replica_call.replicas))
        )
        home = self._nccl.get_group(replica_call.device_transfer) if in_group else None
        if home is None:
            yield
            return
        broadcast = replica_call.device_transfer.parameter_broadcast = ParameterBroadcast(home)
        try:
            yield
        except BaseException:
            broadcast.abandon()
            raise

    def _can_run_in_caller(self, replica_call: ReplicaCall) -> bool:
        """Whether the calling thread can run replica 0 and wait for all workers, without other threads."""
        return (
            self._on_cpu
            and not replica_call.rng.serialized
            and not is_replica_thread()
            and replica_call.ambient.allows_internal_ops(self._devices[0])
            and has_no_saved_tensor_hooks()
        )

    def _forward_in_caller(self, replica_call: ReplicaCall) -> list[ReplicaResult]:
        room = replica_call.group = self.make_group([replica.name for replica in replica_call.replicas], LEFT_FORWARD)

        meanwhile: list[Callable[[], None]] = []

        def run() -> list[ReplicaResult]:  # with the thread count of a replica, which is sent to the workers
            return run_replicas(
                room,
                own,
                [self._forward_task(replica_call, index, meanwhile) for index in range(1, len(replica_call.replicas))],
            )

        def own() -> ReplicaResult:
            if replica_call.ambient.autocast:  # weights may have changed since they were cast in the caller's block
                torch.clear_autocast_cache()
            result = self._run_first_replica(replica_call)
            _raise_interruption(result.error)
            room.has_failed = result.error is not None
            for do in meanwhile:
                do()
            return result

        results = run_as_replica(run, len(replica_call.replicas), caller_restores=True)
        raise_first_error(replica_call.replicas, results)
        return results

    def run_forward(self, replica_call: ReplicaCall, index: int) -> ReplicaResult:
        if not index:
            return self._run_first_replica(replica_call)
        with replica_call.device_transfer.side_stream():
            return run_to_end(self._forward_task(replica_call, index, []))

    def _run_first_replica(self, replica_call: ReplicaCall) -> ReplicaResult:
        result = run_forward(replica_call, 0)
        self._python_rng.end_call(replica_call.python_seed)
        return result

    def _forward_task(
        self, replica_call: ReplicaCall, index: int, meanwhile: list[Callable[[], None]]
    ) -> ReplyGenerator[ReplicaResult]:
        """Send one replica's forward and wait for the reply; `meanwhile` gets work to do before waiting."""
        retrying: RetryingRequest[Any] = RetryingRequest(self, index, replica_call.device_transfer)
        failure: BaseException | None = None
        waiting = False
        try:
            replica_call.group.enter(index)
            part = ReplicaForward(replica_call, index)
            retrying.send(part, part.same_device)
            meanwhile.append(partial(retrying.run_if_sent, part.prepare_replay))
            waiting = True
            yield RUNNING
            return part.to_result(*(yield from retrying.receive()))
        except BaseException as error:
            failure = unwrap_stop_iteration(error)
            retrying.abandon()
            if replica_call.device_transfer.parameter_broadcast is not None and not waiting:
                replica_call.device_transfer.parameter_broadcast.fail("a worker could not be asked")
            if not retrying.is_reply_error(failure):
                _raise_interruption(failure)
            return ReplicaResult(error=failure)
        finally:
            replica_call.group.leave(index, failure)
            failure = None  # its traceback holds this frame

    def reached_collectives(self, span: CallGraph, index: int, outputs: Sequence[Tensor]) -> ReachedCollectives:
        call: ReplayableCall | None = span.replicas[index].remote_call
        if call is None:
            return super().reached_collectives(span, index, outputs)
        return send_and_wait(
            self, index, ReachabilityRequest(call, outputs), self._streams, call.module_state.same_device
        )

    def backward(
        self, span: CallGraph, gradients: Sequence[Gradients], keep: bool
    ) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            outer, self._overlap = self._overlap, OverlappedSum()
            try:
                return super().backward(span, gradients, keep)
            finally:
                self._overlap = outer

    def _run_backward(self, span: CallGraph, gradients: Sequence[Gradients], keep: bool) -> None:
        self._streams = CallStreams(self._devices)
        super()._run_backward(span, gradients, keep)

    def backward_replicas(self, parts: Sequence[BackwardTask], room: Any) -> None:
        first, *others = parts
        if self._nccl.can_use(len(parts)):
            with GradientReduction(self, self._nccl, self._streams, len(parts)) as room.gradient_reduction:
                super().backward_replicas(parts, room)
            return
        sides = first.graph.replicas
        apart = bool(first.collectives) and not all(sides[part.index].remote_call is not None for part in others)
        if first.graph.rng.serialized or not self._on_cpu or sides[0].remote_call is not None or apart:
            super().backward_replicas(parts, room)
            return

        def run() -> list[None]:
            return run_replicas(room, own, [self._backward_task(part) for part in others])

        def own() -> None:
            self.backward_replica(first)
            self._overlap.writable = reusable_gradients([leaf.grad for leaf in first.graph.replicas[0].leaves])
            if not self._in_no_sync:
                self._overlap.run(first.graph.replicas)

        run_as_replica(run, len(parts))

    def backward_replica(self, part: BackwardTask) -> None:
        if part.graph.replicas[part.index].remote_call is None:
            super().backward_replica(part)
        else:
            with self._streams.side_stream():
                run_to_end(self._backward_task(part))

    def _backward_task(self, part: BackwardTask) -> ReplyGenerator[None]:
        """Send one replica's backward and wait for the reply."""
        call: ReplayableCall | None = part.graph.replicas[part.index].remote_call
        if call is None:  # none of its outputs needs a gradient
            yield RUNNING
            super().backward_replica(part)
            return
        retrying: RetryingRequest[Any] = RetryingRequest(self, part.index, self._streams)
        failure: BaseException | None = None
        try:
            part.group.enter(part.index)
            backward = ReplicaBackward(call, part, self._streams)
            reduction: GradientReduction | None = getattr(part.group, "gradient_reduction", None)
            if reduction is not None:
                reduction.add(part.index, backward)
            retrying.send(backward, call.module_state.same_device)
            backward.register_overlap(self._overlap)
            yield RUNNING
            backward.store_gradients((yield from retrying.receive()), self._overlap.late_gradients)
        except BaseException as error:
            failure = unwrap_stop_iteration(error)
            retrying.abandon()
            raise
        finally:
            part.group.leave(part.index, failure)
            failure = None  # its traceback holds this frame

    def _sum_gradients(self, columns: Sequence[Gradients], into: Collection[int] | None = None) -> Gradients:
        """The sum over replicas. It never aliases a worker's slot, which the next backward overwrites."""
        done = self._overlap.finish(columns)
        rest = [[g for place, g in enumerate(column) if place not in done] for column in columns] if done else columns
        into = None if done else self._overlap.writable
        sums = super()._sum_gradients(rest, into)
        if any(gradient is None for gradient in rest[0]):  # then another one's may be the sum
            slots = {id(gradient) for column in rest[1:] for gradient in column}
            sums = [g.clone() if g is not None and id(g) in slots else g for g in sums]
        if done:
            more = iter(sums)
            sums = [done[place] if place in done else next(more) for place in range(len(columns[0]))]
        for _, place, gradient in sorted(self._overlap.late_gradients, key=itemgetter(0)):
            sums[place] = sum_gradients([[sums[place]], [gradient]])[0]
        return sums

    def _defer(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        own = [[None if g is None else g.clone() for g in column] for column in columns[1:]]
        for index, place, gradient in self._overlap.late_gradients:
            own[index - 1][place] = sum_gradients([[own[index - 1][place]], [gradient]])[0]
        super()._defer(sources, [columns[0], *own])

    def close(self) -> None:
        super().close()
        self._nccl.close()
        self._pool.close()
        drop_dead_clients()
        self._pool = WorkerPool(self._devices)


def _snapshot_arguments(call: ReplicaCall) -> ArgumentSnapshot | None:
    """The caller's objects that replica 0 can change, which it shares with the caller; None if there are none."""
    if not call.mutable_argument_ids:
        return None
    args, kwargs = call.arguments[0]
    found = mutable_arguments(args, kwargs, call.mutable_argument_ids)
    return ArgumentSnapshot([*args, *kwargs.values()], [one.path for one in found]) if found else None


def _raise_interruption(error: BaseException | None) -> None:
    """Raise an interruption at once, without waiting for the other replicas."""
    if error is not None and not isinstance(error, Exception):
        raise error
