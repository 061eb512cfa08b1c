"""One remote replica's backward: the request to its worker, and collecting the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from instep.engines.concurrent import BackwardTask
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.overlap import LateGradient, OverlappedSum
from instep.engines.processes.controller.rendezvous import CollectiveLog
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.controller.replies import ReplyGenerator
from instep.engines.processes.lifecycle.watchdog import PendingReply
from instep.engines.processes.messages import (
    BackwardReply,
    BackwardRequest,
)
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.ambient import anomaly_mode


class ReplicaBackward:
    """One replica's part of a backward."""

    def __init__(self, call: ReplayableCall, part: BackwardTask, passage: CallStreams) -> None:
        self._replayable, self._task, self._streams = call, part, passage
        self._graph, self._host_rng = part.graph.replicas[part.index], part.graph.rng.caller.cpu
        given, sources = call.changed_tensors()
        self._request = BackwardRequest(
            call.call_id,
            {call.output_indices[id(o)]: g for o, g in zip(part.outputs, part.gradients, strict=True)},
            self._host_rng.base_seed,
            retain_graph=part.retain_graph,
            collective_tokens=part.collectives,
            written_arguments=given,
            written_tensors=sources,
            autocast=part.autocast if part.autocast.enabled else (),
            anomaly_mode=anomaly_mode(),
        )
        room: Any = part.group
        self._collectives = CollectiveLog(room, passage)
        self._pending: PendingReply | None = None
        self._tensor_indices: list[int | None] = []
        """What the worker knows the leaves by."""
        self.kept_gradients: list[int] = []
        """The numbers of tensors whose gradients the worker has kept."""

    def send(self, desk: WorkerClient) -> PendingReply:
        self.client = desk
        call, back, part = self._replayable, self._request, self._task
        part.group.stack_providers[part.index] = desk.worker.python_stacks
        back.consumed_tokens = call.ensure_on(desk, part.outputs)
        self._tensor_indices = call.tensor_indices(self._graph.leaves)
        back.wanted_tensors = [number for number in self._tensor_indices if number is not None]
        back.call_id = call.call_id
        self._pending = desk.send_backward(back, call.module_state.doorbell)
        self._collectives.add_failure_check(partial(desk.has_failed, self._pending))
        return self._pending

    def register_overlap(self, ahead: OverlappedSum) -> None:
        """Let gradients be added that lie in slots before the worker answers, if it could be asked."""
        if self._pending is not None:
            ahead.add_worker(self._task.index, self._replayable, self._pending.request_id, self._pending.has_message)

    def receive(self, desk: WorkerClient) -> ReplyGenerator[BackwardReply]:
        assert self._pending is not None
        fields, _ = desk.channel.decode((yield from desk.receive_reply(self._pending, self._collectives)))
        if self._replayable.module_state.doorbell is not None:
            self._replayable.module_state.doorbell.finish()
        return BackwardReply(*fields)

    @property
    def request_id(self) -> int:
        """What the worker knows this backward by."""
        assert self._pending is not None
        return self._pending.request_id

    def set_keep_gradients(self, hold: bool) -> None:
        """Say whether the worker is to keep the gradients, until they are asked for."""
        self._request.keep_gradients = hold

    def mark_lost(self) -> None:
        """What the worker did is lost, and is to be done again."""
        if not self._task.retain_graph:
            self._replayable.consumed_tokens.pop()

    def leaf(self, place: int) -> Tensor:
        """What stands here for a tensor that gradients are wanted of."""
        return self._graph.leaves[place]

    def set_gradient(self, place: int, gradient: Tensor | None) -> None:
        """Leave the gradient of one that the worker had kept."""
        assert self._graph.received_gradients is not None
        self._graph.received_gradients[place] = gradient

    @property
    def same_device(self) -> bool:
        """Whether tensors may stay on a device that both processes work on."""
        return self._replayable.module_state.same_device

    def release(self) -> None:
        """Nobody will ask the worker for what it has kept."""
        if self._request.keep_gradients and self._pending is not None:
            self.client.released.append(("call", self.request_id))

    def kept_by_leaf(self) -> dict[int, int]:
        """By the place of a leaf: the number of its gradient, where the worker has kept that."""
        numbers = enumerate(self._tensor_indices)
        held = set(self.kept_gradients)
        return {place: number for place, number in numbers if number is not None and number in held}

    def store_kept(self, went: BackwardReply) -> None:
        """Leave gradients that were kept before."""
        slots = self._read_slots(went.filled_slots)
        for place, number in self.kept_by_leaf().items():
            more = _on_leaf_device(self.leaf(place), went.other_gradients.get(number))
            self.set_gradient(place, slots.get(number, more))

    def _read_slots(self, present: Sequence[int]) -> dict[int, Tensor]:
        """What the worker has left in its slots, by the numbers of tensors."""
        told = self._replayable.module_state
        slots = told.read_gradients(present)
        if isinstance(told.gradient_memory, SharedMemory):  # else they stay where they lie
            self._streams.record_stream(slots.values())
        return slots

    def store_gradients(self, went: BackwardReply, late: list[LateGradient]) -> None:
        """Leave the gradients at the stand-in's side of the bridge; what came late goes to a list."""
        self.kept_gradients = went.kept_gradients
        call, side, host = self._replayable, self._graph, self._host_rng
        if not self._task.retain_graph:
            call.consumed_tokens.append(self._task.collectives)
        if went.host_rng_used:
            host.streams_used = True
            host.seed(0)
        slots = self._read_slots(went.filled_slots)
        brought = [None if number is None else slots.get(number) for number in self._tensor_indices]
        for place, number in enumerate(self._tensor_indices if went.other_gradients else ()):
            more = None if number is None else went.other_gradients.get(number)
            if brought[place] is None:
                brought[place] = _on_leaf_device(side.leaves[place], more)
            elif more is not None:
                late.append(LateGradient(self._task.index, place, more))
        side.received_gradients = brought
        for leaf, number in zip(side.inputs, call.input_indices, strict=True):
            leaf.grad = _on_leaf_device(leaf, went.input_gradients.get(number))


def _on_leaf_device(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient on the device of its leaf."""
    return None if gradient is None else gradient.to(leaf.device)
