"""One remote replica's forward: the request to its worker, and applying the reply."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from instep.engines.base import ReplicaCall
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.remote_module import RemoteModuleState
from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.rendezvous import CollectiveLog
from instep.engines.processes.controller.replay import ReplayableCall, record_old_values
from instep.engines.processes.controller.replies import ReplyGenerator
from instep.engines.processes.lifecycle.watchdog import PendingReply
from instep.engines.processes.messages import (
    ForwardReply,
    ForwardRequest,
    OutputOnlyReply,
)
from instep.engines.processes.serialization.containers import decode_contents
from instep.engines.processes.serialization.diagnose import check_not_aliased, describe_unnamed, lost_gradient_error
from instep.engines.processes.serialization.registry import sendable_context
from instep.engines.processes.transport.channel import reply_rebuilder
from instep.errors import CannotCross, EngineError, RemoteArgumentError
from instep.replicas.diff import MISSING, STRUCTURE_CHANGED, AttributeChange, Changes, ContainerChange
from instep.replicas.mutable_arguments import mutable_arguments
from instep.replicas.object_graph import read_contents, write_contents
from instep.replicas.replica import ReplicaResult
from instep.replicas.write_watch import deduplicate_views
from instep.runtime.ambient import AmbientState, EncodedAmbientState
from instep.runtime.rng import GeneratorPairs, generators_in
from instep.runtime.warning_filters import CUDNN_WEIGHTS_FILTER
from instep.structure.tree import Path, format_path


class ReplicaForward:
    """The forward of one remote replica."""

    def __init__(self, replica_call: ReplicaCall, index: int) -> None:
        replica: Any = replica_call.replicas[index]
        self._replica_call, self._index = replica_call, index
        self._replica: RemoteReplica = replica
        replica.restore_views()
        follow, replica.needs_state_refresh = replica_call.sync_state or replica.needs_state_refresh, False
        lent, replica.carried_state = replica.carried_state, []
        args, kwargs = deduplicate_views(*replica_call.arguments[index])
        random = replica_call.rng.caller
        method = str.__str__(replica_call.method)  # an enum may be a text too, but goes no short way
        self._request = ForwardRequest(
            *(replica.module_id, method, args, index, list(replica_call.sizes), len(replica_call.replicas), follow),
            *(random.cpu.base_seed, random.accelerator_seed.base_seed),
            kwargs=kwargs,
            ambient=_encode_ambient(replica_call.ambient, replica),
            args_on_host=replica.worker_moves_args,
            carried_state=lent,
            python_seed=replica_call.python_seed,
        )
        self._watched = mutable_arguments(args, kwargs, replica_call.mutable_argument_ids)
        self._request.watched_arguments = [one.path for one in self._watched]
        self._request.serialized = replica_call.rng.serialized
        self._generators = _find_argument_generators(self._request, replica, replica_call.rng.generator_pairs[index])
        self._collectives = CollectiveLog(replica_call.group, replica_call.device_transfer)
        self._module_state: RemoteModuleState
        self._pending: PendingReply
        self._argument_tensors: list[Tensor]
        self._replayable: ReplayableCall | None = None

    @property
    def same_device(self) -> bool:
        """Whether the worker uses the caller's device."""
        return self._replica.same_device

    def send(self, client: WorkerClient) -> PendingReply:
        replica_call, request = self._replica_call, self._request
        replica_call.group.stack_providers[self._index] = client.worker.python_stacks
        module_state = self._module_state = client.sync_module(self._replica)
        broadcast = replica_call.device_transfer.parameter_broadcast
        request.sequence_number = (
            0 if broadcast is None else broadcast.send_to(client, self._replica.module_id, module_state)
        )
        if not request.sequence_number:
            request.refresh_state = request.refresh_state or (
                module_state.is_new and module_state.staging is not None
            )  # it may have looked there before
            module_state.refresh_staging(replica_call.device_transfer, request.refresh_state)
        request.tensor_values = module_state.unshared_values() if request.refresh_state else {}
        assert request.ambient is not None
        request.ambient.context_vars = sendable_context(replica_call.ambient.context_vars, client.channel.registry)
        request.generator_states = {number: source.get_state() for number, source in enumerate(module_state.generators)}
        pending, self._argument_tensors = client.send_forward(request)
        self._pending, self._replayable = pending, None
        self._collectives.add_failure_check(partial(client.has_failed, pending))
        return pending

    def prepare_replay(self, client: WorkerClient) -> None:
        """Do what does not depend on the reply, before waiting for it."""
        if self._replica_call.ambient.grad_enabled:
            self._replayable = self._new_replayable(client)

    def _new_replayable(self, client: WorkerClient) -> ReplayableCall:
        replica = self._replica
        made_by = (
            replica.name,
            replica.recreate,
            replica.private_containers,
            replica.source_modules,
            replica.source_changes_ref,
        )
        return ReplayableCall(
            self._pending.request_id,
            client,
            self._module_state,
            *made_by,
            self._request,
            self._collectives,
            self._argument_tensors,
        )

    def receive(
        self, client: WorkerClient
    ) -> ReplyGenerator[tuple[WorkerClient, ForwardReply | OutputOnlyReply, list[Tensor]]]:
        try:
            reply = yield from client.receive_reply(self._pending, self._collectives)
        except Exception:
            client.requeue_released(self._request)
            self._replayable = None  # the traceback leads here
            raise
        fields, tensors = client.channel.decode(
            reply, reply_rebuilder(self._argument_tensors, self._module_state.local_tensors)
        )
        return client, ForwardReply(*fields) if len(fields) > 1 else OutputOnlyReply(*fields), tensors

    def to_result(
        self, client: WorkerClient, reply: ForwardReply | OutputOnlyReply, tensors: list[Tensor]
    ) -> ReplicaResult:
        """Apply the reply to the remote replica."""
        replica_call, replica, module_state, request, arguments = (
            self._replica_call,
            self._replica,
            self._module_state,
            self._request,
            self._argument_tensors,
        )
        self._collectives.seal()
        replica.needs_full_sync = replica.needs_full_sync or bool(
            request.carried_state
        )  # the worker's replica holds a part, not what the module has
        result = (
            self._apply_reply(client, reply) if isinstance(reply, ForwardReply) else ReplicaResult(output=reply.output)
        )
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if replica_call.ambient.grad_enabled and needing:
            call = result.remote_call = self._replayable or self._new_replayable(client)
            call.output_indices, call.input_indices = (
                needing,
                _argument_indices(replica_call.grad_inputs[self._index], arguments),
            )
            call.output_versions = {number: tensors[number]._version for number in needing.values()}
            if isinstance(reply, ForwardReply):
                call.record_versions()  # what was written just now is the call's own
                call.arguments_changed = bool(reply.written_arguments or reply.exclusive_generator_states)
        if isinstance(reply, ForwardReply):
            record_old_values(
                replica.source_modules[0], [module_state.tensors[number] for number in reply.written_tensors]
            )
        return result

    def _apply_reply(self, client: WorkerClient, reply: ForwardReply) -> ReplicaResult:
        """Apply what the worker's replica changed."""
        arguments = self._argument_tensors
        if reply.written_globals:
            client.channel.registry.mark_all_unsent()
            raise CannotCross(
                f"forward changed the global {reply.written_globals[0]!r} in a worker process, where the script does "
                f"not see it.\nReturn what it is for, set it on the module, or write engine='threads'."
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
        result.written_arguments = {id(arguments[i]): tensor for i, tensor in reply.written_with_grad.items()}
        result.used_arguments = used
        return result

    def _changed_argument_error(self, path: Path) -> RemoteArgumentError:
        keys = (key for key in path[1:] if key != "__dict__")
        name = format_path((self._replica_call.argument_names[path[0]], *keys))
        return RemoteArgumentError(
            f"forward changes argument {name!r} on {self._replica.name}, in a worker process, where it is a copy: the "
            f"caller would not see the change.\n"
            f"Return what changed, or use DataParallel(..., engine='threads')."
        )

    def _check_foreign_gradients(self, used: Collection[int]) -> None:
        """Raise if an output depends on a tensor requiring grad that is not an argument of its own."""
        inputs = set(map(id, self._replica_call.grad_inputs[self._index])) if used else used
        for tensor in self._argument_tensors:
            if id(tensor) in used and id(tensor) not in inputs:
                raise lost_gradient_error(describe_unnamed(tensor))

    def _record_rng_use(self, reply: ForwardReply) -> None:
        """Mark the generators that the worker used as used."""
        random = self._replica_call.rng.caller
        if reply.host_rng_used:
            random.cpu.streams_used = True
            random.cpu.seed(0)
        if reply.device_rng_used:
            random.accelerator_seed.streams_used = True
            random.accelerator_seed.seed(0)
        random.cpu.used_remotely = random.cpu.used_remotely or reply.default_rng_used
        held = [self._module_state.generators[i] for i in reply.module_generators_used]
        for source in (*held, *(self._generators[i] for i in reply.argument_generators_used)):
            random.track(source).streams_used = True
        for i, state in reply.exclusive_generator_states.items():
            self._request.exclusive_generators[i].set_state(state)


def _find_argument_generators(
    request: ForwardRequest, replica: RemoteReplica, held: GeneratorPairs
) -> list[torch.Generator]:
    """Add the generators among the arguments to the request; returns the caller's shared ones."""
    if not held and all(type(value) is Tensor for value in (*request.args, *request.kwargs.values())):
        return []
    of_module = {id(made) for _, made in replica.cloner.generators}
    given = [pair for pair in held if id(pair[1]) not in of_module]
    own = {id(made) for _, made in given}
    loose = {id(g): g for g in generators_in([*request.args, *request.kwargs.values()]) if id(g) not in own}
    if any(key in of_module for key in loose):
        raise EngineError(
            "a torch.Generator is held by the module and passed as an argument: a worker process would have two.\n"
            "Pass another one, or write engine='threads'."
        )
    request.argument_generators = [(source.get_state(), made) for source, made in given]
    request.exclusive_generators = list(loose.values())
    return [source for source, _ in given]


def _argument_indices(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The indices of some tensors among the arguments that were sent."""
    places = {id(tensor): number for number, tensor in enumerate(arguments)}
    if any(id(tensor) not in places for tensor in tensors):
        raise EngineError(
            "an argument that requires grad is not a dense tensor: its gradient cannot be sent between processes.\n"
            "Use DataParallel(..., engine='threads')."
        )
    return [places[id(tensor)] for tensor in tensors]


def _encode_ambient(ambient: AmbientState, replica: RemoteReplica) -> EncodedAmbientState:
    encoded = ambient.encode(replica.source_device, replica.worker_device)
    if replica.source_device.type != replica.worker_device.type:
        encoded.process.warning_filters = (CUDNN_WEIGHTS_FILTER, *encoded.process.warning_filters)
    return encoded


def _apply_state(replica: RemoteReplica, module_state: RemoteModuleState, reply: ForwardReply) -> ReplicaResult:
    """Apply the worker's state changes to the remote replica."""
    if reply.private_containers:
        return ReplicaResult(changed_containers=reply.private_containers)
    if reply.structure_changed:
        return ReplicaResult(changes=STRUCTURE_CHANGED)
    modules = replica.modules
    attributes, contents = [], []
    for index, name, value, buffer in reply.attributes:
        if isinstance(value, torch.device) and value == replica.worker_device:
            value = replica.device
        holder = modules[index]._buffers if buffer else modules[index].__dict__
        attributes.append(AttributeChange(index, name, holder.get(name, MISSING), value, buffer))
        holder[name] = value
    containers = replica.cloner.containers if reply.containers else ()
    made = {str(replica.container_paths.get(id(source))): made for source, _, made in containers}
    for place, keys, items in reply.containers:
        container = made[place]
        before = read_contents(container)
        after = decode_contents(before, keys, items)
        if len(after.items) != len(before.items) or not all(map(is_, after.items, before.items)) or keys != before.keys:
            contents.append(ContainerChange(container, before, after))
            write_contents(container, after)
    with torch.no_grad():
        for source, held in replica.trainable if reply.private_parameters else ():
            if module_state.tensor_indices.get(id(source)) in reply.private_parameters:
                held.data.copy_(reply.private_parameters[module_state.tensor_indices[id(source)]])
    written = replica.write_state(
        {id(module_state.tensors[number]): value for number, value in reply.written_tensors.items()}
    )
    refused = [module_state.tensors[number] for number in reply.written_parameters]
    replica.needs_full_sync = replica.needs_full_sync or bool(refused)
    return ReplicaResult(
        output=reply.output,
        changes=Changes(False, attributes, contents),
        written_state=written,
        written_parameters=refused,
    )
