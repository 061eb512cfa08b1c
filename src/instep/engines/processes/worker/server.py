"""The worker's message loop: runs forward and backward of its replicas on request."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.autograd.bridge import ReplicaGraph, as_non_leaf, take_gradients
from instep.autograd.graph_walk import find_reached_collectives
from instep.autograd.nested_outputs import is_jagged, reject_lost_gradients
from instep.collectives.group import ReplicaContext
from instep.devices import move_to_device
from instep.engines.base import ReplicaCall, run_forward
from instep.engines.concurrent import backward_in_group
from instep.engines.plain_values import decode_plain, load_plain
from instep.engines.processes import messages
from instep.engines.processes.lifecycle.launch import apply_script_environment
from instep.engines.processes.messages import (
    BackwardReply,
    BackwardRequest,
    ForwardReply,
    ForwardRequest,
    PreparedBackwardRequest,
    PreparedForwardRequest,
)
from instep.engines.processes.serialization.diagnose import ForeignLeaves
from instep.engines.processes.serialization.exceptions import pack_exception
from instep.engines.processes.serialization.reducers import has_strided_data
from instep.engines.processes.transport.channel import (
    ARGUMENT,
    SOURCE,
    Channel,
    TensorTag,
    rebuild_by_value,
    tag_by_value,
)
from instep.engines.processes.transport.connection import Connection, Message
from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.cuda_driver import DriverError
from instep.engines.processes.transport.cuda_ipc import FLAG_COUNT, CudaIpcChannel
from instep.engines.processes.transport.device_rows import DeviceRowExchange, DeviceRowMemory
from instep.engines.processes.transport.row_memory import RowExchange, RowMemory
from instep.engines.processes.transport.stream_flags import StreamFlags
from instep.engines.processes.worker.ambient import WorkerAmbientState, check_device_memory, use_device
from instep.engines.processes.worker.deferred_errors import DeferredErrors
from instep.engines.processes.worker.module import WorkerModule, backward_roots, used_arguments
from instep.engines.processes.worker.nccl_member import NcclMember
from instep.engines.processes.worker.prepared import (
    PreparedCall,
    RetainedCall,
    is_ordinary,
    record_draws,
    send_output,
)
from instep.engines.processes.worker.rendezvous import Inbox, WorkerRendezvous
from instep.engines.processes.worker.rng import WorkerCallRng, backward_context
from instep.engines.thread_pool import set_replica_thread
from instep.errors import EngineError
from instep.replicas.mutable_arguments import ArgumentSnapshot
from instep.replicas.replica import ReplicaResult
from instep.replicas.tensors import check_no_stray_gradients
from instep.runtime.affinity import SenderCpuAvoidance, set_spin_wait
from instep.runtime.ambient import AutocastState, set_anomaly_mode
from instep.runtime.rng import rng_state_reads, supports_thread_streams
from instep.runtime.torch_private import reentrant_checkpoints
from instep.structure.tree import tensors_in

_DEVICE_POLL_SECONDS = 0.05
"""Seconds between checks of a device that still works on an earlier reply."""

_FORWARD_KINDS = (messages.FORWARD, messages.PREPARED_FORWARD)

MODULES_PER_GC = 8
"""Number of released modules after which the garbage collector runs."""


def main(connection: Connection) -> None:
    """Handle the parent's messages until it sends STOP."""
    inbox = Inbox(connection)
    server = WorkerServer(Channel(connection, is_parent=False), inbox)
    connection.affinity = SenderCpuAvoidance()
    supports_thread_streams()
    gc.freeze()  # imported modules stay: exclude them from garbage collection
    set_replica_thread(True)
    while (message := server.next_message()) is not None and message.kind != messages.STOP:
        server.handle(message)
        server.prepare_next()


class WorkerServer:
    """Holds a worker's modules and retained graphs, and handles the parent's messages."""

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel, self._inbox = channel, inbox
        self._modules: dict[int, WorkerModule] = {}
        self._pending_modules: dict[int, WorkerModule] = {}
        self._row_memories: dict[int, RowMemory] = {}
        self._retained_calls: dict[int, RetainedCall] = {}
        self._prepared: dict[int, PreparedCall] = {}
        """By id: what prepared forwards have in common."""
        self._dropped_modules = 0
        self._ambient = WorkerAmbientState()
        self._deferred_errors, self._foreign_leaves = DeferredErrors(), ForeignLeaves()
        self._last_module: WorkerModule | None = None
        """The module of the last message if that was a call; its replica was prepared for the next one."""
        self._last_prepared: PreparedCall | None = None
        """The prepared call of that message, if it was one."""
        self._must_exit = False
        """Whether other replicas wait for this one on their device, and it cannot release them."""
        self._busy_device: torch.device | None = None
        """The device that may still work on an earlier reply."""
        self._nccl_member = NcclMember(channel, self._modules)
        self._handlers: dict[str, Callable[[Message], None]] = {
            messages.DEVICE: self._set_device,
            messages.ENVIRONMENT: self._set_script_environment,
            messages.TENSOR_TABLE: self._receive_tensor_table,
            messages.MODULE: self._receive_module,
            messages.ATTRIBUTES: self._receive_attributes,
            messages.GLOBALS: self._receive_globals,
            messages.ROW_MEMORY: self._receive_row_memory,
            messages.FORWARD: self._forward,
            messages.PREPARE: self._prepare,
            messages.PREPARED_FORWARD: self._forward_prepared,
            messages.BACKWARD: self._backward,
            messages.PREPARED_BACKWARD: self._backward_prepared,
            messages.REACHABILITY: self._find_backward_collectives,
            messages.COLLECTIVE_RESULT: lambda _: None,  # of a call that the parent abandoned
            **self._nccl_member.handlers,
        }

    def next_message(self) -> Message | None:
        """Wait for a message; None to end. Reports an error of the device that occurs after a reply."""
        if self._must_exit:
            return None
        try:
            while self.is_device_busy():
                if (message := self._inbox.receive(_DEVICE_POLL_SECONDS)) is not None:
                    return message
        except Exception as error:
            self._send_error(0, error)
            return None  # the device can no longer be used in this process
        return self._inbox.receive()

    def handle(self, message: Message) -> None:
        """Handle one message. An exception becomes the reply."""
        if message.kind not in _FORWARD_KINDS:
            self._discard_preparation()
        try:
            self._handlers[message.kind](message)
        except BaseException as error:
            self._discard_preparation()
            if message.kind in (messages.FORWARD, messages.BACKWARD):  # those that may exchange rows
                self._release_rows(message.call_id)
            if message.kind in messages.EXPECTS_REPLY:
                self._send_error(message.call_id, error)
            else:  # no reply is expected: the next call raises it
                self._deferred_errors.record(message.call_id, error)

    def _release_rows(self, call_id: int) -> None:
        """After an error, which may be one of decoding the request: no replica waits for this one on its device."""
        for memory in self._row_memories.values():
            if memory.device_rows is not None:
                try:
                    memory.device_rows.fail_request(call_id)
                except DriverError:  # the device has failed; the parent releases the waits when this process has ended
                    self._must_exit = True

    def _send_error(self, call_id: int, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # other processes may share the device
        packed = pack_exception(error, self._channel.registry)
        self._channel.connection.send(messages.FAILED, call_id, packed.body, [t.detach().cpu() for t in packed.tensors])

    def _set_device(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        use_device(request)
        self._channel.connection.receiver = DeviceReceiver(request.device)
        refusal = None
        if request.ipc_handle is not None:
            try:
                check_device_memory(request)
                flags = StreamFlags.attach(message.fds[0], FLAG_COUNT, request.device)
                self._channel.cuda_ipc = CudaIpcChannel(request.device, flags, is_parent=False)
            except DriverError as error:
                refusal = str(error)
        self._channel.send(messages.DONE, message.call_id, refusal)

    def _set_script_environment(self, message: Message) -> None:
        environment, _ = self._channel.decode(message)
        apply_script_environment(*environment)

    def _receive_tensor_table(self, message: Message) -> None:
        self._deferred_errors.discard([message.call_id])
        table, _ = self._channel.decode(message)
        self._pending_modules[table.module_id] = WorkerModule(table, message.fds)

    def _receive_module(self, message: Message) -> None:
        number = message.call_id
        module = self._pending_modules.pop(number)
        request, _ = self._channel.decode(message, module.resolve_tensor)
        module.load(request)
        self._note_foreign_leaves(module.tensors)
        previous, self._modules[number] = self._modules.get(number), module
        if previous is not None:
            closes_memory = not previous.device_block_numbers <= module.device_block_numbers
            del previous
            self._collect_garbage(1, closes_memory)

    def _receive_attributes(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        self._modules[message.call_id].set_attributes(request)
        self._note_foreign_leaves(self._modules[message.call_id].tensors)

    def _receive_globals(self, message: Message) -> None:
        self._channel.registry.apply_globals(message.body, message.tensors)
        self._note_foreign_leaves(())

    def _receive_row_memory(self, message: Message) -> None:
        (capacity, nbytes, handle), _ = self._channel.decode(message)
        memory = RowMemory.attach(message.fds[0], nbytes, capacity)
        if handle is not None:
            device = torch.device("cuda", torch.cuda.current_device())
            memory.device_rows = DeviceRowMemory.attach(handle, message.fds[1:], capacity, device)
        self._row_memories[message.call_id] = memory

    def _group(
        self, call_id: int, request: ForwardRequest | BackwardRequest, index: int, count: int
    ) -> WorkerRendezvous:
        """The group of a request's replicas."""
        rows = device_rows = None
        if request.rows:
            memory_id, base, num_replayed, device_base = request.rows
            if memory_id not in self._row_memories:
                self._must_exit = bool(device_base)
                raise self._deferred_errors.pop(memory_id) or EngineError(
                    "the memory for collectives was not received."
                )
            memory = self._row_memories[memory_id]
            rows = RowExchange(memory, base, index, count, num_replayed)
            if device_base and memory.device_rows is not None:
                device_rows = DeviceRowExchange(memory.device_rows, device_base, index, count)
        return WorkerRendezvous(self._channel, self._inbox, call_id, count, rows, request.gathered_rows, device_rows)

    def _note_foreign_leaves(self, own: Sequence[Tensor]) -> None:
        registry = self._channel.registry
        if registry.requiring_grad:
            self._foreign_leaves.add(
                registry.requiring_grad,
                own,
                [*(value for _, value in registry.namespaces.received_values()), *registry.closure_values],
            )
        registry.requiring_grad, registry.closure_values = [], []

    def _release(self, calls: Sequence[int], numbers: Sequence[int]) -> None:
        for call in calls:
            self._retained_calls.pop(call, None)
        self._nccl_member.discard(calls)
        if not numbers:
            return
        self._deferred_errors.discard(numbers)
        for number in numbers:
            self._row_memories.pop(number, None)
            self._prepared.pop(number, None)
        released = [self._modules.pop(number) for number in numbers if number in self._modules]
        closes_memory = any(module.device_block_numbers for module in released)
        del released
        self._collect_garbage(len(numbers), closes_memory)

    def _collect_garbage(self, modules: int, closes_memory: bool) -> None:
        """Free released modules, whose reference cycles keep memory and descriptors alive.

        Runs at once if that closes device memory, for which its owner waits. Otherwise after `MODULES_PER_GC` modules.
        """
        self._dropped_modules += modules
        if closes_memory or self._dropped_modules >= MODULES_PER_GC:
            self._dropped_modules = 0
            gc.collect()

    def prepare_next(self) -> None:
        """Prepare the next call of the same module, after the reply was sent."""
        module, prepared = self._last_module, self._last_prepared
        if module is None:
            return
        try:
            module.replica_set.prefetch_changes()
            if prepared is not None and not module.replica_set.will_save_values:
                self._begin_prepared(prepared)
                prepared.prepare_forward(module)
        except Exception:  # the next call raises it
            self._discard_preparation()

    def _discard_preparation(self) -> None:
        self._discard_next_forward(None)
        if self._last_module is not None:
            self._last_module.replica_set.discard_prefetched()
            self._last_module = None

    def _discard_next_forward(self, prepared: PreparedCall | None) -> None:
        """Forget the preparation for the forward of another prepared call."""
        if self._last_prepared is not None and self._last_prepared is not prepared:
            if self._last_module is not None:
                self._last_prepared.discard_preparation(self._last_module)
            self._last_prepared = None

    def _begin_prepared(self, prepared: PreparedCall) -> None:
        """Set what a prepared forward needs and earlier calls may have changed."""
        set_spin_wait(prepared.request.num_replicas, on_accelerator=prepared.is_on_accelerator)
        self._ambient.apply_settings(prepared.request.ambient.process)

    def _prepare(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        self._prepared[message.call_id] = PreparedCall(request, self._modules[request.module_id])

    def _forward_prepared(self, message: Message) -> None:
        """Run a forward whose request has only what differs from call to call."""
        content: Any = load_plain(message.body)
        fields = PreparedForwardRequest(*content)
        arguments = self._channel.read_tensors(message, fields.transfer)
        prepared = self._prepared.get(fields.number)
        if prepared is None:
            raise self._deferred_errors.pop(fields.number) or EngineError("the call was not prepared.")
        request, ambient = prepared.request, prepared.ambient
        module = self._modules[request.module_id]
        if module is not self._last_module:
            self._discard_preparation()
        self._discard_next_forward(prepared)
        if any(fields.released):
            self._release(*fields.released)
        if not prepared.is_forward_prepared:
            self._begin_prepared(prepared)
        rng = prepared.rng.begin_forward(fields)
        written_arguments = module.watch_arguments(request.method, arguments)
        group = WorkerRendezvous(self._channel, self._inbox, message.call_id, request.num_replicas)
        values = decode_plain(fields.values, arguments)
        try:
            result, context = prepared.run_forward(module, group, values, rng)
        except BaseException:
            module.replica_set.restore_containers()
            raise
        may_have_drawn = not rng.is_untouched_on_host or rng.caller.cpu.was_used()
        written, written_globals = written_arguments(), self._channel.registry.modified_globals()
        outputs: dict[int, Tensor] | None = None
        if is_ordinary(module, result):
            reply = None
            if not (may_have_drawn or written or written_globals or (ambient.grad_enabled and self._foreign_leaves)):
                self._wait_unless_ordered(module.device)
                drawn = rng.caller.device_streams_used
                outputs = send_output(
                    self._channel, message.call_id, result.output, module, arguments, device_rng_used=drawn
                )
            if outputs is None:
                reply = ForwardReply(result.output, written_globals=written_globals)
        else:
            reply = self._build_reply(module, result)
        if reply is not None:
            reply.written_arguments = written
            # Views, because the arguments themselves would be sent as references to the parent's tensors.
            reply.written_with_grad = {
                i: arguments[i].view_as(arguments[i]) for i in written if arguments[i].requires_grad
            }
            if ambient.grad_enabled and self._foreign_leaves:
                self._foreign_leaves.check_outputs(backward_roots(reply, result), self._channel.registry.namespaces)
            record_draws(reply, rng)
            outputs = self._send_forward_reply(message.call_id, reply, module, arguments, grad=ambient.grad_enabled)
        self._last_module, self._last_prepared = module, prepared
        if outputs and ambient.grad_enabled:
            self._retained_calls[message.call_id] = prepared.retain(module, context, outputs, arguments, rng)
            self._last_module = None  # prepare the next call after the backward, which may change the module

    def _forward(self, message: Message) -> None:
        request, arguments, leaves = self._receive_forward(message)
        self._run_forward(message.call_id, request, arguments, leaves)

    def _run_forward(
        self,
        call_id: int,
        request: ForwardRequest,
        arguments: list[Tensor],
        leaves: dict[int, Tensor],
    ) -> None:
        """Run a forward and reply."""
        module = self._modules[request.module_id]
        if module is not self._last_module:
            self._discard_preparation()
        self._discard_next_forward(None)
        set_spin_wait(request.num_replicas, on_accelerator=module.device.type != "cpu")
        self._release(*request.released)
        ambient = self._ambient.apply(request.ambient)
        replica = module.prepare_replica(request)
        call_rng = WorkerCallRng(request, module)
        written_arguments = module.watch_arguments(request.method, arguments)
        values, watched = [*request.args, *request.kwargs.values()], request.watched_arguments
        snapshot = ArgumentSnapshot(values, watched) if watched else None
        call = ReplicaCall(
            [replica] * request.num_replicas,
            [(request.args, request.kwargs)] * request.num_replicas,
            request.method,
            ambient,
            request.refresh_state,
            call_rng.rng,
            request.shard_sizes,
        )
        group = self._group(call_id, request, request.replica_index, request.num_replicas)
        before = rng_state_reads(), reentrant_checkpoints()
        result = run_forward(call, request.replica_index, group)
        if isinstance(result.context, ReplicaContext):
            result.context.may_recompute = before != (rng_state_reads(), reentrant_checkpoints())
        if result.error is not None:
            module.replica_set.restore_containers()
            raise result.error
        reply = self._build_reply(module, result)
        if snapshot is not None:
            reply.changed_arguments = snapshot.changed()
        reply.written_arguments = written_arguments()
        # Views, because the arguments themselves would be sent as references to the parent's tensors.
        reply.written_with_grad = {
            i: arguments[i].view_as(arguments[i]) for i in reply.written_arguments if arguments[i].requires_grad
        }
        if ambient.grad_enabled and self._foreign_leaves:
            self._foreign_leaves.check_outputs(backward_roots(reply, result), self._channel.registry.namespaces)
        if ambient.grad_enabled and leaves:
            reply.used_arguments = used_arguments(reply, leaves, result)
        call_rng.record_draws(reply)
        carried = tensors_in([part for _, _, part in request.carried_state])
        grad = ambient.grad_enabled
        outputs = self._send_forward_reply(call_id, reply, module, arguments, grad=grad, carried=carried)
        self._last_module = module
        if outputs and ambient.grad_enabled:
            graph = ReplicaGraph([], list(leaves.values()), [], replica.tensors.guard, replica.name, result.context)
            self._retained_calls[call_id] = RetainedCall(
                module,
                graph,
                list(leaves),
                outputs,
                arguments,
                module.replica_tensors(),
                call_rng.rng,
                request.replica_index,
            )
            self._last_module = None  # prepare the next call after the backward, which may change the module

    def _receive_forward(self, message: Message) -> tuple[ForwardRequest, list[Tensor], dict[int, Tensor]]:
        """Decode a request: itself, its argument tensors, and the leaves of those that require a gradient, by number.

        Raises the error of an earlier message about the same module.
        """
        leaves: dict[int, Tensor] = {}
        numbers = itertools.count()

        def rebuild(tag: TensorTag, tensor: Tensor | None) -> Tensor:
            rebuilt, number = rebuild_by_value(tag, tensor), next(numbers)
            if rebuilt.requires_grad:
                leaves[number] = rebuilt
                with torch.enable_grad():
                    (rebuilt,) = as_non_leaf(rebuilt)
            return rebuilt

        try:
            fields, arguments = self._channel.decode(message, rebuild)
            self._note_foreign_leaves(())
        except Exception as error:
            raise self._deferred_errors.pop_any() or error from None
        request = ForwardRequest(*fields)
        deferred = self._deferred_errors.pop(request.module_id)
        if deferred is not None:
            raise deferred
        if request.args_on_host:
            device = self._modules[request.module_id].device
            with torch.enable_grad():
                request.args = [move_to_device(value, device) for value in request.args]
                request.kwargs = {name: move_to_device(value, device) for name, value in request.kwargs.items()}
        return request, arguments, leaves

    def _send_forward_reply(
        self,
        call_id: int,
        reply: ForwardReply,
        module: WorkerModule,
        arguments: Sequence[Tensor],
        *,
        grad: bool,
        carried: Iterable[Tensor] = (),
    ) -> dict[int, Tensor]:
        """Send the reply. Returns its tensors that require a gradient, by number.

        `carried` are the tensors of carried state among the arguments: forward may write them, so they are sent back.
        """
        numbers = {id(tensor): i for i, tensor in enumerate(arguments)}
        for tensor in carried:
            numbers.pop(id(tensor), None)
        tensor_numbers = module.tensor_numbers()
        state = [reply.attributes, reply.containers]
        is_plain = type(reply.output) is Tensor and has_strided_data(reply.output)  # the common case
        if grad and (any(state) or not is_plain):
            reject_lost_gradients(
                reply.output, state, lambda t: has_strided_data(t) or is_jagged(t) or id(t) in tensor_numbers
            )

        def describe(tensor: Tensor) -> TensorTag:
            if id(tensor) in numbers:
                return ARGUMENT, numbers[id(tensor)]
            return (SOURCE, tensor_numbers[id(tensor)]) if id(tensor) in tensor_numbers else tag_by_value(tensor)

        self._wait_unless_ordered(module.device)
        sent = self._channel.send(messages.DONE, call_id, reply, describe, label="the output of forward")
        return {i: t for i, t in enumerate(sent) if t.requires_grad and id(t) not in tensor_numbers}

    def _wait_unless_ordered(self, device: torch.device) -> None:
        """Wait for the device, unless the parent's stream waits for it instead."""
        if self._is_stream_ordered:
            self._busy_device = device
        else:
            synchronize_stream(device)

    @property
    def _is_stream_ordered(self) -> bool:
        """Whether the parent's stream waits for the device of this process."""
        ipc = self._channel.cuda_ipc
        return ipc is not None and ipc.enabled

    def is_device_busy(self) -> bool:
        """Whether work of an earlier reply still runs. Raises its error."""
        if self._busy_device is None:
            return False
        if torch.cuda.current_stream(self._busy_device).query():
            self._busy_device = None
        return self._busy_device is not None

    def _build_reply(self, module: WorkerModule, result: ReplicaResult) -> ForwardReply:
        """Encode the result of a forward, and reset the replica."""
        replica_set = module.replica_set
        changed = replica_set.restore_containers()
        if changed:
            replica_set.discard()
            return ForwardReply(
                private_containers=[str(replica_set.shared_containers.paths[id(container)]) for container in changed]
            )
        if result.changes.is_structural:
            replica_set.discard()
            return ForwardReply(structure_changed=True)
        written = replica_set.find_written_parameters()
        reply = module.collect_changes(result)
        if written:  # copied on write: no longer the parent's memory
            numbers = module.tensor_numbers()
            reply.written_parameters = [numbers[id(tensor)] for tensor in written]
            replica_set.discard()
        reply.output, reply.written_globals = result.output, self._channel.registry.modified_globals()
        replica_set.finish_call()
        return reply

    def _backward(self, message: Message) -> None:
        request: BackwardRequest | None = None
        try:
            fields, _ = self._channel.decode(message)
            request = BackwardRequest(*fields)
            self._run_backward(message.call_id, request)
        except BaseException:
            self._nccl_member.abort(request)
            raise

    def _run_backward(self, call_id: int, request: BackwardRequest) -> None:
        retained = self._retained_calls[request.call_id]
        module, graph = retained.module, retained.graph
        for number in request.written_arguments:
            torch.autograd.graph.increment_version(retained.arguments[number])
        for number in request.written_tensors:
            torch.autograd.graph.increment_version(retained.replica_tensors[number])
        leaves = [retained.replica_tensors[number] for number in request.wanted_tensors]
        outputs = [retained.outputs[number] for number in request.gradients]
        grads = [gradient.to(retained.outputs[number].device) for number, gradient in request.gradients.items()]
        for consumed in request.consumed_tokens:
            graph.drop_tokens(consumed)
        graph.add_tokens(request.collective_tokens, outputs, grads)
        index = retained.index
        rng = retained.streams(request.seed)
        group = self._group(call_id, request, index, retained.num_replicas)
        rng_context = backward_context(rng, module.device, index)
        check_no_stray_gradients(leaves)
        module.begin_backward(() if request.keep_gradients else request.wanted_tensors)
        set_anomaly_mode(request.anomaly_mode)
        reducer = self._nccl_member.start_reduction(request, module, leaves)
        try:
            with AutocastState(*request.autocast).enter():
                captured = backward_in_group(
                    group,
                    index,
                    graph,
                    outputs,
                    grads,
                    request.retain_graph,
                    rng_context,
                    leaves if request.captures and not retained.may_recompute else None,
                )
        except BaseException:
            module.begin_backward(())
            take_gradients([*leaves, *graph.inputs])
            raise
        finally:
            module.stop_reports()
            retained.keep_streams(rng)
        if reducer is not None:
            reducer.start_rest()
        rng.report_use()
        if captured is not None and module.store_all(request.wanted_tensors, captured):
            reply = BackwardReply(request.wanted_tensors)
        else:
            column = take_gradients(leaves) if captured is None else captured
            gradients = dict(zip(request.wanted_tensors, column, strict=True))
            kept = self._nccl_member.keep_gradients(call_id, module, gradients) if request.keep_gradients else []
            present, others = module.flush_gradients(gradients)
            reply = BackwardReply(present, other_gradients=others, kept_gradients=kept)
        reply.input_gradients = {
            n: g for n, g in zip(retained.input_numbers, take_gradients(graph.inputs), strict=True) if g is not None
        }
        is_ordered = self._is_stream_ordered and request.is_reduction_ordered
        is_reduced = reducer is not None and reducer.is_exact
        if reducer is not None and is_ordered:
            is_reduced = self._nccl_member.finish_reduction(request, reducer)
        reply.host_rng_used, reply.is_reduced = rng.caller.cpu.streams_used, is_reduced
        self._wait_unless_ordered(module.device)
        self._channel.send(messages.DONE, call_id, reply)
        if reducer is not None and not is_ordered:  # after the reply: the reduction may wait for the parent's part
            self._nccl_member.finish_reduction(request, reducer)
        if not request.retain_graph:
            for number in request.gradients:
                del retained.outputs[number]
            graph.drop_tokens(request.collective_tokens)
        self._last_module = module

    def _backward_prepared(self, message: Message) -> None:
        """Run the backward of a prepared forward, in the usual case."""
        content: Any = load_plain(message.body)
        fields = PreparedBackwardRequest(*content)
        grads = self._channel.read_tensors(message, fields.transfer)
        retained = self._retained_calls[fields.call_id]
        prepared, graph, module = retained.prepared, retained.graph, retained.module
        assert prepared is not None
        wanted = prepared.request.wanted_tensors
        if retained.may_recompute:
            self._run_backward(message.call_id, fields.backward_request(grads, wanted))
            return
        leaves, outputs = prepared.find_leaves(retained), [retained.outputs[number] for number in fields.outputs]
        rng = retained.streams(fields.seed)
        group = WorkerRendezvous(self._channel, self._inbox, message.call_id, prepared.request.num_replicas)
        check_no_stray_gradients(leaves)
        set_anomaly_mode(fields.anomaly_mode)
        grads = [gradient.to(output.device) for gradient, output in zip(grads, outputs, strict=True)]
        try:
            context = backward_context(rng, module.device, retained.index)
            capture = leaves if prepared.request.captures else None
            captured = backward_in_group(
                group, retained.index, graph, outputs, grads, fields.retain_graph, context, capture
            )
        except BaseException:
            take_gradients(leaves)
            raise
        finally:
            retained.keep_streams(rng)
        column = take_gradients(leaves) if captured is None else captured
        if retained.rng is not None:
            rng.report_use()
        reply: BackwardReply | None = None
        if rng.caller.cpu.streams_used or not prepared.store_gradients(column):
            module.begin_backward(())
            present, others = module.flush_gradients(dict(zip(wanted, column, strict=True)))
            reply = BackwardReply(present, other_gradients=others, host_rng_used=rng.caller.cpu.streams_used)
        self._wait_unless_ordered(module.device)
        if reply is None and self._channel.cuda_ipc is None:
            self._channel.connection.send(messages.DONE, message.call_id)
        else:  # with CUDA IPC, the reply has the number that the parent's stream waits for
            self._channel.send(messages.DONE, message.call_id, reply)
        if not fields.retain_graph:
            for number in fields.outputs:
                del retained.outputs[number]
        self._last_module, self._last_prepared = module, prepared

    def _find_backward_collectives(self, message: Message) -> None:
        """Reply with the collectives that a backward from some outputs would reach."""
        (call_id, numbers, consumed), _ = self._channel.decode(message)
        retained = self._retained_calls[call_id]
        for tokens in consumed:
            retained.graph.drop_tokens(tokens)
        outputs = [retained.outputs[number] for number in numbers]
        reached = find_reached_collectives(retained.graph.tokens, outputs)
        self._channel.send(messages.DONE, message.call_id, reached)
