"""The `processes` engine: replica 0 runs in this process, every other replica in a worker process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.autograd.bridge import CallGraph, Gradients, ReplicaGraph, outputs_with_gradients
from instep.autograd.graph_walk import ReachedCollectives, walk_graph
from instep.collectives.buckets import all_present, reusable_gradients, sum_gradients
from instep.collectives.group import ReplicaContext
from instep.engines.base import ReplicaCall, raise_first_error, run_forward
from instep.engines.concurrent import BackwardTask, ConcurrentEngine
from instep.engines.processes.controller.backward import ReplicaBackward
from instep.engines.processes.controller.client import WorkerClient, client_for, drop_dead_clients
from instep.engines.processes.controller.forward import RemoteCall, ReplicaForward
from instep.engines.processes.controller.nccl_manager import NcclManager, ParameterBroadcast, abort_all_groups
from instep.engines.processes.controller.nccl_reduction import GradientReduction
from instep.engines.processes.controller.overlap import OverlappedSum
from instep.engines.processes.controller.prepared import PreparedProcessRun, can_prepare
from instep.engines.processes.controller.remote_replica import RemoteReplica, module_ids
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
from instep.engines.processes.transport.device_rows import DeviceRowMemory
from instep.engines.processes.transport.row_memory import RowMemory
from instep.engines.processes.worker.rng import PythonRngMonitor
from instep.engines.thread_pool import is_replica_thread
from instep.errors import EngineError, LostExchange, RemoteArgumentError, WorkerFailure
from instep.replicas.mutable_arguments import ArgumentSnapshot, mutable_arguments
from instep.replicas.replica import Replica, ReplicaResult
from instep.runtime.ambient import AutocastState
from instep.runtime.locks import ForkSafeLock
from instep.runtime.modes import NO_CONTEXT
from instep.runtime.torch_private import custom_function, has_no_saved_tensor_hooks
from instep.structure.tree import tensors_in

RESTART_WINDOW = 60.0
"""Seconds for which the death of a worker counts against `restarts`."""


_device_rows_lock = ForkSafeLock()
"""Held by the call that exchanges rows on a device. The calls of other threads exchange them by messages meanwhile."""


@dataclass
class _BackwardState:
    """The state of one running backward."""

    streams: CallStreams
    overlap: OverlappedSum = field(default_factory=OverlappedSum)
    reduction: GradientReduction | None = None
    """Set if the gradients are reduced over NCCL."""


class ProcessesEngine(ConcurrentEngine[ControllerRendezvous]):
    """Runs replica 0 in this process and each other replica in a worker process."""

    name = "processes"
    out_of_process = True
    group_class = ControllerRendezvous

    def __init__(self, devices: Sequence[torch.device], *, restarts: int = 3, timeout: float = 600.0) -> None:
        if any(device.type not in ("cpu", "cuda") for device in devices):
            names = ", ".join(sorted({device.type for device in devices}))
            raise EngineError(
                f"engine='processes' supports CPU and CUDA devices; these are of type {names}. Use engine='threads'."
            )
        super().__init__(devices, timeout=timeout)
        self.restarts = restarts
        self._replica_names = [f"replica {index} on {device}" for index, device in enumerate(devices)]
        self._pool = WorkerPool(devices)
        self._death_times: list[float] = []
        self._death_lock = ForkSafeLock()
        self._repeats_broadcast = False
        """Whether the next call repeats one whose broadcast over NCCL was lost."""
        self.ipc_status: dict[int, str | None] = {}
        """By replica index: why CUDA IPC is not used (see `WorkerClient.refusal_for`)."""
        self._clients: dict[int, WorkerClient] = {}
        """By replica index: the client of the last call."""
        self._running_backward: _BackwardState | None = None
        self._nccl = NcclManager(self, devices)
        self._python_rng = PythonRngMonitor()
        self._row_memory: RowMemory | None = None
        self._exchanges_rows = False
        """Whether a replica has called `Group.all_gather`. From the next call on it uses shared memory."""

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> ProcessesEngine:
        return cls(devices, restarts=restarts, timeout=timeout)

    @classmethod
    def shutdown(cls) -> None:
        """Abort the NCCL groups and stop the worker processes of this process."""
        abort_all_groups()
        stop_all()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        source_device = self._devices[0]
        if source_device.type == "cpu":
            share_parameters(tensors)
            return
        same_device = [index for index, device in enumerate(self._devices) if index and device == source_device]
        uses_ipc: bool = bool(same_device) and send_and_wait(
            self, same_device[0], IpcCheck(), CallStreams(self._devices)
        )
        if uses_ipc or self._nccl.can_use(len(self._devices)):  # NCCL broadcasts neighbours at once
            with suppress(DriverError):  # without memory for it, tensors stay in place and workers get copies
                share_parameters(tensors, partial(allocate_shared, device=source_device), source_device)

    def describe_transport(self) -> str:
        if self._on_cpu or not self.ipc_status:
            return ""
        refusal = next((reason for reason in self.ipc_status.values() if reason), None)
        if refusal is not None:
            return f"tensors are sent through host memory, because device memory cannot be shared here ({refusal})"
        by_ipc = sum(reason == "" for reason in self.ipc_status.values())
        ways = ["CUDA IPC"] * bool(by_ipc) + ["host memory"] * (by_ipc < len(self.ipc_status))
        return f"tensors are sent through {' or '.join(ways)}{self._nccl.describe()}"

    def replica_classes(self) -> list[type[Replica]]:
        return [Replica, *[RemoteReplica] * (len(self._devices) - 1)]

    def get_worker(self, index: int) -> tuple[WorkerProcess, WorkerClient]:
        worker = self._pool.get(index, self.timeout)
        client = client_for(worker)
        client.timeout = self.timeout
        self._clients[index] = client
        return worker, client

    def prepare_device(self, index: int, client: WorkerClient, streams: CallStreams, may_use_ipc: bool) -> None:
        memory_device = self._devices[0] if may_use_ipc else None
        client.prepare_device(self._devices[index], memory_device)
        self.ipc_status[index] = client.refusal_for(memory_device)
        client.worker.connection.receiver = streams.receiver()

    def replace_dead(self, index: int, worker: WorkerProcess | None, closed: ConnectionClosed) -> None:
        reason = str(closed) if worker is None else f"the worker of {worker.name} ended: {worker.exit_reason()}"
        self.abort_groups(worker)
        if worker is None or self._pool.last_worker(index) is worker:  # another thread may have replaced it
            self._pool.kill(index)
        client = self._clients.get(index)
        if client is not None and client.worker is worker:
            client.release_waits()
            client.raise_lost_results()
        with self._death_lock:
            now = time.monotonic()
            self._death_times = [*(then for then in self._death_times if now - then < RESTART_WINDOW), now]
            too_many = len(self._death_times) > self.restarts
            if too_many:
                self._death_times = []
        if too_many:
            raise WorkerFailure(
                f"{reason}\n"
                f"The step is not run again: {self.restarts + 1} worker process(es) ended within "
                f"{RESTART_WINDOW:.0f} s, and restarts={self.restarts}. The module is as it was before the call."
            ) from closed

    def kill_stuck(self, index: int) -> None:
        self.abort_groups(self._pool.last_worker(index))
        self._pool.kill(index)

    def abort_groups(self, worker: WorkerProcess | None) -> None:
        self._nccl.abort_groups_of(worker)

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]:
        self.raise_lost_results()
        in_caller = self._can_run_in_caller(call)
        streams = CallStreams(self._devices, in_caller=in_caller)
        remote = RemoteCall(call, self.forward_group(call), streams, python_seed=self._python_rng.begin_call())
        arguments = _snapshot_arguments(call)
        try:
            # On the CPU a lock keeps replica 0 in one call at a time. On accelerators it must not be held: a gradient
            # that forward takes is computed in a thread of autograd.
            with self._lock if self._on_cpu else self._broadcast_parameters(remote):
                if in_caller:
                    return self._forward_in_caller(remote)
                return self.forward_in_threads(call, remote.group, partial(self._run_forward, remote))
        except RemoteArgumentError:
            if arguments is not None:
                arguments.restore()
            raise

    def prepare(self, call: ReplicaCall, results: Sequence[ReplicaResult]) -> PreparedProcessRun | None:
        """On the CPU or one GPU, for a call whose replicas have changed nothing and called no collective."""
        if not (self._on_cpu or self._shares_one_gpu) or not self._can_run_in_caller(call):
            return None
        if not call.has_plain_arguments:
            return None
        if any(result.written_state or result.statistics or result.changes for result in results):
            return None
        context, others = results[0].context, range(1, len(call.replicas))
        if not isinstance(context, ReplicaContext) or context.exchange_count or any(call.rng.generator_pairs):
            return None
        if not all(can_prepare(call, index, self.current_client(index)) for index in others):
            return None
        return PreparedProcessRun(self, call, captures=self._on_cpu and not _has_custom_functions(results[0].output))

    def current_client(self, index: int) -> WorkerClient | None:
        """The client of a replica's worker, if that is the worker of the last call, with this engine's timeout."""
        client, worker = self._clients.get(index), self._pool.last_worker(index)
        if client is None or client.worker is not worker or not worker.is_owned():
            return None
        client.timeout, worker.name = self.timeout, self._replica_names[index]
        return client

    def call_lock(self) -> AbstractContextManager[Any]:
        """The lock that keeps replica 0 in one call at a time."""
        return self._lock

    def begin_python_rng(self) -> int | None:
        """The seed of Python's and NumPy's generators in the workers, before a call; None if they need none."""
        return self._python_rng.begin_call()

    def end_python_rng(self, seed: int | None) -> None:
        """After replica 0 has run: check whether it used these generators."""
        self._python_rng.end_call(seed)

    def remote_call(self, call: ReplicaCall, python_seed: int | None) -> RemoteCall:
        """A call in the form of the general path, in which this thread waits for the workers."""
        streams = CallStreams(self._devices, in_caller=True)
        return RemoteCall(call, self.forward_group(call), streams, python_seed=python_seed)

    def forward_again(self, remote: RemoteCall, index: int) -> ReplicaResult:
        """Run the forward of one replica on a replacement of its worker. The other replicas have run."""
        for other in set(range(len(remote.call.replicas))) - {index}:
            remote.group.enter(other)
            remote.group.leave(other)
        with self._client_locks() as locks:
            return run_to_end(self._forward_task(remote, index, locks))

    def _client_locks(self) -> AbstractContextManager[ExitStack | None]:
        """Context manager: on an accelerator, what holds clients' locks until their replies are received."""
        return NO_CONTEXT if self._on_cpu else ExitStack()

    @contextmanager
    def _broadcast_parameters(self, remote: RemoteCall) -> Iterator[None]:
        """Broadcast the module's tensors over NCCL, if the workers form a group."""
        call = remote.call
        repeats, self._repeats_broadcast = self._repeats_broadcast, False
        uses_nccl = not repeats and call.sync_state and not call.rng.serialized
        uses_nccl = uses_nccl and self._nccl.can_use(len(call.replicas))
        group = self._nccl.get_group() if uses_nccl else None
        if group is None or group.in_backward:
            yield
            return
        remote.broadcast = ParameterBroadcast(group, deferred=remote.streams.in_caller)
        if not remote.streams.in_caller:
            _ = self.threads  # created now: that takes a lock which a backward holds while it waits for the group's
        try:
            with remote.broadcast:
                yield
        except Exception as error:
            if not isinstance(error, WorkerFailure):
                self._raise_lost_broadcast(remote.broadcast)
            raise
        self._raise_lost_broadcast(remote.broadcast)

    def _raise_lost_broadcast(self, broadcast: ParameterBroadcast) -> None:
        """Raise if a worker may have run with weights that it had not received completely.

        The call then runs again, without NCCL.
        """
        if broadcast.was_aborted:
            self._repeats_broadcast = True
            raise LostExchange("the broadcast of the weights may be incomplete.")

    @property
    def _needs_no_threads(self) -> bool:
        """Whether the calling thread asks all workers itself: it need not wait for the copies of batches and outputs.

        All replicas are on the caller's device, or their workers are known to reach its memory.
        """
        if self._on_cpu or self._shares_one_gpu:
            return True
        return all(self.ipc_status.get(index) == "" for index in range(1, len(self._devices)))

    @property
    def _shares_one_gpu(self) -> bool:
        """Whether all replicas are on one GPU, and are not treated as if each had its own."""
        is_one_gpu = self._devices[0].type == "cuda" and len(set(self._devices)) == 1
        return is_one_gpu and not self._nccl.can_use(len(self._devices))

    def _can_run_in_caller(self, call: ReplicaCall) -> bool:
        """Whether the calling thread can run replica 0 and wait for all workers, without other threads."""
        return (
            self._needs_no_threads
            and not call.rng.serialized
            and not is_replica_thread()
            and call.ambient.default_device is None
            and call.ambient.saved_tensor_hooks is None
            and has_no_saved_tensor_hooks()
        )

    def _forward_in_caller(self, remote: RemoteCall) -> list[ReplicaResult]:
        with self._row_exchange(remote.group):
            return self._run_in_caller(remote)

    def _run_in_caller(self, remote: RemoteCall) -> list[ReplicaResult]:
        """Send every worker its forward, run replica 0 in this thread, and wait for the replies."""
        call, group = remote.call, remote.group
        group.logs_rows = call.ambient.grad_enabled

        def run() -> list[ReplicaResult]:  # with the thread count of a replica, which is sent to the workers
            with self._client_locks() as locks:
                tasks = [self._forward_task(remote, index, locks) for index in range(1, len(call.replicas))]
                return run_replicas(group, run_first, tasks)

        def run_first() -> ReplicaResult:
            if remote.broadcast is not None:
                remote.broadcast.run_deferred()
            if call.ambient.autocast:  # weights may have changed since they were cast in the caller's block
                torch.clear_autocast_cache()
            result = self._run_forward(remote, 0)
            _raise_interruption(result.error)
            group.has_failed = result.error is not None
            return result

        try:
            results = run_as_replica(run, len(call.replicas), caller_restores=True, on_accelerator=not self._on_cpu)
        finally:
            remote.streams.finish()
        lost = next((result.error for result in results if isinstance(result.error, LostExchange)), None)
        if lost is not None:
            raise lost
        self._exchanges_rows = self._exchanges_rows or group.has_gathered
        raise_first_error(call.replicas, results)
        group.check_device_rows()
        return results

    def _row_exchange(self, group: ControllerRendezvous) -> AbstractContextManager[None]:
        """Context manager: a group whose replica 0 runs in this thread exchanges rows through shared memory."""
        return self._exchange_rows(group) if self._exchanges_rows and self._needs_no_threads else NO_CONTEXT

    @contextmanager
    def _exchange_rows(self, group: ControllerRendezvous) -> Iterator[None]:
        if self._on_cpu:  # the caller holds a lock
            group.use_row_memory(self._get_row_memory())
            yield
        elif _device_rows_lock.is_owned() or not _device_rows_lock.acquire(blocking=False):
            yield  # exchange by messages
        else:
            try:
                group.use_row_memory(self._get_row_memory())
                yield
            finally:
                _device_rows_lock.release()

    def _get_row_memory(self) -> RowMemory:
        memory = self._row_memory
        if memory is None or memory.owner_pid != os.getpid():
            memory = self._row_memory = RowMemory.create(len(self._devices), next(module_ids))
            # Rows on a device need a worker's exit to be noticed, as IPC does.
            if self._devices[0].type == "cuda" and all(refusal == "" for refusal in self.ipc_status.values()):
                with suppress(DriverError):  # rows are then exchanged by messages
                    memory.device_rows = DeviceRowMemory.create(len(self._devices), self._devices[0])
        return memory

    def _run_forward(self, remote: RemoteCall, index: int) -> ReplicaResult:
        """Run one replica's forward, in its thread."""
        if index:
            with remote.streams.side_stream(), ExitStack() as locks:
                return run_to_end(self._forward_task(remote, index, locks))
        result = run_forward(remote.call, 0, remote.group)
        self._python_rng.end_call(remote.python_seed)
        return result

    def _forward_task(self, remote: RemoteCall, index: int, locks: ExitStack | None) -> ReplyGenerator[ReplicaResult]:
        """Send one replica's forward and wait for the reply."""
        retrying: RetryingRequest[Any] = RetryingRequest(self, index, remote.streams, locks)
        failure: BaseException | None = None
        sent = False
        try:
            remote.group.enter(index)
            forward = ReplicaForward(remote, index)
            retrying.send(forward, replace_at_once=remote.group.uses_device_rows)
            sent = True
            yield RUNNING
            forward.prepare_replay()
            return forward.to_result(*(yield from retrying.receive()))
        except BaseException as error:
            failure = unwrap_stop_iteration(error)
            retrying.abandon()
            if remote.broadcast is not None and not sent:
                remote.broadcast.fail("no request could be sent to a worker")
            if not retrying.is_reply_error(failure):
                _raise_interruption(failure)
            return ReplicaResult(error=failure)
        finally:
            remote.group.leave(index, failure)
            failure = None  # breaks the cycle with this frame

    def reached_collectives(self, graph: CallGraph, index: int, outputs: Sequence[Tensor]) -> ReachedCollectives:
        call = _replayable_call(graph.replicas[index])
        if call is None:
            return super().reached_collectives(graph, index, outputs)
        return send_and_wait(self, index, ReachabilityRequest(call, outputs), self._backward_state.streams)

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        self.raise_lost_results()
        with self._lock, self._run_state(in_caller=self._can_run_backward_in_caller(graph)):
            return super().backward(graph, gradients, retain_graph)

    def running_backward(self) -> AbstractContextManager[None]:
        """Context manager around a backward in which this thread waits for the workers."""
        return self._run_state(in_caller=True)

    @contextmanager
    def _run_state(self, *, in_caller: bool) -> Iterator[None]:
        """Context manager: the state of a backward. With `in_caller`, the calling thread waits for the workers."""
        streams = CallStreams(self._devices, in_caller=in_caller)
        outer, self._running_backward = self._running_backward, _BackwardState(streams)
        try:
            yield
        finally:
            streams.finish()
            self._running_backward = outer

    def backward_again(self, graph: CallGraph, index: int, gradients: Gradients, retain_graph: bool) -> None:
        """Run the backward of one replica on a replacement of its worker, in `running_backward`."""
        group, replica = self.backward_group(graph, serialized=False), graph.replicas[index]
        outputs, grads = outputs_with_gradients(replica, gradients)
        autocast = AutocastState.capture()
        task = BackwardTask(group, index, graph, replica, outputs, grads, retain_graph, [], autocast)
        with self._client_locks() as locks:
            run_to_end(self._backward_task(task, locks))

    def reduce_gradients(self, columns: Sequence[Gradients]) -> Gradients:
        """The sum of the replicas' gradients, in `running_backward`."""
        return self._reduce_gradients(columns)

    @property
    def _backward_state(self) -> _BackwardState:
        assert self._running_backward is not None
        return self._running_backward

    def backward_replicas(
        self, tasks: Sequence[BackwardTask[ControllerRendezvous]], group: ControllerRendezvous
    ) -> None:
        state = self._backward_state
        if self._nccl.can_use(len(tasks)):
            replicas, overlaps = [task.replica for task in tasks], not tasks[0].graph.rng.serialized
            with GradientReduction(self, self._nccl, state.streams, replicas, overlaps=overlaps) as state.reduction:
                self._run_backwards(tasks, group)
        else:
            self._run_backwards(tasks, group)

    def _run_backwards(self, tasks: Sequence[BackwardTask[ControllerRendezvous]], group: ControllerRendezvous) -> None:
        if self._backward_state.streams.in_caller:
            self._backward_in_caller(tasks, group)
        else:
            super().backward_replicas(tasks, group)

    def _can_run_backward_in_caller(self, graph: CallGraph) -> bool:
        """Whether the calling thread can run replica 0's backward and wait for all workers.

        With collectives, no other replica may be in this process: it would wait for replica 0. And on an accelerator
        all outputs have to be there: otherwise another thread of autograd would run the collectives.
        """
        first, *others = graph.replicas
        if not self._needs_no_threads or graph.rng.serialized or first.remote is not None:
            return False
        if not first.tokens:
            return True
        on_device = self._on_cpu or all(output is None or output.device.type != "cpu" for output in first.outputs)
        return on_device and all(replica.remote is not None for replica in others)

    def _backward_in_caller(
        self, tasks: Sequence[BackwardTask[ControllerRendezvous]], group: ControllerRendezvous
    ) -> None:
        first, *others = tasks
        overlap = self._backward_state.overlap
        group.logs_rows = False  # a backward with rows on a device is not run again

        def run() -> list[None]:
            with self._client_locks() as locks:
                return run_replicas(group, run_first, [self._backward_task(task, locks) for task in others])

        def run_first() -> None:
            self.backward_replica(first)
            overlap.writable = reusable_gradients([leaf.grad for leaf in first.replica.leaves])
            if not self._in_no_sync:
                overlap.run(first.graph.replicas)

        with self._row_exchange(group):
            run_as_replica(run, len(tasks), on_accelerator=not self._on_cpu)
            try:
                group.check_device_rows()
            except LostExchange as error:
                raise WorkerFailure(f"{error}\nNo gradient has changed. Run the step again.") from error

    def backward_replica(self, task: BackwardTask[ControllerRendezvous]) -> None:
        reduction = self._backward_state.reduction
        if task.index == 0 and reduction is not None and reduction.overlapped is not None:
            reduction.overlapped.run_first(partial(super().backward_replica, task))
        elif task.replica.remote is None:
            super().backward_replica(task)
        else:
            with self._backward_state.streams.side_stream(), ExitStack() as locks:
                run_to_end(self._backward_task(task, locks))

    def _backward_task(self, task: BackwardTask[ControllerRendezvous], locks: ExitStack | None) -> ReplyGenerator[None]:
        """Send one replica's backward and wait for the reply."""
        call, state = _replayable_call(task.replica), self._backward_state
        if call is None:  # none of its outputs needs a gradient
            yield RUNNING
            super().backward_replica(task)
            return
        retrying: RetryingRequest[Any] = RetryingRequest(self, task.index, state.streams, locks)
        failure: BaseException | None = None
        try:
            task.group.enter(task.index)
            backward = ReplicaBackward(call, task, state.streams)
            if state.reduction is not None:
                state.reduction.add(task.index, backward)
            # The other replicas may wait for this one before it is received.
            replace_at_once = task.group.uses_device_rows or backward.reduction is not None
            retrying.send(backward, replace_at_once=replace_at_once)
            backward.register_overlap(state.overlap)
            yield RUNNING
            backward.store_gradients((yield from retrying.receive()), state.overlap.late_gradients)
        except BaseException as error:
            failure = unwrap_stop_iteration(error)
            if state.reduction is not None:
                state.reduction.abort("a replica failed")
            retrying.abandon()
            raise
        finally:
            task.group.leave(task.index, failure)
            failure = None  # breaks the cycle with this frame

    def _reduce_gradients(self, columns: Sequence[Gradients]) -> Gradients:
        """The sum over replicas. It never aliases a worker's slot, which the next backward overwrites."""
        overlap = self._backward_state.overlap
        done = overlap.finish(columns)
        rest = [[g for i, g in enumerate(column) if i not in done] for column in columns] if done else columns
        sums = self._sum_gradients(rest, None if done else overlap.writable)
        if not all_present(rest[0]):  # the sum may then be another replica's gradient itself
            slots = {id(gradient) for column in rest[1:] for gradient in column}
            sums = [g.clone() if g is not None and id(g) in slots else g for g in sums]
        if done:
            remaining = iter(sums)
            sums = [done[i] if i in done else next(remaining) for i in range(len(columns[0]))]
        for late in sorted(overlap.late_gradients, key=lambda late: late.replica_index):
            sums[late.position] = sum_gradients([[sums[late.position]], [late.gradient]])[0]
        return sums

    def _defer(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        copies = [[None if g is None else g.clone() for g in column] for column in columns[1:]]
        for late in self._backward_state.overlap.late_gradients:
            column = copies[late.replica_index - 1]
            column[late.position] = sum_gradients([[column[late.position]], [late.gradient]])[0]
        super()._defer(sources, [columns[0], *copies])

    def raise_lost_results(self) -> None:
        """Raise if a worker ended before results that were already returned were complete."""
        for client in self._clients.values():
            client.raise_lost_results()

    def close(self) -> None:
        super().close()
        self._nccl.close()
        self._row_memory = None
        self._pool.close()
        drop_dead_clients()
        self._pool = WorkerPool(self._devices)


def _replayable_call(replica: ReplicaGraph) -> ReplayableCall | None:
    """The call of a replica in a worker; None if the replica's graph is in this process."""
    assert replica.remote is None or isinstance(replica.remote, ReplayableCall)
    return replica.remote


def _has_custom_functions(output: Any) -> bool:
    """Whether the graph of an output has nodes of `torch.autograd.Function` classes."""
    nodes = walk_graph(tensor.grad_fn for tensor in tensors_in(output))
    return any(custom_function(node) is not None for node in nodes)


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
