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
    """The backward of one remote replica."""

    def __init__(self, call: ReplayableCall, part: BackwardTask, streams: CallStreams) -> None:
        self._replayable, self._task, self._streams = call, part, streams
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
        self._collectives = CollectiveLog(room, streams)
        self._pending: PendingReply | None = None
        self._tensor_indices: list[int | None] = []
        """The leaves' indices in the worker's tensor table."""
        self.kept_gradients: list[int] = []
        """Indices of the tensors whose gradients the worker keeps."""

    def send(self, client: WorkerClient) -> PendingReply:
        self.client = client
        call, request, part = self._replayable, self._request, self._task
        part.group.stack_providers[part.index] = client.worker.python_stacks
        request.consumed_tokens = call.ensure_on(client, part.outputs)
        self._tensor_indices = call.tensor_indices(self._graph.leaves)
        request.wanted_tensors = [number for number in self._tensor_indices if number is not None]
        request.call_id = call.call_id
        self._pending = client.send_backward(request, call.module_state.doorbell)
        self._collectives.add_failure_check(partial(client.has_failed, self._pending))
        return self._pending

    def register_overlap(self, ahead: OverlappedSum) -> None:
        """Let gradients be summed before the worker replies, if the request was sent."""
        if self._pending is not None:
            ahead.add_worker(self._task.index, self._replayable, self._pending.request_id, self._pending.has_message)

    def receive(self, client: WorkerClient) -> ReplyGenerator[BackwardReply]:
        assert self._pending is not None
        fields, _ = client.channel.decode((yield from client.receive_reply(self._pending, self._collectives)))
        if self._replayable.module_state.doorbell is not None:
            self._replayable.module_state.doorbell.finish()
        return BackwardReply(*fields)

    @property
    def request_id(self) -> int:
        """The id of the request, by which the worker refers to this backward."""
        assert self._pending is not None
        return self._pending.request_id

    def set_keep_gradients(self, hold: bool) -> None:
        """Set whether the worker keeps the gradients on its device."""
        self._request.keep_gradients = hold

    def mark_lost(self) -> None:
        """Undo the bookkeeping of a backward that is lost and will be run again."""
        if not self._task.retain_graph:
            self._replayable.consumed_tokens.pop()

    def leaf(self, place: int) -> Tensor:
        """The local leaf at a position."""
        return self._graph.leaves[place]

    def set_gradient(self, place: int, gradient: Tensor | None) -> None:
        """Store the gradient of a leaf."""
        assert self._graph.received_gradients is not None
        self._graph.received_gradients[place] = gradient

    @property
    def same_device(self) -> bool:
        """Whether the worker uses the caller's device."""
        return self._replayable.module_state.same_device

    def release(self) -> None:
        """Let the worker drop the gradients that it keeps."""
        if self._request.keep_gradients and self._pending is not None:
            self.client.released.append(("call", self.request_id))

    def kept_by_leaf(self) -> dict[int, int]:
        """By the position of a leaf: the index of the gradient that the worker keeps."""
        numbers = enumerate(self._tensor_indices)
        held = set(self.kept_gradients)
        return {place: number for place, number in numbers if number is not None and number in held}

    def store_kept(self, reply: BackwardReply) -> None:
        """Store gradients that the worker had kept."""
        slots = self._read_slots(reply.filled_slots)
        for place, number in self.kept_by_leaf().items():
            more = _on_leaf_device(self.leaf(place), reply.other_gradients.get(number))
            self.set_gradient(place, slots.get(number, more))

    def _read_slots(self, present: Sequence[int]) -> dict[int, Tensor]:
        """Gradients in the worker's slots, by tensor index."""
        module_state = self._replayable.module_state
        slots = module_state.read_gradients(present)
        if isinstance(module_state.gradient_memory, SharedMemory):  # else they stay where they lie
            self._streams.record_stream(slots.values())
        return slots

    def store_gradients(self, reply: BackwardReply, late: list[LateGradient]) -> None:
        """Store the gradients on the replica's graph; late ones are appended to `late`."""
        self.kept_gradients = reply.kept_gradients
        call, side, host = self._replayable, self._graph, self._host_rng
        if not self._task.retain_graph:
            call.consumed_tokens.append(self._task.collectives)
        if reply.host_rng_used:
            host.streams_used = True
            host.seed(0)
        slots = self._read_slots(reply.filled_slots)
        brought = [None if number is None else slots.get(number) for number in self._tensor_indices]
        for place, number in enumerate(self._tensor_indices if reply.other_gradients else ()):
            more = None if number is None else reply.other_gradients.get(number)
            if brought[place] is None:
                brought[place] = _on_leaf_device(side.leaves[place], more)
            elif more is not None:
                late.append(LateGradient(self._task.index, place, more))
        side.received_gradients = brought
        for leaf, number in zip(side.inputs, call.input_indices, strict=True):
            leaf.grad = _on_leaf_device(leaf, reply.input_gradients.get(number))


def _on_leaf_device(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient on the device of its leaf."""
    return None if gradient is None else gradient.to(leaf.device)
