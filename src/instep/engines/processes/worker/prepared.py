"""Prepared calls in a worker: forwards and backwards whose requests have only what differs from call to call.

They do what the general requests do, in fewer steps. Whatever is unusual about a forward or a backward is left to the
code of the general requests, in `WorkerServer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.autograd.bridge import Gradients, ReplicaGraph
from instep.collectives.buckets import all_present
from instep.collectives.group import Group, ReplicaContext, ReplicaInfo
from instep.engines.base import RUN_PREPARED_FORWARD, run_prepared_forward
from instep.engines.plain_values import dump_plain, encode_plain
from instep.engines.processes.messages import DONE, ForwardReply, PreparedForwardRequest, PrepareRequest
from instep.engines.processes.transport.channel import Channel, tag_by_value
from instep.engines.processes.worker.module import WorkerModule
from instep.engines.processes.worker.rng import seed_python_rng
from instep.replicas.replica import Replica, ReplicaResult
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import CallerRng, ReplicaRng, stream_seed, supports_thread_streams


@dataclass
class RetainedCall:
    """A forward whose graph is kept for a backward, until the parent releases it."""

    module: WorkerModule
    graph: ReplicaGraph
    input_numbers: list[int]
    """Numbers of the argument tensors that require a gradient."""
    outputs: dict[int, Tensor]
    """Output tensors that require a gradient, by number."""
    arguments: list[Tensor]
    replica_tensors: list[Tensor]
    """The replica's tensor for each tensor of the module's table."""
    rng: ReplicaRng | None
    """The random streams of the forward; None if a prepared forward drew nothing."""
    index: int
    prepared: PreparedCall | None = None

    @property
    def may_recompute(self) -> bool:
        """Whether the backward may run parts of the forward again."""
        context = self.graph.context
        return isinstance(context, ReplicaContext) and context.may_recompute

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the call."""
        context = self.graph.context
        return context.info.count if isinstance(context, ReplicaContext) else 1

    def streams(self, seed: int) -> ReplicaRng:
        """The random streams of the forward, which backward continues; with this seed if it drew nothing on the CPU."""
        if self.rng is not None:
            if not self.rng.caller.cpu.streams_used:
                self.rng.caller.cpu.set_base_seed(seed)
            return self.rng
        assert self.prepared is not None
        return self.prepared.rng.streams(seed)

    def keep_streams(self, rng: ReplicaRng) -> None:
        """Let later backwards continue streams that this one has begun."""
        if self.rng is None and not rng.is_untouched:
            self.rng = rng


_NO_GROUP: Any = None
"""The group of a context until a request comes."""


class PreparedRng:
    """The random number generators of the forwards and backwards of one prepared call.

    Streams that nothing was drawn from serve every call with the same seeds.
    """

    def __init__(self, index: int, count: int, device: torch.device) -> None:
        self._index, self._devices = index, [device] * count
        self._seed: int | None = None
        self._device_seed: int | None = None
        self._streams: ReplicaRng

    def begin_forward(self, request: PreparedForwardRequest) -> ReplicaRng:
        """Seed the generators for a forward. Returns its streams."""
        if request.python_seed is not None:
            seed_python_rng(stream_seed(request.python_seed, self._index))
        streams = self.streams(request.seed, request.device_seed)
        # for code that uses the default generator directly
        torch.default_generator.manual_seed(stream_seed(request.seed, self._index))
        for source in (streams.caller.cpu, *streams.caller.accelerators.values()):
            source.set_initial_state(source.generator.get_state())
        return streams

    def streams(self, seed: int, device_seed: int | None = None) -> ReplicaRng:
        """Streams with these seeds that nothing was drawn from.

        A backward passes no `device_seed`: it does not draw from the stream of the device.
        """
        is_same = seed == self._seed and device_seed in (None, self._device_seed)
        if not is_same or not self._streams.is_untouched:
            caller = CallerRng(self._devices, out_of_process=True)
            caller.cpu.set_base_seed(seed)
            if caller.accelerator_seed is not caller.cpu:
                caller.accelerator_seed.set_base_seed(seed if device_seed is None else device_seed)
            pairs: list[Any] = [[]] * len(self._devices)
            self._streams = ReplicaRng(caller, pairs, per_thread=supports_thread_streams(), serialized=False)
            self._seed, self._device_seed = seed, device_seed
        return self._streams


class PreparedCall:
    """What the forwards of one `PrepareRequest` have in common."""

    def __init__(self, request: PrepareRequest, module: WorkerModule) -> None:
        sizes, index = request.shard_sizes, request.replica_index
        self.request = request
        self.ambient: AmbientState = request.ambient.decode()
        self.rng = PreparedRng(index, request.num_replicas, module.device)
        self.is_on_accelerator = module.device.type != "cpu"
        self._info = ReplicaInfo(index, request.num_replicas, module.device, sizes[index], sum(sizes[:index]))
        self._next: tuple[Replica, ReplicaContext] | None = None
        """The replica and the context of the next forward, if it was prepared."""
        self._replica_tensors: list[Tensor] | None = None
        self._leaves: list[Tensor]
        self._slots: list[Tensor] | None

    @property
    def is_forward_prepared(self) -> bool:
        """Whether `prepare_forward` has prepared the next forward."""
        return self._next is not None

    def prepare_forward(self, module: WorkerModule) -> None:
        """Do what the next forward needs and what does not depend on its request."""
        self._next = (
            (replica := module.sync_replica(self.request.replica_index)),
            ReplicaContext(
                _NO_GROUP,
                self._info,
                self.request.shard_sizes,
                self.ambient.grad_enabled,
                RUN_PREPARED_FORWARD,
                sync_batchnorm=bool(getattr(replica.patch, "enabled", False)),
                statistics_written=replica.statistics_written,
            ),
        )

    def discard_preparation(self, module: WorkerModule) -> None:
        """Forget what `prepare_forward` did."""
        if self._next is not None:
            self._next = None
            module.replica_set.finish_call()

    def run_forward(
        self, module: WorkerModule, group: Group, values: Sequence[Any], rng: ReplicaRng
    ) -> tuple[ReplicaResult, ReplicaContext]:
        """Run a forward with these arguments, positional ones first. Raises its exception."""
        if self._next is None:
            self.prepare_forward(module)
        assert self._next is not None
        request, (replica, context), self._next = self.request, self._next, None
        context.group = group
        args, names = list(values[: request.num_positional]), request.keywords
        kwargs = dict(zip(names, values[request.num_positional :], strict=True)) if names else {}
        run = self.ambient.context_vars.copy().run
        with self.ambient.enter(module.device):
            result = run(run_prepared_forward, replica, request.method, (args, kwargs), context, rng)
        return result, context

    def retain(
        self,
        module: WorkerModule,
        context: ReplicaContext,
        outputs: dict[int, Tensor],
        arguments: list[Tensor],
        rng: ReplicaRng,
    ) -> RetainedCall:
        """The graph of a forward that has run."""
        replica = module.replica_set.replicas[0]
        return RetainedCall(
            module,
            ReplicaGraph([], [], [], replica.tensors.guard, replica.name, context),
            [],
            outputs,
            arguments,
            module.replica_tensors(),
            None if rng.is_untouched else rng,
            self.request.replica_index,
            self,
        )

    def find_leaves(self, retained: RetainedCall) -> list[Tensor]:
        """The replica's leaves in a retained call, in the order of `PrepareRequest.wanted_tensors`."""
        if retained.replica_tensors is not self._replica_tensors:
            self._replica_tensors, wanted = retained.replica_tensors, self.request.wanted_tensors
            self._leaves = [retained.replica_tensors[number] for number in wanted]
            self._slots = retained.module.find_slots(wanted)
        return self._leaves

    def store_gradients(self, gradients: Gradients) -> bool:
        """Copy the gradients of `find_leaves` to their slots. Returns False, and copies none, unless each has one."""
        if self._slots is None or not all_present(gradients):
            return False
        if {gradient.layout for gradient in gradients if gradient is not None} - {torch.strided}:
            return False
        torch._foreach_copy_(self._slots, gradients)  # type: ignore[arg-type]
        return True


def is_ordinary(module: WorkerModule, result: ReplicaResult) -> bool:
    """Whether a forward had no effect but its output. Ends the call of the replica set then."""
    if result.changes or result.written_state or result.statistics is not None or module.replica_set.private_weights:
        return False
    return module.replica_set.finish_unchanged_call()


def record_draws(reply: ForwardReply, rng: ReplicaRng) -> None:
    """Report which generators a prepared forward has used."""
    reply.default_rng_used = rng.caller.cpu.was_used()
    rng.report_use()
    reply.device_rng_used = rng.caller.device_streams_used
    reply.host_rng_used = rng.caller.cpu.streams_used or reply.default_rng_used


def send_output(
    channel: Channel,
    call_id: int,
    output: Any,
    module: WorkerModule,
    arguments: Sequence[Tensor],
    *,
    device_rng_used: bool,
) -> dict[int, Tensor] | None:
    """Send the reply of a forward that had no effect but its output, and perhaps draws on an accelerator.

    Returns the output's tensors that require a gradient, by number. Returns None, and sends nothing, if it holds
    arguments, tensors of the module, or anything but plain tensors and values.
    """
    encoded = encode_plain(output)
    if encoded is None:
        return None
    content, tensors = encoded
    ids = set(map(id, tensors))
    if not ids.isdisjoint(module.tensor_numbers()) or not ids.isdisjoint(map(id, arguments)):
        return None
    sent, transfer = channel.write_tensors([tensor.detach() for tensor in tensors])
    fields = (content, True) if device_rng_used else (content,)  # those of a `ForwardReply`
    channel.connection.send(DONE, call_id, dump_plain((list(map(tag_by_value, tensors)), fields, transfer)), sent)
    return {number: tensor for number, tensor in enumerate(tensors) if tensor.requires_grad}
