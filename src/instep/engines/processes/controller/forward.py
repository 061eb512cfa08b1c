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
    """One replica's part of a forward."""

    def __init__(self, job: ReplicaCall, index: int) -> None:
        shadow: Any = job.replicas[index]
        self._replica_call, self._index = job, index
        self._replica: RemoteReplica = shadow
        shadow.restore_views()
        follow, shadow.needs_state_refresh = job.sync_state or shadow.needs_state_refresh, False
        lent, shadow.carried_state = shadow.carried_state, []
        args, kwargs = deduplicate_views(*job.arguments[index])
        random = job.rng.caller
        method = str.__str__(job.method)  # an enum may be a text too, but goes no short way
        self._request = ForwardRequest(
            *(shadow.module_id, method, args, index, list(job.sizes), len(job.replicas), follow),
            *(random.cpu.base_seed, random.accelerator_seed.base_seed),
            kwargs=kwargs,
            ambient=_encode_ambient(job.ambient, shadow),
            args_on_host=shadow.worker_moves_args,
            carried_state=lent,
            python_seed=job.python_seed,
        )
        self._watched = mutable_arguments(args, kwargs, job.mutable_argument_ids)
        self._request.watched_arguments = [one.indices for one in self._watched]
        self._request.serialized = job.rng.serialized
        self._generators = _find_argument_generators(self._request, shadow, job.rng.generator_pairs[index])
        self._collectives = CollectiveLog(job.group, job.device_transfer)
        self._module_state: RemoteModuleState
        self._pending: PendingReply
        self._argument_tensors: list[Tensor]
        self._replayable: ReplayableCall | None = None

    @property
    def same_device(self) -> bool:
        """Whether tensors may stay on a device that both processes work on."""
        return self._replica.same_device

    def send(self, desk: WorkerClient) -> PendingReply:
        job, run = self._replica_call, self._request
        job.group.stack_providers[self._index] = desk.worker.python_stacks
        told = self._module_state = desk.sync_module(self._replica)
        sharing = job.device_transfer.parameter_broadcast
        run.sequence_number = 0 if sharing is None else sharing.send_to(desk, self._replica.module_id, told)
        if not run.sequence_number:
            run.refresh_state = run.refresh_state or (
                told.is_new and told.staging is not None
            )  # it may have looked there before
            told.refresh_staging(job.device_transfer, run.refresh_state)
        run.tensor_values = told.unshared_values() if run.refresh_state else {}
        assert run.ambient is not None
        run.ambient.context_vars = sendable_context(job.ambient.context_vars, desk.channel.registry)
        run.generator_states = {number: source.get_state() for number, source in enumerate(told.generators)}
        box, self._argument_tensors = desk.send_forward(run)
        self._pending, self._replayable = box, None
        self._collectives.add_failure_check(partial(desk.has_failed, box))
        return box

    def prepare_replay(self, desk: WorkerClient) -> None:
        """After the first replica has run, and before anybody hears the answer: do what does not depend on that."""
        if self._replica_call.ambient.grad_enabled:
            self._replayable = self._new_replayable(desk)

    def _new_replayable(self, desk: WorkerClient) -> ReplayableCall:
        shadow = self._replica
        made_by = (
            shadow.name,
            shadow.recreate,
            shadow.private_containers,
            shadow.source_modules,
            shadow.source_changes_ref,
        )
        return ReplayableCall(
            self._pending.request_id,
            desk,
            self._module_state,
            *made_by,
            self._request,
            self._collectives,
            self._argument_tensors,
        )

    def receive(
        self, desk: WorkerClient
    ) -> ReplyGenerator[tuple[WorkerClient, ForwardReply | OutputOnlyReply, list[Tensor]]]:
        try:
            answer = yield from desk.receive_reply(self._pending, self._collectives)
        except Exception:
            desk.requeue_released(self._request)
            self._replayable = None  # the traceback leads here
            raise
        fields, tensors = desk.channel.decode(
            answer, reply_rebuilder(self._argument_tensors, self._module_state.local_tensors)
        )
        return desk, ForwardReply(*fields) if len(fields) > 1 else OutputOnlyReply(*fields), tensors

    def to_result(
        self, desk: WorkerClient, ran: ForwardReply | OutputOnlyReply, tensors: list[Tensor]
    ) -> ReplicaResult:
        """What the worker did, on its stand-in."""
        job, shadow, told, run, arguments = (
            self._replica_call,
            self._replica,
            self._module_state,
            self._request,
            self._argument_tensors,
        )
        self._collectives.seal()
        shadow.needs_full_sync = shadow.needs_full_sync or bool(
            run.carried_state
        )  # the worker's replica holds a part, not what the module has
        outcome = self._apply_reply(desk, ran) if isinstance(ran, ForwardReply) else ReplicaResult(output=ran.output)
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if job.ambient.grad_enabled and needing:
            call = outcome.remote_call = self._replayable or self._new_replayable(desk)
            call.output_indices, call.input_indices = (
                needing,
                _argument_indices(job.grad_inputs[self._index], arguments),
            )
            call.output_versions = {number: tensors[number]._version for number in needing.values()}
            if isinstance(ran, ForwardReply):
                call.record_versions()  # what was written just now is the call's own
                call.arguments_changed = bool(ran.written_arguments or ran.exclusive_generator_states)
        if isinstance(ran, ForwardReply):
            record_old_values(shadow.source_modules[0], [told.tensors[number] for number in ran.written_tensors])
        return outcome

    def _apply_reply(self, desk: WorkerClient, ran: ForwardReply) -> ReplicaResult:
        """Do here what the worker's replica did there, besides its output."""
        arguments = self._argument_tensors
        if ran.written_globals:
            desk.channel.registry.mark_all_unsent()
            raise CannotCross(
                f"forward changed the global {ran.written_globals[0]!r} in a worker process, where the script does not "
                f"see it.\nReturn what it is for, set it on the module, or write engine='threads'."
            )
        if ran.changed_arguments:
            raise self._changed_argument_error(self._watched[ran.changed_arguments[0]].path)
        used = {id(arguments[i]) for i in ran.used_arguments}
        self._check_foreign_gradients(used)
        self._record_rng_use(ran)
        for i, value in ran.written_arguments.items():
            check_not_aliased(arguments, i)
            arguments[i].data.copy_(value)
        outcome = _apply_state(self._replica, self._module_state, ran)
        outcome.written_arguments = {id(arguments[i]): tensor for i, tensor in ran.written_with_grad.items()}
        outcome.used_arguments = used
        return outcome

    def _changed_argument_error(self, path: Path) -> RemoteArgumentError:
        name = format_path((self._replica_call.argument_names[path[0]], *path[1:]))
        return RemoteArgumentError(
            f"forward changes argument {name!r} on {self._replica.name}, in a worker process, where it is a copy: the "
            f"caller would not see the change.\n"
            f"Return what changed, or use DataParallel(..., engine='threads')."
        )

    def _check_foreign_gradients(self, used: Collection[int]) -> None:
        """Gradients are brought back for the caller's own arguments, and not for what these hold otherwise."""
        inputs = set(map(id, self._replica_call.grad_inputs[self._index])) if used else used
        for tensor in self._argument_tensors:
            if id(tensor) in used and id(tensor) not in inputs:
                raise lost_gradient_error(describe_unnamed(tensor))

    def _record_rng_use(self, ran: ForwardReply) -> None:
        """What was drawn from in the worker moves here."""
        random = self._replica_call.rng.caller
        if ran.host_rng_used:
            random.cpu.streams_used = True
            random.cpu.seed(0)
        if ran.device_rng_used:
            random.accelerator_seed.streams_used = True
            random.accelerator_seed.seed(0)
        random.cpu.used_remotely = random.cpu.used_remotely or ran.default_rng_used
        held = [self._module_state.generators[i] for i in ran.module_generators_used]
        for source in (*held, *(self._generators[i] for i in ran.argument_generators_used)):
            random.track(source).streams_used = True
        for i, state in ran.exclusive_generator_states.items():
            self._request.exclusive_generators[i].set_state(state)


def _find_argument_generators(
    run: ForwardRequest, shadow: RemoteReplica, held: GeneratorPairs
) -> list[torch.Generator]:
    """Note in an order the generators among its arguments; those of the caller that some of them stand for."""
    if not held and all(type(value) is Tensor for value in (*run.args, *run.kwargs.values())):
        return []
    of_module = {id(made) for _, made in shadow.cloner.generators}
    given = [pair for pair in held if id(pair[1]) not in of_module]
    own = {id(made) for _, made in given}
    loose = {id(g): g for g in generators_in([*run.args, *run.kwargs.values()]) if id(g) not in own}
    if any(key in of_module for key in loose):
        raise EngineError(
            "a torch.Generator that the module holds is an argument too, and would be two in a worker process.\n"
            "Pass another one, or write engine='threads'."
        )
    run.argument_generators = [(source.get_state(), made) for source, made in given]
    run.exclusive_generators = list(loose.values())
    return [source for source, _ in given]


def _argument_indices(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The numbers of some tensors among the arguments that were sent."""
    places = {id(tensor): number for number, tensor in enumerate(arguments)}
    if any(id(tensor) not in places for tensor in tensors):
        raise EngineError(
            "an argument that needs a gradient is no dense tensor, and its gradient cannot come back from another "
            "process.\nUse DataParallel(..., engine='threads')."
        )
    return [places[id(tensor)] for tensor in tensors]


def _encode_ambient(ambient: AmbientState, replica: RemoteReplica) -> EncodedAmbientState:
    encoded = ambient.encode(replica.source_device, replica.worker_device)
    if replica.source_device.type != replica.worker_device.type:
        encoded.process.warning_filters = (CUDNN_WEIGHTS_FILTER, *encoded.process.warning_filters)
    return encoded


def _apply_state(shadow: RemoteReplica, told: RemoteModuleState, ran: ForwardReply) -> ReplicaResult:
    """What a worker did, on its stand-in."""
    if ran.private_containers:
        return ReplicaResult(changed_containers=ran.private_containers)
    if ran.structure_changed:
        return ReplicaResult(changes=STRUCTURE_CHANGED)
    modules = shadow.modules
    attributes, contents = [], []
    for index, name, value, buffer in ran.attributes:
        if isinstance(value, torch.device) and value == shadow.worker_device:
            value = shadow.device
        holder = modules[index]._buffers if buffer else modules[index].__dict__
        attributes.append(AttributeChange(index, name, holder.get(name, MISSING), value, buffer))
        holder[name] = value
    containers = shadow.cloner.containers if ran.containers else ()
    made = {str(shadow.container_paths.get(id(source))): made for source, _, made in containers}
    for place, keys, items in ran.containers:
        container = made[place]
        before = read_contents(container)
        after = decode_contents(before, keys, items)
        if len(after.items) != len(before.items) or not all(map(is_, after.items, before.items)) or keys != before.keys:
            contents.append(ContainerChange(container, before, after))
            write_contents(container, after)
    with torch.no_grad():
        for source, held in shadow.trainable if ran.private_parameters else ():
            if told.tensor_indices.get(id(source)) in ran.private_parameters:
                held.data.copy_(ran.private_parameters[told.tensor_indices[id(source)]])
    written = shadow.write_state({id(told.tensors[number]): value for number, value in ran.written_tensors.items()})
    refused = [told.tensors[number] for number in ran.written_parameters]
    shadow.needs_full_sync = shadow.needs_full_sync or bool(refused)
    return ReplicaResult(
        output=ran.output,
        changes=Changes(False, attributes, contents),
        written_state=written,
        written_parameters=refused,
    )
