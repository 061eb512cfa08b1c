"""Prepared runs: calls like an earlier one, whose workers already know all but the arguments and the seeds.

A prepared run does the same as `ProcessesEngine.forward` and `backward` in the usual case, in fewer steps: all replicas
are on the CPU or on one GPU, where they share memory, the calling thread runs the first one, no replica calls a
collective, and forward changes no state. It finds out when a call is not like that, and the caller then uses the
general path.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.autograd.bridge import CallGraph, Gradients, ReplicaGraph, outputs_with_gradients, take_gradients
from instep.collectives.buckets import all_present, are_reusable, reusable_gradients, sum_gradients
from instep.collectives.group import ReplicaContext, ReplicaInfo, first_error
from instep.engines.base import (
    RUN_PREPARED_FORWARD,
    Arguments,
    ReplicaCall,
    raise_first_error,
    run_prepared_forward,
)
from instep.engines.concurrent import backward_in_group
from instep.engines.plain_values import dump_plain, encode_plain
from instep.engines.processes import messages
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.forward import RemoteCall, ReplicaForward
from instep.engines.processes.controller.remote_module import RemoteModuleState
from instep.engines.processes.controller.remote_replica import RemoteReplica, module_ids
from instep.engines.processes.controller.rendezvous import (
    CollectiveLog,
    ControllerRendezvous,
    run_as_replica,
    send_lock,
    threads_per_replica,
)
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.lifecycle.output import flush_output
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.messages import (
    BackwardReply,
    BackwardRequest,
    ForwardReply,
    PreparedBackwardRequest,
    PreparedForwardRequest,
    PrepareRequest,
)
from instep.engines.processes.serialization.registry import sendable_context
from instep.engines.processes.transport.channel import reply_rebuilder
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.cuda_ipc import IpcError
from instep.engines.thread_pool import is_replica_thread
from instep.errors import LostExchange
from instep.replicas.replica import RemoteEffects, ReplicaResult
from instep.replicas.write_watch import deduplicate_views
from instep.runtime.ambient import AutocastState, anomaly_mode
from instep.runtime.locks import run_uninterrupted
from instep.runtime.modes import NO_CONTEXT
from instep.runtime.rng import ReplicaRng


class PreparedEngine(Protocol):
    """What a prepared run needs of the `processes` engine."""

    @property
    def in_no_sync(self) -> bool:
        """Whether gradients are not reduced now."""
        ...

    def call_lock(self) -> AbstractContextManager[Any]:
        """The lock that keeps replica 0 in one call at a time."""
        ...

    def running_backward(self) -> AbstractContextManager[None]:
        """Context manager around the backward of a call."""
        ...

    def raise_lost_results(self) -> None:
        """Raise if a worker ended before results that were already returned were complete."""
        ...

    def begin_python_rng(self) -> int | None:
        """The seed of Python's generators in the workers, before a call."""
        ...

    def end_python_rng(self, seed: int | None) -> None:
        """Check whether replica 0 has used Python's generators."""
        ...

    def current_client(self, index: int) -> WorkerClient | None:
        """The client of a replica's worker, if that is the worker of the last call, with this engine's timeout."""
        ...

    def prepare_device(self, index: int, client: WorkerClient, streams: CallStreams, may_use_ipc: bool) -> None:
        """Make a worker select its device, and set up the transfer of tensors."""
        ...

    def replace_dead(self, index: int, worker: Any, closed: ConnectionClosed) -> None:
        """Replace a worker that died; raises `WorkerFailure` if too many died recently."""
        ...

    def kill_stuck(self, index: int) -> None:
        """Kill a worker that does not reply."""
        ...

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """The general path of a backward."""
        ...

    def remote_call(self, call: ReplicaCall, python_seed: int | None) -> RemoteCall:
        """A call in the form of the general path."""
        ...

    def forward_again(self, remote: RemoteCall, index: int) -> ReplicaResult:
        """The forward of one replica on a replacement of its worker."""
        ...

    def backward_again(self, graph: CallGraph, index: int, gradients: Gradients, retain_graph: bool) -> None:
        """The backward of one replica on a replacement of its worker."""
        ...

    def reduce_gradients(self, columns: Sequence[Gradients]) -> Gradients:
        """The sum of the replicas' gradients."""
        ...


class _PreparedWorker:
    """One remote replica of prepared calls, and the id by which its worker knows them."""

    def __init__(
        self, call: ReplicaCall, index: int, replica: RemoteReplica, client: WorkerClient, *, captures: bool
    ) -> None:
        args, kwargs = call.arguments[index]
        self.index, self.replica, self.client = index, replica, client
        self.module_state: RemoteModuleState = replica.worker_states[client]
        self.number = next(module_ids)
        ambient = call.ambient.encode(replica.source_device, replica.worker_device)
        ambient.process.num_threads = threads_per_replica(len(call.replicas))
        self.tensor_indices = [self.module_state.local_indices[id(leaf)] for _, leaf in replica.trainable]
        """The leaves' indices in the worker's tensor table."""
        self.request = PrepareRequest(
            replica.module_id,
            str.__str__(call.method),
            index,
            list(call.sizes),
            len(call.replicas),
            len(args),
            list(kwargs),
            self.tensor_indices,
            ambient,
            captures,
        )
        slots = self.module_state.gradient_slots
        self.slots: Gradients = [slots[index] for index in self.tensor_indices]
        """The memory that the worker writes their gradients to."""
        with client.lock:
            client.channel.send(messages.PREPARE, self.number, self.request, label="a prepared call")
        weakref.finalize(self, client.released.append, ("module", self.number))


def can_prepare(call: ReplicaCall, index: int, client: WorkerClient | None) -> bool:
    """Whether the worker of a replica needs nothing but the arguments and the seeds of such calls."""
    replica, (args, kwargs) = call.replicas[index], call.arguments[index]
    if client is None or not isinstance(replica, RemoteReplica) or encode_plain([*args, *kwargs.values()]) is None:
        return False
    state: RemoteModuleState | None = replica.worker_states.get(client)
    if state is None or state.unshared or state.staging is not None or state.generators or state.doorbell is not None:
        return False
    if replica.source_device.type != "cpu" and not isinstance(state.gradient_memory, DeviceMemory):
        return False
    return all(state.local_indices.get(id(leaf), -1) in state.gradient_slots for _, leaf in replica.trainable)


class _Transfers:
    """Context manager around a forward or backward whose tensors are sent by CUDA IPC."""

    def __init__(self, engine: PreparedEngine, devices: Sequence[torch.device]) -> None:
        self._engine, self._streams, self._locks = engine, CallStreams(devices, in_caller=True), ExitStack()

    def __enter__(self) -> _Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._locks.close()
        finally:
            self._streams.finish()

    def prepare(self, index: int, client: WorkerClient, pending: PendingReply) -> None:
        """Prepare for a request.

        Holds the client's lock until the context exits: a worker reads tensors in the order in which they are written.
        """
        self._locks.enter_context(client.lock)
        pending.holds_lock = True
        self._engine.prepare_device(index, client, self._streams, may_use_ipc=True)


class _SentForward:
    """A forward that a worker runs."""

    def __init__(self, worker: _PreparedWorker, pending: PendingReply, arguments: list[Tensor]) -> None:
        self.worker, self.pending, self.arguments = worker, pending, arguments
        self.request: PreparedForwardRequest | None = None
        """None if nothing was sent."""
        self.closed: ConnectionClosed | None = None
        """Why the request could not be sent."""
        self.replayable: ReplayableCall | None = None


class PreparedProcessRun:
    """Runs calls like the one that it is created for. Also their backward, as the engine of their graphs."""

    def __init__(self, engine: PreparedEngine, call: ReplicaCall, *, captures: bool) -> None:
        """`captures` is whether backward captures gradients, unless forward may have used reentrant checkpoints."""
        self._engine, self._captures = engine, captures
        self._devices = [call.replicas[0].device] * len(call.replicas)
        self._on_cpu = self._devices[0].type == "cpu"
        # Without what would keep the tensors of this call alive.
        self._template = replace(call, arguments=[], select_output=None)
        self._first = call.replicas[0]
        self._info = ReplicaInfo(0, len(call.replicas), self._first.device, call.sizes[0], 0)
        self._syncs_batchnorm = bool(getattr(self._first.patch, "enabled", False))
        self._workers = [self._prepare(call, index) for index in range(1, len(call.replicas))]
        self._layouts_and_dtypes = list(map(_layout_and_dtype, self._workers[0].slots))
        self.is_valid = True
        """Whether no call has turned out to be different since."""

    def _prepare(self, call: ReplicaCall, index: int) -> _PreparedWorker:
        client, replica = self._engine.current_client(index), call.replicas[index]
        assert client is not None
        assert isinstance(replica, RemoteReplica)
        return _PreparedWorker(call, index, replica, client, captures=self._captures)

    def can_run(self) -> bool:
        """Whether the workers are those that were prepared, and no context variable has to be sent to them."""
        context = copy_context()
        for worker in self._workers:
            if self._engine.current_client(worker.index) is not worker.client:
                self.is_valid = False
                return False
            if len(context) and sendable_context(context, worker.client.channel.registry):
                return False
        return True

    def forward(self, rows: Sequence[Arguments], rng: ReplicaRng) -> list[ReplicaResult]:
        """Run a forward with these arguments of each replica.

        Raises `LostExchange` if it cannot be run so: the general path has to run it.
        """
        self._engine.raise_lost_results()
        python_seed = self._engine.begin_python_rng()
        try:
            # On a GPU the lock must not be held: see `ProcessesEngine.forward`.
            with self._engine.call_lock() if self._on_cpu else NO_CONTEXT, self._begin_transfers() as transfers:
                run = partial(self._forward, rows, rng, python_seed, transfers)
                return run_as_replica(run, len(rows), caller_restores=True, on_accelerator=not self._on_cpu)
        except LostExchange:
            self.is_valid = False
            raise

    def _begin_transfers(self) -> AbstractContextManager[_Transfers | None]:
        """Context manager: tensors are sent by CUDA IPC, if the replicas are on a GPU."""
        return NO_CONTEXT if self._on_cpu else _Transfers(self._engine, self._devices)

    def _forward(
        self, rows: Sequence[Arguments], rng: ReplicaRng, python_seed: int | None, transfers: _Transfers | None
    ) -> list[ReplicaResult]:
        sent: list[_SentForward] = []
        try:
            with send_lock:
                for worker, row in zip(self._workers, rows[1:], strict=True):
                    sent.append(self._send_forward(worker, row, rng, python_seed, transfers))
            first = copy_context().run(self._run_first, rows[0], rng)
            self._engine.end_python_rng(python_seed)
            if torch.is_grad_enabled():
                for forward in sent:
                    self._prepare_replay(forward, rows)
            if first.error is None and self._template.has_local_effects is not None:
                self._template.has_local_effects(first)  # while workers run: the replica set need not look again
            results = [first]
            for forward in sent:
                failed = first.error is not None
                results.append(self._receive_forward(forward, rows, rng, python_seed, failed=failed))
        except BaseException:
            run_uninterrupted(*(partial(_abandon, forward) for forward in sent))
            raise
        for result in results:
            if isinstance(result.error, LostExchange):
                raise result.error
        raise_first_error(self._template.replicas, results)
        return results

    def _send_forward(
        self,
        worker: _PreparedWorker,
        row: Arguments,
        rng: ReplicaRng,
        python_seed: int | None,
        transfers: _Transfers | None,
    ) -> _SentForward:
        """Send a worker its arguments."""
        client, replica = worker.client, worker.replica
        args, kwargs = deduplicate_views(*row)
        encoded = encode_plain([*args, *kwargs.values()])
        if encoded is None or replica.carried_state:
            raise LostExchange("a worker cannot run the call as it was prepared.")
        replica.restore_views()
        replica.needs_state_refresh = False
        values, tensors = encoded
        seeds = rng.caller.cpu.base_seed, rng.caller.accelerator_seed.base_seed
        with client.lock:
            pending = client.new_pending()
            forward = _SentForward(worker, pending, tensors)
            try:
                if transfers is not None:
                    transfers.prepare(worker.index, client, pending)
                if client.sync_module(replica) is not worker.module_state:
                    raise LostExchange("the module was sent again after the call was prepared.")
                inline, transfer = client.channel.write_tensors(tensors)
                released = client.take_released()
                request = PreparedForwardRequest(worker.number, values, *seeds, released, python_seed, transfer)
                forward.request = request
                client.channel.connection.send(
                    messages.PREPARED_FORWARD, pending.request_id, dump_plain(tuple(request)), inline
                )
            except ConnectionClosed as error:
                forward.closed = error
            except BaseException:
                client.abandon(pending)
                if forward.request is not None:
                    client.requeue_released(forward.request)
                raise
        return forward

    def _run_first(self, row: Arguments, rng: ReplicaRng) -> ReplicaResult:
        """Run replica 0 in this thread, whose ambient state is that of the call."""
        if self._template.ambient.autocast:  # weights may have changed since they were cast in the caller's block
            torch.clear_autocast_cache()
        context = ReplicaContext(
            _NO_GROUP,
            self._info,
            self._template.sizes,
            torch.is_grad_enabled(),
            RUN_PREPARED_FORWARD,
            sync_batchnorm=self._syncs_batchnorm,
            statistics_written=self._first.statistics_written,
        )
        try:
            result = run_prepared_forward(self._first, self._template.method, row, context, rng)
            if context.exchange_count:  # forward may have caught the exception
                raise LostExchange("a collective was called in a call that was prepared without one.")
        except Exception as error:
            return ReplicaResult(error=error)
        return result

    def _prepare_replay(self, forward: _SentForward, rows: Sequence[Arguments]) -> None:
        """Keep what is needed to run a forward again, if its worker dies before the backward."""
        if forward.request is None:  # it could not be sent
            return
        worker = forward.worker
        args, kwargs = rows[worker.index]
        replica = worker.replica
        forward.replayable = ReplayableCall(
            forward.pending.request_id,
            worker.client,
            worker.module_state,
            replica.name,
            replica.recreate,
            replica.private_container_paths,
            replica.source_modules,
            replica.source_changes_ref,
            worker.request.forward_request([*args, *kwargs.values()], forward.request),
            CollectiveLog(),
            forward.arguments,
            is_prepared=True,
        )

    def _receive_forward(
        self,
        forward: _SentForward,
        rows: Sequence[Arguments],
        rng: ReplicaRng,
        python_seed: int | None,
        *,
        failed: bool,
    ) -> ReplicaResult:
        """Wait for a worker's reply."""
        worker, client = forward.worker, forward.worker.client
        try:
            if forward.closed is not None:
                raise forward.closed
            message = client.wait_reply(forward.pending, _failed_call() if failed else None)
            local_tensors = worker.module_state.local_tensors
            fields, tensors = client.channel.decode(message, reply_rebuilder(forward.arguments, local_tensors))
        except (ConnectionClosed, IpcError) as error:
            self._recover(worker, error, forward.request)
            remote = self._engine.remote_call(replace(self._template, arguments=rows, rng=rng), python_seed)
            return self._engine.forward_again(remote, worker.index)
        except ReplyTimeout as error:
            self._engine.kill_stuck(worker.index)
            return ReplicaResult(error=error)
        except Exception as error:
            if forward.request is not None:
                client.requeue_released(forward.request)
            return ReplicaResult(error=error)
        finally:
            flush_output()
        if len(fields) > 1:
            reply = ForwardReply(*fields)
            if not reply.default_rng_used:
                rng.caller.record_remote_use(host=reply.host_rng_used, device=reply.device_rng_used)
                reply.host_rng_used = reply.device_rng_used = False
            if len(reply.fields()) > 1:  # forward had other effects than an output
                return self._apply_reply(forward, rows, rng, python_seed, reply, tensors)
        result, indices = ReplicaResult(output=fields[0]), {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if forward.replayable is not None and indices:
            forward.replayable.output_indices = indices
            forward.replayable.output_versions = {index: tensors[index]._version for index in indices.values()}
            result.remote = RemoteEffects(graph=forward.replayable)
        return result

    def _recover(
        self, worker: _PreparedWorker, error: ConnectionClosed | IpcError, request: PreparedForwardRequest | None = None
    ) -> None:
        """Replace a worker that has died, or send it tensors through host memory if it cannot open that of the GPU."""
        self.is_valid = False
        if isinstance(error, ConnectionClosed):
            self._engine.replace_dead(worker.index, worker.client.worker, error)
            return
        worker.client.disable_ipc(str(error))
        if request is not None:
            worker.client.requeue_released(request)

    def _apply_reply(
        self,
        forward: _SentForward,
        rows: Sequence[Arguments],
        rng: ReplicaRng,
        python_seed: int | None,
        reply: ForwardReply,
        tensors: list[Tensor],
    ) -> ReplicaResult:
        """Apply what the worker's replica changed, like the general path."""
        worker = forward.worker
        remote = self._engine.remote_call(replace(self._template, arguments=rows, rng=rng), python_seed)
        general = ReplicaForward(remote, worker.index)
        general.adopt(worker.client, worker.module_state, forward.pending, forward.arguments)
        try:
            return general.to_result(reply, tensors)
        except Exception as error:
            return ReplicaResult(error=error)

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward (see `autograd.bridge.BackwardEngine`)."""
        engine = self._engine
        if engine.in_no_sync or is_replica_thread() or not self._has_graphs(graph.replicas):
            return engine.backward(graph, gradients, retain_graph)
        engine.raise_lost_results()
        with engine.call_lock(), self._begin_transfers() as transfers:
            try:
                run = partial(self._backward, graph, gradients, retain_graph, transfers)
                columns, is_writable = run_as_replica(run, len(graph.replicas), on_accelerator=not self._on_cpu)
                return self._sum(columns, is_writable), [[] for _ in columns]
            except BaseException:
                run_uninterrupted(*(replica.collect_gradients for replica in graph.replicas))
                raise

    def _sum(self, columns: Sequence[Gradients], is_writable: bool) -> Gradients:
        """The sum of the replicas' gradients, in the order of the replicas.

        `is_writable` is whether nothing else uses the gradients of replica 0, so that sums can be written to them.
        """
        first, *others = columns
        if not all(column is worker.slots for column, worker in zip(others, self._workers, strict=True)):
            return self._reduce(columns)
        if not all_present(first) or list(map(_layout_and_dtype, first)) != self._layouts_and_dtypes:
            return self._reduce(columns)
        if self._on_cpu:
            sums: Any = torch._foreach_add(first, others[0])  # type: ignore[arg-type]
            first, others = list(sums), others[1:]
        elif not is_writable:
            return sum_gradients(columns, reusable_gradients(first))
        for column in others:
            torch._foreach_add_(first, column)  # type: ignore[arg-type]
        return first

    def _reduce(self, columns: Sequence[Gradients]) -> Gradients:
        with self._engine.running_backward():
            return self._engine.reduce_gradients(columns)

    def _has_graphs(self, replicas: Sequence[ReplicaGraph]) -> bool:
        """Whether the workers still have the graphs of their replicas."""
        for worker, replica in zip(self._workers, replicas[1:], strict=True):
            call = replica.remote
            if call is None:
                continue
            assert isinstance(call, ReplayableCall)
            if call.client is not worker.client or call.module_state is not worker.module_state:
                return False
            if self._engine.current_client(worker.index) is not worker.client:
                return False
        return True

    def _backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool, transfers: _Transfers | None
    ) -> tuple[list[Gradients], bool]:
        """Every replica's gradients, and whether sums can be written to those of replica 0."""
        graph.rng.refresh()
        first, *others = graph.replicas
        sent: list[PendingReply | ConnectionClosed | None] = []
        errors: dict[int, BaseException] = {}
        columns: list[Gradients] = []
        is_writable = False
        try:
            with send_lock:
                for worker, replica, grads in zip(self._workers, others, gradients[1:], strict=True):
                    sent.append(self._send_backward(worker, replica, grads, graph.rng, retain_graph, transfers))
            try:
                columns.append(self._backward_first(first, gradients[0], graph.rng, retain_graph))
                # while workers still run
                is_writable = not self._on_cpu and are_reusable(columns[0])
                if not retain_graph:
                    first.free_graph(gradients[0])
            except Exception as error:
                errors[0] = error
            for worker, pending, replica in zip(self._workers, sent, others, strict=True):
                if pending is None:
                    columns.append([None] * len(replica.leaves))
                    continue
                try:
                    if isinstance(pending, ConnectionClosed):
                        raise pending
                    columns.append(self._receive_backward(worker, pending, graph.rng, failed=bool(errors)))
                except (ConnectionClosed, IpcError) as error:
                    self._recover(worker, error)
                    with self._engine.running_backward():
                        self._engine.backward_again(graph, worker.index, gradients[worker.index], retain_graph)
                    columns.append(replica.collect_gradients())
                except Exception as error:
                    if isinstance(error, ReplyTimeout):
                        self._engine.kill_stuck(worker.index)
                    errors[worker.index] = error
                finally:
                    flush_output()
        except BaseException:
            for worker, pending in zip(self._workers, sent, strict=False):
                if isinstance(pending, PendingReply):
                    run_uninterrupted(partial(worker.client.abandon, pending))
            raise
        if errors:
            try:
                raise first_error(errors)
            finally:
                errors.clear()  # breaks the cycle with this frame
        graph.rng.advance()
        return columns, is_writable

    def _send_backward(
        self,
        worker: _PreparedWorker,
        replica: ReplicaGraph,
        gradients: Gradients,
        rng: ReplicaRng,
        retain_graph: bool,
        transfers: _Transfers | None,
    ) -> PendingReply | ConnectionClosed | None:
        """Send a worker the gradients of its outputs; None if there are none."""
        outputs, grads = outputs_with_gradients(replica, gradients)
        call, client = replica.remote, worker.client
        if not outputs:
            return None
        assert isinstance(call, ReplayableCall)
        written_arguments, written_tensors = call.changed_tensors()
        autocast = AutocastState.capture()
        indices = [call.output_indices[id(output)] for output in outputs]
        seed, anomaly = rng.caller.cpu.base_seed, anomaly_mode()
        # A CPU backward that accumulates sends large gradients while it runs, which needs the general request.
        is_usual = (self._captures or not self._on_cpu) and not (
            written_arguments or written_tensors or autocast.enabled
        )
        with client.lock:
            pending = client.new_pending()
            try:
                if transfers is not None:
                    transfers.prepare(worker.index, client, pending)
                if is_usual and call.is_prepared and call.is_first_run:
                    client.channel.send_changed_globals(worker.module_state.module_globals)
                    inline, transfer = client.channel.write_tensors(grads)
                    fields = PreparedBackwardRequest(call.call_id, indices, seed, retain_graph, anomaly, transfer)
                    body = dump_plain(tuple(fields))
                    client.channel.connection.send(messages.PREPARED_BACKWARD, pending.request_id, body, inline)
                else:
                    request = BackwardRequest(
                        call.call_id,
                        dict(zip(indices, grads, strict=True)),
                        seed,
                        wanted_tensors=worker.tensor_indices,
                        retain_graph=retain_graph,
                        written_arguments=written_arguments,
                        written_tensors=written_tensors,
                        autocast=autocast if autocast.enabled else (),
                        anomaly_mode=anomaly,
                        captures=self._captures,
                    )
                    client.send_backward(request, worker.module_state, pending)
            except ConnectionClosed as error:
                return error
            except BaseException:
                client.abandon(pending)
                raise
        return pending

    def _backward_first(
        self, first: ReplicaGraph, gradients: Gradients, rng: ReplicaRng, retain_graph: bool
    ) -> Gradients:
        """Run the backward of replica 0 in this thread."""
        outputs, grads = outputs_with_gradients(first, gradients)
        if not outputs:
            return [None] * len(first.leaves)
        may_recompute = isinstance(first.context, ReplicaContext) and first.context.may_recompute
        leaves = first.leaves if self._captures and not may_recompute else None
        context = rng.backward_context(0) if self._on_cpu else rng.joint_backward_context(0)
        captured = backward_in_group(_NO_GROUP, 0, first, outputs, grads, retain_graph, context, leaves)
        return take_gradients(first.leaves) if captured is None else captured

    def _receive_backward(
        self, worker: _PreparedWorker, pending: PendingReply, rng: ReplicaRng, *, failed: bool
    ) -> Gradients:
        """Wait for a worker's gradients."""
        client, state = worker.client, worker.module_state
        message = client.wait_reply(pending, _failed_call() if failed else None)
        fields, _ = client.channel.decode(message) if message.body else (None, ())
        if fields is None:  # all of them are in their slots
            return worker.slots
        reply = BackwardReply(*fields)
        if reply.host_rng_used:
            rng.caller.record_remote_use(host=True)
        if len(reply.filled_slots) == len(worker.slots) and not reply.other_gradients:
            return worker.slots
        slots = state.read_gradients(reply.filled_slots)
        if reply.other_gradients:
            slots = {**reply.other_gradients, **slots}
        return list(map(slots.get, worker.tensor_indices))


_layout_and_dtype = attrgetter("layout", "dtype")


class _NoGroup:
    """The group of replica 0 in calls without collectives."""

    joint_graph = False

    def enter(self, index: int) -> None:
        """Nothing to wait for."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """Nobody waits for the replica."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:  # noqa: ARG002
        raise LostExchange(f"{label} was called in a call that was prepared without it.")

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:  # noqa: ARG002
        raise LostExchange(f"{label} was called in a call that was prepared without it.")

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        return None


_NO_GROUP = _NoGroup()


def _failed_call() -> CollectiveLog:
    """The collectives of a call in which replica 0 has failed: replies that have not arrived are not awaited."""
    group = ControllerRendezvous([], "")
    group.has_failed = True
    return CollectiveLog(group)


def _abandon(forward: _SentForward) -> None:
    """Ignore the reply, if it was not received."""
    forward.worker.client.abandon(forward.pending)
