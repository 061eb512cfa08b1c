"""One remote replica's forward: the request to its worker, and applying the reply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from instep.engines.base import ReplicaCall
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.nccl_manager import ParameterBroadcast
from instep.engines.processes.controller.remote_module import RemoteModuleState
from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.rendezvous import CollectiveLog, ControllerRendezvous
from instep.engines.processes.controller.replay import ReplayableCall, record_old_values
from instep.engines.processes.controller.replies import ReplyGenerator
from instep.engines.processes.lifecycle.watchdog import PendingReply
from instep.engines.processes.messages import ForwardReply, ForwardRequest, OutputOnlyReply
from instep.engines.processes.serialization.diagnose import check_not_aliased, describe_unnamed, lost_gradient_error
from instep.engines.processes.serialization.registry import sendable_context
from instep.engines.processes.transport.channel import reply_rebuilder
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.errors import CannotCross, EngineError, LostExchange, RemoteArgumentError
from instep.replicas.diff import MISSING, STRUCTURE_CHANGED, AttributeChange, Changes, ContainerChange
from instep.replicas.mutable_arguments import mutable_arguments
from instep.replicas.object_graph import is_unchanged, read_contents, write_contents
from instep.replicas.replica import RemoteEffects, ReplicaResult
from instep.replicas.state.batch_norm import WrittenStatistics
from instep.replicas.state.container_encoding import decode_contents
from instep.replicas.write_watch import deduplicate_views
from instep.runtime.ambient import AmbientState, EncodedAmbientState
from instep.runtime.rng import GeneratorPairs, generators_in
from instep.runtime.warning_filters import CUDNN_WEIGHTS_FILTER
from instep.structure.tree import Path, format_path


@dataclass
class RemoteCall:
    """A call whose replicas, except the first, run in workers."""

    call: ReplicaCall
    group: ControllerRendezvous
    streams: CallStreams
    """Orders copies from and to the caller's accelerator."""
    broadcast: ParameterBroadcast | None = None
    """The NCCL broadcast of the module's tensors to all workers, if there is one."""
    python_seed: int | None = None
    """The seed of Python's and NumPy's generators in the workers."""


class ReplicaForward:
    """The forward of one remote replica."""

    def __init__(self, remote: RemoteCall, index: int) -> None:
        call = self._call = remote.call
        replica = call.replicas[index]
        assert isinstance(replica, RemoteReplica)
        self._remote, self._index, self._replica = remote, index, replica
        replica.restore_views()
        refresh_state, replica.needs_state_refresh = call.sync_state or replica.needs_state_refresh, False
        carried_state, replica.carried_state = replica.carried_state, []
        args, kwargs = deduplicate_views(*call.arguments[index])
        rng = call.rng.caller
        seed = rng.cpu.base_seed
        device_seed = seed if rng.accelerator_seed is rng.cpu else rng.accelerator_seed.base_seed
        self._watched = [] if call.has_plain_arguments else mutable_arguments(args, kwargs, call.mutable_argument_ids)
        self._request = ForwardRequest(
            replica.module_id,
            str.__str__(call.method),  # a plain string: a string enum cannot be sent in the compact format
            args,
            index,
            list(call.sizes),
            len(call.replicas),
            refresh_state,
            seed,
            device_seed,
            kwargs=kwargs,
            ambient=_encode_ambient(call.ambient, replica),
            args_on_host=replica.worker_moves_args,
            carried_state=carried_state,
            watched_arguments=[argument.path for argument in self._watched],
            serialized=call.rng.serialized,
            python_seed=remote.python_seed,
        )
        self._generators = (
            []
            if call.has_plain_arguments
            else _find_argument_generators(self._request, replica, call.rng.generator_pairs[index])
        )
        self._collectives = CollectiveLog(remote.group, remote.streams)
        self._module_state: RemoteModuleState
        self._client: WorkerClient
        self._pending: PendingReply | None = None
        self._was_tried = False
        """Whether a worker may have received the request."""
        self._argument_tensors: list[Tensor]
        self._replayable: ReplayableCall | None = None

    @property
    def may_use_ipc(self) -> bool:
        return self._replica.may_use_ipc

    def send(self, client: WorkerClient) -> PendingReply:
        remote, request = self._remote, self._request
        if not remote.group.can_send(self._index, again=self._was_tried):
            raise LostExchange(f"the worker of {self._replica.name} ended in a collective on its device.")
        self._client, self._replayable = client, None
        remote.group.remote.add(self._index)
        module_state = self._module_state = client.sync_module(self._replica)
        request.sequence_number = 0
        if remote.broadcast is not None:
            request.sequence_number = remote.broadcast.send_to(client, self._replica.module_id, module_state)
        if not request.sequence_number:
            # A worker that never read the staging copy has to, whether or not the state has changed.
            first_staging = module_state.is_new and module_state.staging is not None
            request.refresh_state = request.refresh_state or first_staging
            module_state.refresh_staging(remote.streams, request.refresh_state)
        request.tensor_values = module_state.unshared_values() if request.refresh_state else {}
        assert request.ambient is not None
        request.ambient.context_vars = sendable_context(self._call.ambient.context_vars, client.channel.registry)
        request.generator_states = {number: source.get_state() for number, source in enumerate(module_state.generators)}
        pending, self._was_tried = client.new_pending(), True
        client.share_rows(request, remote.group, self._index, pending)
        try:
            self._argument_tensors = client.send_forward(request, module_state, pending)
        except CannotCross as error:
            arguments = dict(zip(self._call.argument_names, (*request.args, *request.kwargs.values()), strict=False))
            named = client.channel.registry.packing_error(arguments, "argument ")
            raise named or error from error.__cause__
        self._pending = pending
        client.confirm_rows(remote.group, self._index, pending)
        self._collectives.add_failure_check(partial(client.has_failed, pending))
        return pending

    def adopt(
        self, client: WorkerClient, module_state: RemoteModuleState, pending: PendingReply, arguments: list[Tensor]
    ) -> None:
        """Take over a request that was sent in another form, and has been answered."""
        self._client, self._module_state, self._pending = client, module_state, pending
        self._argument_tensors = arguments

    def prepare_replay(self) -> None:
        """Do what does not depend on the reply, before waiting for it."""
        if self._call.ambient.grad_enabled and self._pending is not None:
            self._replayable = self._new_replayable()

    def _new_replayable(self) -> ReplayableCall:
        replica = self._replica
        assert self._pending is not None
        return ReplayableCall(
            self._pending.request_id,
            self._client,
            self._module_state,
            replica.name,
            replica.recreate,
            replica.private_container_paths,
            replica.source_modules,
            replica.source_changes_ref,
            self._request,
            self._collectives,
            self._argument_tensors,
        )

    def receive(self, client: WorkerClient) -> ReplyGenerator[tuple[ForwardReply | OutputOnlyReply, list[Tensor]]]:
        assert self._pending is not None
        try:
            reply = yield from client.receive_reply(self._pending, self._collectives)
        except Exception:
            client.requeue_released(self._request)
            self._replayable = None  # the exception's traceback holds this object
            raise
        fields, tensors = client.channel.decode(
            reply, reply_rebuilder(self._argument_tensors, self._module_state.local_tensors)
        )
        return ForwardReply(*fields) if len(fields) > 1 else OutputOnlyReply(*fields), tensors

    def to_result(self, reply: ForwardReply | OutputOnlyReply, tensors: list[Tensor]) -> ReplicaResult:
        """Apply the reply to the remote replica."""
        replica, module_state = self._replica, self._module_state
        self._collectives.seal()
        if self._request.carried_state:  # the worker's module has a shard of it, instead of the whole
            replica.needs_full_sync = True
        result = self._apply_reply(reply) if isinstance(reply, ForwardReply) else ReplicaResult(output=reply.output)
        indices = {id(tensor): index for index, tensor in enumerate(tensors) if tensor.requires_grad}
        if self._call.ambient.grad_enabled and indices:
            replayable = result.remote.graph = self._replayable or self._new_replayable()
            replayable.output_indices = indices
            replayable.output_versions = {index: tensors[index]._version for index in indices.values()}
            replayable.input_indices = _argument_indices(self._call.grad_inputs[self._index], self._argument_tensors)
            if isinstance(reply, ForwardReply):
                replayable.record_versions()  # the writes so far are those of forward itself
                replayable.arguments_changed = bool(reply.written_arguments or reply.exclusive_generator_states)
        if isinstance(reply, ForwardReply):
            written = [module_state.tensors[number] for number in reply.written_tensors]
            statistics = [module_state.tensors[number] for number in reply.statistics[0]] if reply.statistics else []
            record_old_values(replica.source_modules[0], written, statistics)
        return result

    def _apply_reply(self, reply: ForwardReply) -> ReplicaResult:
        """Apply what the worker's replica changed."""
        arguments = self._argument_tensors
        if reply.written_globals:
            self._client.channel.registry.mark_all_unsent()
            raise CannotCross(
                f"forward changed the global {reply.written_globals[0]!r} in a worker process, where the script does "
                f"not see it.\nReturn the value, set it on the module, or write engine='threads'."
            )
        if reply.changed_arguments:
            raise self._changed_argument_error(self._watched[reply.changed_arguments[0]].path)
        used = {id(arguments[i]) for i in reply.used_arguments}
        self._check_foreign_gradients(used)
        self._record_rng_use(reply)
        for i, value in reply.written_arguments.items():
            check_not_aliased(arguments, i)
            arguments[i].data.copy_(value)
        result = _apply_state(self._replica, self._module_state, reply)
        result.remote.written_arguments = {id(arguments[i]): tensor for i, tensor in reply.written_with_grad.items()}
        result.remote.used_arguments = used
        return result

    def _changed_argument_error(self, path: Path) -> RemoteArgumentError:
        index, *keys = (key for key in path if key != "__dict__")
        sizes = self._call.sizes
        values = [[*args, *kwargs.values()][index] for args, kwargs in self._call.arguments]
        argument = values.pop(self._index)
        is_shared = any(value is argument or _has_same_items(value, argument) for value in values)
        if keys and isinstance(argument, list) and not is_shared and len(argument) == sizes[self._index]:
            keys[0] += sum(sizes[: self._index])  # the caller's index of the sample
        name = format_path((self._call.argument_names[index], *keys))
        return RemoteArgumentError(
            f"forward changes argument {name!r} on {self._replica.name}, in a worker process, where it is a copy: the "
            f"caller would not see the change.\nReturn the new value from forward"
            + (" instead." if is_shared else ", or use engine='threads'.")
        )

    def _check_foreign_gradients(self, used: Collection[int]) -> None:
        """Raise if an output depends on a tensor that requires grad and is only part of an argument object."""
        inputs = set(map(id, self._call.grad_inputs[self._index])) if used else used
        for tensor in self._argument_tensors:
            if id(tensor) in used and id(tensor) not in inputs:
                raise lost_gradient_error(describe_unnamed(tensor))

    def _record_rng_use(self, reply: ForwardReply) -> None:
        """Mark the generators that the worker used as used."""
        caller_rng = self._call.rng.caller
        caller_rng.record_remote_use(
            host=reply.host_rng_used, device=reply.device_rng_used, default=reply.default_rng_used
        )
        generators = [self._module_state.generators[i] for i in reply.module_generators_used]
        generators += [self._generators[i] for i in reply.argument_generators_used]
        for generator in generators:
            caller_rng.track(generator).streams_used = True
        for i, state in reply.exclusive_generator_states.items():
            self._request.exclusive_generators[i].set_state(state)


def _has_same_items(value: Any, other: Any) -> bool:
    """Whether two replicas' copies of a list or dictionary have the same items."""
    is_container = isinstance(value, (list, dict)) and type(value) is type(other)
    return is_container and is_unchanged(value, read_contents(other))


def _find_argument_generators(
    request: ForwardRequest, replica: RemoteReplica, pairs: GeneratorPairs
) -> list[torch.Generator]:
    """Add the generators among the arguments to the request; returns the caller's shared ones.

    `pairs` are the caller's generators that several replicas use, each with this replica's own.
    """
    values = [*request.args, *request.kwargs.values()]
    if not pairs and all(type(value) is Tensor for value in values):
        return []
    module_ids = {id(generator) for _, generator in replica.cloner.generators}
    shared = [pair for pair in pairs if id(pair[1]) not in module_ids]
    shared_ids = {id(generator) for _, generator in shared}
    exclusive = {id(g): g for g in generators_in(values) if id(g) not in shared_ids}
    if not module_ids.isdisjoint(exclusive):
        raise EngineError(
            "a torch.Generator is an attribute of the module and also an argument: a worker process would have two.\n"
            "Pass another one, or write engine='threads'."
        )
    request.argument_generators = [(source.get_state(), generator) for source, generator in shared]
    request.exclusive_generators = list(exclusive.values())
    return [source for source, _ in shared]


def _argument_indices(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The indices of some tensors among the arguments that were sent."""
    indices = {id(tensor): index for index, tensor in enumerate(arguments)}
    if any(id(tensor) not in indices for tensor in tensors):
        raise EngineError(
            "an argument that requires grad is not a dense tensor: its gradient cannot be sent between processes.\n"
            "Use DataParallel(..., engine='threads')."
        )
    return [indices[id(tensor)] for tensor in tensors]


def _encode_ambient(ambient: AmbientState, replica: RemoteReplica) -> EncodedAmbientState:
    encoded = ambient.encode(replica.source_device, replica.worker_device)
    if replica.source_device.type != replica.worker_device.type:
        encoded.process.warning_filters = (CUDNN_WEIGHTS_FILTER, *encoded.process.warning_filters)
    return encoded


def _apply_state(replica: RemoteReplica, module_state: RemoteModuleState, reply: ForwardReply) -> ReplicaResult:
    """Apply the worker's state changes to the remote replica."""
    if reply.private_containers:
        return ReplicaResult(remote=RemoteEffects(changed_containers=reply.private_containers))
    if reply.structure_changed:
        return ReplicaResult(changes=STRUCTURE_CHANGED)
    modules = replica.modules
    attributes = []
    for index, name, value, is_buffer in reply.attributes:
        if isinstance(value, torch.device) and value == replica.worker_device:
            value = replica.device
        holder = modules[index]._buffers if is_buffer else modules[index].__dict__
        attributes.append(AttributeChange(index, name, holder.get(name, MISSING), value, is_buffer))
        holder[name] = value
    with torch.no_grad():
        for source, copy in replica.trainable if reply.private_parameters else ():
            value = reply.private_parameters.get(module_state.tensor_indices.get(id(source), -1))
            if value is not None:
                copy.data.copy_(value)
    written_state = {id(module_state.tensors[number]): value for number, value in reply.written_tensors.items()}
    written_parameters = [module_state.tensors[number] for number in reply.written_parameters]
    if written_parameters:
        replica.needs_full_sync = True
    return ReplicaResult(
        output=reply.output,
        changes=Changes(False, attributes, _apply_containers(replica, reply) if reply.containers else []),
        written_state=replica.write_state(written_state),
        statistics=_statistics(module_state, reply),
        remote=RemoteEffects(written_parameters),
    )


def _statistics(module_state: RemoteModuleState, reply: ForwardReply) -> WrittenStatistics | None:
    """The running statistics that the worker's replica has written."""
    if not reply.statistics:
        return None
    numbers, blocks = reply.statistics
    return WrittenStatistics(tuple(id(module_state.tensors[number]) for number in numbers), blocks, compare=True)


def _apply_containers(replica: RemoteReplica, reply: ForwardReply) -> list[ContainerChange]:
    """Write the worker's container changes to the replica's containers; returns those that differ."""
    copies = {str(replica.container_paths.get(id(source))): copy for source, _, copy in replica.cloner.containers}
    changes = []
    for path, keys, items in reply.containers:
        container = copies[path]
        before = read_contents(container)
        after = decode_contents(before, keys, items)
        if keys != before.keys or len(after.items) != len(before.items) or not all(map(is_, after.items, before.items)):
            changes.append(ContainerChange(container, before, after))
            write_contents(container, after)
    return changes
