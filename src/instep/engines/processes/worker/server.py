"""The worker's message loop: runs forward and backward of its replicas on request."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.autograd.bridge import ReplicaGraph, as_non_leaf, take_gradients
from instep.autograd.graph_walk import find_reached_collectives
from instep.autograd.nested_outputs import is_jagged, reject_lost_gradients
from instep.devices import move_to_device
from instep.engines.base import ReplicaCall, run_forward
from instep.engines.concurrent import backward_in_group
from instep.engines.processes import messages
from instep.engines.processes.lifecycle.launch import apply_script_environment
from instep.engines.processes.messages import BackwardReply, BackwardRequest, ForwardReply, ForwardRequest
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
from instep.engines.processes.transport.cuda_ipc import CudaIpcChannel
from instep.engines.processes.worker.ambient import (
    WorkerAmbientState,
    device_memory_error,
    use_device,
)
from instep.engines.processes.worker.module import (
    WorkerModule,
    backward_roots,
    used_arguments,
)
from instep.engines.processes.worker.nccl_member import NcclMember
from instep.engines.processes.worker.rendezvous import Inbox, WorkerRendezvous
from instep.engines.processes.worker.rng import CallRng
from instep.engines.thread_pool import as_replica_thread
from instep.errors import EngineError
from instep.replicas.mutable_arguments import ArgumentSnapshot
from instep.replicas.replica import ReplicaResult
from instep.replicas.tensors import check_no_stray_gradients
from instep.runtime.affinity import SenderCpuAvoidance, set_spin_wait
from instep.runtime.ambient import AutocastState, set_anomaly_mode
from instep.runtime.rng import ReplicaRng, supports_thread_streams
from instep.structure.tree import tensors_in

MODULES_PER_GC = 8
"""Modules that are forgotten before what is left of them is looked for."""


def main(line: Connection) -> None:
    """Do what the process that started this one asks for, until it says stop."""
    mail = Inbox(line)
    worker = WorkerServer(Channel(line, is_parent=False), mail)
    line.affinity = SenderCpuAvoidance()
    supports_thread_streams()
    gc.freeze()  # what was imported stays: no collection need walk through it
    with as_replica_thread():
        while (message := mail.receive()) is not None and message.kind != messages.STOP:
            worker.handle(message)
            worker.prepare_next()


@dataclass
class RetainedCall:
    """A call whose graph is kept until it is released."""

    module: WorkerModule
    graph: ReplicaGraph
    input_numbers: list[int]
    """The numbers of the arguments that a gradient is wanted for."""
    outputs: dict[int, Tensor]
    """By their numbers: tensors of the output that need a gradient."""
    arguments: list[Tensor]
    replica_tensors: list[Tensor]
    """What the replica had for each tensor of the module."""
    rng_streams: ReplicaRng
    index: int


class WorkerServer:
    """Everything that a worker has: modules, and calls whose graphs are still needed."""

    def __init__(self, talk: Channel, mail: Inbox) -> None:
        self._channel, self._inbox = talk, mail
        self._modules: dict[int, WorkerModule] = {}
        self._pending_modules: dict[int, WorkerModule] = {}
        self._retained_calls: dict[int, RetainedCall] = {}
        self._dropped_modules = 0
        self._ambient = WorkerAmbientState()
        self._deferred_errors, self._foreign_leaves = DeferredErrors(), ForeignLeaves()
        self._last_module: WorkerModule | None = None
        """The module of the last message, if that was a call: what the next one begins with was done for it already."""
        self._nccl_member = NcclMember(talk, self._modules)
        self._handlers: dict[str, Callable[[Message], None]] = {
            messages.DEVICE: self._set_device,
            messages.ENVIRONMENT: self._set_script_environment,
            messages.TENSOR_TABLE: self._receive_tensor_table,
            messages.MODULE: self._receive_module,
            messages.ATTRIBUTES: self._receive_attributes,
            messages.GLOBALS: self._receive_globals,
            messages.FORWARD: self._forward,
            messages.BACKWARD: self._backward,
            messages.REACHABILITY: self._find_backward_collectives,
            messages.COLLECTIVE_RESULT: lambda _: None,  # in a call that was given up, and has ended since
            **self._nccl_member.handlers,
        }

    def handle(self, message: Message) -> None:
        """Do what one message asks for; whatever fails is the answer to it."""
        if message.kind != messages.FORWARD:
            self._discard_preparation()
        try:
            self._handlers[message.kind](message)
        except BaseException as error:
            self._discard_preparation()
            if message.kind in messages.EXPECTS_REPLY:
                self._send_error(message.call_id, error)
            else:  # nobody waits for an answer to these: the next call gets it
                self._deferred_errors.record(message.call_id, error)

    def _send_error(self, call: int, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # others may share the device
        parcel = pack_exception(error, self._channel.registry)
        self._channel.connection.send(messages.FAILED, call, parcel.body, [t.detach().cpu() for t in parcel.tensors])

    def _set_device(self, message: Message) -> None:
        order, _ = self._channel.decode(message)
        use_device(order)
        self._channel.connection.receiver = DeviceReceiver(order.device)
        refusal = None if order.ipc_handle is None else device_memory_error(order)
        if order.ipc_handle is not None and refusal is None:
            self._channel.cuda_ipc = CudaIpcChannel(order.device, is_parent=False)
        self._channel.send(messages.DONE, message.call_id, refusal)

    def _set_script_environment(self, message: Message) -> None:
        place, _ = self._channel.decode(message)
        apply_script_environment(*place)

    def _receive_tensor_table(self, message: Message) -> None:
        self._deferred_errors.discard([message.call_id])
        table, _ = self._channel.decode(message)
        self._pending_modules[table.module_id] = WorkerModule(table, message.fds)

    def _receive_module(self, message: Message) -> None:
        number = message.call_id
        mirror = self._pending_modules.pop(number)
        order, _ = self._channel.decode(message, mirror.resolve_tensor)
        mirror.load(order)
        self._note_foreign_leaves(mirror.tensors)
        before, self._modules[number] = self._modules.get(number), mirror
        closed = before is not None and not before.device_block_numbers <= mirror.device_block_numbers
        modules, before = int(before is not None), None
        self._collect_garbage(modules, closed)

    def _receive_attributes(self, message: Message) -> None:
        sets, _ = self._channel.decode(message)
        self._modules[message.call_id].set_attributes(sets)
        self._note_foreign_leaves(self._modules[message.call_id].tensors)

    def _receive_globals(self, message: Message) -> None:
        self._channel.registry.apply_globals(message.body, message.tensors)
        self._note_foreign_leaves(())

    def _note_foreign_leaves(self, own: Sequence[Tensor]) -> None:
        depot = self._channel.registry
        if depot.requiring_grad:
            self._foreign_leaves.add(
                depot.requiring_grad,
                own,
                [*(held for _, held in depot.namespaces.received_values()), *depot.closure_values],
            )
        depot.requiring_grad, depot.closure_values = [], []

    def _release(self, calls: Sequence[int], numbers: Sequence[int]) -> None:
        for call in calls:
            self._retained_calls.pop(call, None)
        self._nccl_member.discard(calls)
        if not numbers:
            return
        self._deferred_errors.discard(numbers)
        gone = [self._modules.pop(number) for number in numbers if number in self._modules]
        opened = any(mirror.device_block_numbers for mirror in gone)
        del gone
        self._collect_garbage(len(numbers), opened)

    def _collect_garbage(self, modules: int, closed: bool) -> None:
        """Modules lead in circles to themselves, and to memory and descriptors with them: nobody else lets these go.

        The owner of device memory frees it when it has been closed here: that is not put off.
        """
        self._dropped_modules += modules
        if closed or self._dropped_modules >= MODULES_PER_GC:
            self._dropped_modules = 0
            gc.collect()

    def prepare_next(self) -> None:
        """After a call, whose answer is on its way: what the next one begins with, so that nobody waits for that."""
        if self._last_module is None:
            return
        try:
            self._last_module.replica_set.prefetch_changes()
        except Exception:  # then the next call says so
            self._discard_preparation()

    def _discard_preparation(self) -> None:
        if self._last_module is not None:
            self._last_module.replica_set.discard_prefetched()
            self._last_module = None

    def _forward(self, message: Message) -> None:
        try:
            run, arguments, leaves = self._receive_forward(message)
        except Exception as error:
            raise self._deferred_errors.pop_any() or error from None
        trouble = self._deferred_errors.pop(run.module_id)
        if trouble is not None:
            raise trouble
        mirror = self._modules[run.module_id]
        if mirror is not self._last_module:
            self._discard_preparation()
        set_spin_wait(run.num_replicas)
        if run.args_on_host:
            with torch.enable_grad():
                run.args = [move_to_device(value, mirror.device) for value in run.args]
                run.kwargs = {name: move_to_device(value, mirror.device) for name, value in run.kwargs.items()}
        self._release(*run.released)
        ambient = self._ambient.apply(run.ambient)
        replica = mirror.prepare_replica(run)
        draws = CallRng(run, mirror)
        written = mirror.watch_arguments(run.method, arguments)
        noted = (
            ArgumentSnapshot([*run.args, *run.kwargs.values()], run.watched_arguments)
            if run.watched_arguments
            else None
        )
        job = ReplicaCall(
            [replica] * run.num_replicas,
            [(run.args, run.kwargs)] * run.num_replicas,
            run.method,
            ambient,
            run.refresh_state,
            draws.streams,
            run.shard_sizes,
            group=WorkerRendezvous(self._channel, self._inbox, message.call_id),
        )
        outcome = run_forward(job, run.replica_index)
        if outcome.error is not None:
            mirror.replica_set.restore_containers()
            raise outcome.error
        ran = self._build_reply(mirror, outcome)
        ran.written_arguments = written()
        if noted is not None:
            ran.changed_arguments = noted.changed()
        if ran.written_arguments:
            # A view: the argument itself would be sent as a word for what the other process has already.
            ran.written_with_grad = {
                i: arguments[i].view_as(arguments[i]) for i in ran.written_arguments if arguments[i].requires_grad
            }
        if ambient.grad_enabled and self._foreign_leaves:
            self._foreign_leaves.check_outputs(backward_roots(ran, outcome), self._channel.registry.namespaces)
        if ambient.grad_enabled and leaves:
            ran.used_arguments = used_arguments(ran, leaves, outcome)
        draws.record_draws(ran)
        outputs = self._send_forward_reply(message.call_id, run, ran, mirror, arguments, grad=ambient.grad_enabled)
        if outputs and ambient.grad_enabled:
            side = ReplicaGraph([], list(leaves.values()), [], replica.tensors.guard, replica.name, outcome.context)
            self._retained_calls[message.call_id] = RetainedCall(
                mirror,
                side,
                list(leaves),
                outputs,
                arguments,
                mirror.replica_tensors(),
                draws.streams,
                run.replica_index,
            )
        # After a backward, if there will be one: it may change the module.
        self._last_module = None if message.call_id in self._retained_calls else mirror

    def _receive_forward(self, message: Message) -> tuple[ForwardRequest, list[Tensor], dict[int, Tensor]]:
        """What a forward is asked for with: the order, the tensors of its arguments, and leaves for some of those."""
        leaves: dict[int, Tensor] = {}
        place = itertools.count()

        def let_in(tag: TensorTag, tensor: Tensor | None) -> Tensor:
            made, number = rebuild_by_value(tag, tensor), next(place)
            if made.requires_grad:
                leaves[number] = made
                with torch.enable_grad():
                    (made,) = as_non_leaf(made)
            return made

        fields, arguments = self._channel.decode(message, let_in)
        self._note_foreign_leaves(())
        return ForwardRequest(*fields), arguments, leaves

    def _send_forward_reply(
        self,
        call: int,
        run: ForwardRequest,
        ran: ForwardReply,
        mirror: WorkerModule,
        arguments: Sequence[Tensor],
        *,
        grad: bool,
    ) -> dict[int, Tensor]:
        """Answer what a forward came to; the tensors of the answer that need a gradient, by their numbers."""
        numbers = {id(tensor): i for i, tensor in enumerate(arguments)}
        if run.carried_state:  # state, which forward may write
            for tensor in tensors_in([part for _, _, part in run.carried_state]):
                numbers.pop(id(tensor), None)
        known = mirror.tensor_numbers()
        kept = [ran.attributes, ran.containers]
        plain = type(ran.output) is Tensor and has_strided_data(ran.output)  # as most are
        if grad and (any(kept) or not plain):
            reject_lost_gradients(ran.output, kept, lambda t: has_strided_data(t) or is_jagged(t) or id(t) in known)

        def describe(tensor: Tensor) -> TensorTag:
            if id(tensor) in numbers:
                return ARGUMENT, numbers[id(tensor)]
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else tag_by_value(tensor)

        synchronize_stream(mirror.device)
        sent = self._channel.send(messages.DONE, call, ran, describe, label="the output of forward")
        return {i: t for i, t in enumerate(sent) if t.requires_grad and id(t) not in known}

    def _build_reply(self, mirror: WorkerModule, outcome: ReplicaResult) -> ForwardReply:
        """What a forward did, in terms that the other process knows."""
        crew = mirror.replica_set
        changed = crew.restore_containers()
        if changed:
            crew.discard()
            return ForwardReply(
                private_containers=[str(crew.shared_containers.paths[id(container)]) for container in changed]
            )
        if outcome.changes.is_structural:
            crew.discard()
            return ForwardReply(structure_changed=True)
        written = crew.written_parameters()
        ran = mirror.collect_changes(outcome)
        if written:  # on pages of its own, which no longer follow the module's
            numbers = mirror.tensor_numbers()
            ran.written_parameters = [numbers[id(tensor)] for tensor in written]
            crew.discard()
        ran.output, ran.written_globals = outcome.output, self._channel.registry.modified_globals()
        crew.finish_call()
        return ran

    def _backward(self, message: Message) -> None:
        fields, _ = self._channel.decode(message)
        back = BackwardRequest(*fields)
        held = self._retained_calls[back.call_id]
        mirror, side = held.module, held.graph
        for number in back.written_arguments:
            torch.autograd.graph.increment_version(held.arguments[number])
        counterparts = held.replica_tensors
        for number in back.written_tensors:
            torch.autograd.graph.increment_version(counterparts[number])
        leaves = [counterparts[number] for number in back.wanted_tensors]
        outputs = [held.outputs[number] for number in back.gradients]
        grads = [gradient.to(held.outputs[number].device) for number, gradient in back.gradients.items()]
        for spent in back.consumed_tokens:
            _drop_tokens(side, spent)
        tokens = [] if side.context is None else side.context.tokens
        outputs += [tokens[number] for number in back.collective_tokens]
        grads += [torch.zeros_like(tokens[number]) for number in back.collective_tokens]
        if not held.rng_streams.caller.cpu.streams_used:
            held.rng_streams.caller.cpu.set_base_seed(back.seed)
        hall = WorkerRendezvous(self._channel, self._inbox, message.call_id)
        streams, index = held.rng_streams, held.index
        around = (
            streams.backward_context(index) if mirror.device.type == "cpu" else streams.joint_backward_context(index)
        )
        check_no_stray_gradients(leaves)
        mirror.begin_backward(() if back.keep_gradients else back.wanted_tensors)
        set_anomaly_mode(back.anomaly_mode)
        try:
            with AutocastState(*back.autocast).enter():
                backward_in_group(hall, index, side, outputs, grads, back.retain_graph, around)
        except BaseException:
            mirror.begin_backward(())
            take_gradients([*leaves, *side.inputs])
            raise
        held.rng_streams.advance()
        gradients = dict(zip(back.wanted_tensors, take_gradients(leaves), strict=True))
        kept = self._nccl_member.keep_gradients(message.call_id, mirror, gradients) if back.keep_gradients else []
        present, others = mirror.flush_gradients(gradients)
        inputs = {n: g for n, g in zip(held.input_numbers, take_gradients(side.inputs), strict=True) if g is not None}
        went = BackwardReply(present, inputs, others, held.rng_streams.caller.cpu.streams_used, kept)
        synchronize_stream(mirror.device)
        self._channel.send(messages.DONE, message.call_id, went)
        if not back.retain_graph:
            for number in back.gradients:
                del held.outputs[number]
            _drop_tokens(side, back.collective_tokens)
        self._last_module = mirror

    def _find_backward_collectives(self, message: Message) -> None:
        """Where a backward from some outputs would meet the other replicas."""
        (call, numbers, spent), _ = self._channel.decode(message)
        held = self._retained_calls[call]
        for tokens in spent:
            _drop_tokens(held.graph, tokens)
        tokens = [] if held.graph.context is None else held.graph.context.tokens
        self._channel.send(
            messages.DONE,
            message.call_id,
            find_reached_collectives(tokens, [held.outputs[number] for number in numbers]),
        )


def _drop_tokens(side: ReplicaGraph, numbers: Sequence[int]) -> None:
    """A backward has used these tokens up."""
    if side.context is not None:
        side.context.tokens = [token for number, token in enumerate(side.context.tokens) if number not in numbers]


class DeferredErrors:
    """By the number of the module that a message was about, 0 for all of them."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def record(self, number: int, error: BaseException) -> None:
        """Keep the first one: what follows may fail for want of what it did not bring."""
        self._errors.setdefault(number, error if isinstance(error, Exception) else EngineError(repr(error)))

    def discard(self, numbers: Iterable[int]) -> None:
        """These modules are told of anew, or are gone."""
        for number in numbers:
            self._errors.pop(number, None)

    def pop(self, number: int) -> Exception | None:
        """What went wrong before a call of a module."""
        return self._errors.pop(0, None) or self._errors.pop(number, None)

    def pop_any(self) -> Exception | None:
        """What went wrong before a call that cannot even be read."""
        found, self._errors = list(self._errors.values()), {}
        return found[0] if found else None
