"""One remote replica's backward: the request to its worker, and collecting the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from instep.engines.concurrent import BackwardTask
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.overlap import LateGradient, OverlappedSum
from instep.engines.processes.controller.overlapped_reduction import OverlappedReduction
from instep.engines.processes.controller.rendezvous import CollectiveLog, ControllerRendezvous
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator
from instep.engines.processes.lifecycle.watchdog import PendingReply
from instep.engines.processes.messages import BackwardReply, BackwardRequest
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.errors import WorkerFailure
from instep.runtime.ambient import anomaly_mode


class ReplicaBackward:
    """The backward of one remote replica. Positions are those of parameters among the call's sources."""

    def __init__(self, call: ReplayableCall, task: BackwardTask[ControllerRendezvous], streams: CallStreams) -> None:
        self._call, self._task, self._streams = call, task, streams
        self._graph, self._host_rng = task.replica, task.graph.rng.caller.cpu
        written_arguments, written_tensors = call.changed_tensors()
        self._request = BackwardRequest(
            call.call_id,
            {call.output_indices[id(o)]: g for o, g in zip(task.outputs, task.gradients, strict=True)},
            self._host_rng.base_seed,
            retain_graph=task.retain_graph,
            collective_tokens=task.collectives,
            written_arguments=written_arguments,
            written_tensors=written_tensors,
            autocast=task.autocast if task.autocast.enabled else (),
            anomaly_mode=anomaly_mode(),
        )
        self._collectives = CollectiveLog(task.group, streams)
        self._pending: PendingReply | None = None
        self._was_tried = False
        """Whether a worker may have received the request."""
        self._tensor_indices: list[int | None] = []
        """By position: the index in the worker's tensor table."""
        self.kept_gradients: list[int] = []
        """Indices of the tensors whose gradients the worker keeps."""
        self.is_reduced = False
        """Whether the worker takes part in their reduction."""
        self.reduction: OverlappedReduction | None = None
        """The reduction over NCCL that begins with the backward."""

    @property
    def may_use_ipc(self) -> bool:
        return self._call.module_state.may_use_ipc

    def send(self, client: WorkerClient) -> PendingReply:
        self.client = client
        call, request, task = self._call, self._request, self._task
        if not task.group.can_send(task.index, again=self._was_tried):
            raise WorkerFailure(
                f"the worker of {self._graph.name} ended in a backward in which replicas exchange tensors on their "
                f"device, so it cannot be run again alone.\nNo gradient has changed. Run the step again."
            )
        task.group.remote.add(task.index)
        request.consumed_tokens = call.ensure_on(client, task.outputs)
        self._tensor_indices = call.tensor_indices(self._graph.leaves)
        request.wanted_tensors = [index for index in self._tensor_indices if index is not None]
        request.call_id = call.call_id
        if self.reduction is not None:
            can_join = None not in self._tensor_indices and not self._was_tried
            request.reduction = self.reduction.request_for(client.worker if can_join else None)
        pending, self._was_tried = client.new_pending(), True
        client.share_rows(request, task.group, task.index, pending)
        client.send_backward(request, call.module_state, pending)
        client.confirm_rows(task.group, task.index, pending)
        self._pending = pending
        self._collectives.add_failure_check(partial(client.has_failed, pending))
        return pending

    def receive(self, client: WorkerClient) -> ReplyGenerator[BackwardReply]:
        assert self._pending is not None
        message = yield from client.receive_reply(self._pending, self._collectives)
        if self.reduction is not None and self._streams.in_caller:
            self._task.group.leave(self._task.index)
            while self.reduction.is_running:
                yield RUNNING  # otherwise the stream would wait for the worker, which waits for the controller's part
        fields, _ = client.channel.decode(message)
        if self._call.module_state.doorbell is not None:
            self._call.module_state.doorbell.finish()
        return BackwardReply(*fields)

    def register_overlap(self, overlap: OverlappedSum) -> None:
        """Let gradients be summed before the worker replies, if the request was sent."""
        if self._pending is not None:
            overlap.add_worker(self._task.index, self._call, self._pending.request_id, self._pending.has_message)

    @property
    def request_id(self) -> int:
        """The id of the request, by which the worker refers to this backward."""
        assert self._pending is not None
        return self._pending.request_id

    def set_keep_gradients(self, keep: bool) -> None:
        """Set whether the worker keeps the gradients on its device."""
        self._request.keep_gradients = keep

    def mark_lost(self) -> None:
        """Undo the bookkeeping of a backward that is lost and will be run again."""
        if not self._task.retain_graph:
            self._call.consumed_tokens.pop()

    def leaf(self, position: int) -> Tensor:
        """The local leaf at a position."""
        return self._graph.leaves[position]

    def set_gradient(self, position: int, gradient: Tensor | None) -> None:
        """Store the gradient of a leaf."""
        assert self._call.received_gradients is not None
        self._call.received_gradients[position] = gradient

    def release(self) -> None:
        """Let the worker drop the gradients that it keeps."""
        if self._request.keep_gradients and self._pending is not None:
            self.client.released.append(("call", self.request_id))

    def kept_by_position(self) -> dict[int, int]:
        """By position: the index of the gradient that the worker keeps."""
        kept = set(self.kept_gradients)
        return {
            position: index
            for position, index in enumerate(self._tensor_indices)
            if index is not None and index in kept
        }

    def store_kept(self, reply: BackwardReply) -> None:
        """Store gradients that the worker had kept."""
        slots = self._read_slots(reply.filled_slots)
        for position, index in self.kept_by_position().items():
            other = _on_leaf_device(self.leaf(position), reply.other_gradients.get(index))
            self.set_gradient(position, slots.get(index, other))

    def _read_slots(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Gradients in the worker's slots, by tensor index."""
        module_state = self._call.module_state
        slots = module_state.read_gradients(indices)
        if isinstance(module_state.gradient_memory, SharedMemory):  # on a device, they were not copied
            self._streams.record_stream(slots.values())
        return slots

    def store_gradients(self, reply: BackwardReply, late: list[LateGradient]) -> None:
        """Store the gradients on the replica's graph; late ones are appended to `late`."""
        self.kept_gradients, self.is_reduced = reply.kept_gradients, reply.is_reduced
        if not self._task.retain_graph:
            self._call.consumed_tokens.append(self._task.collectives)
        if reply.host_rng_used:
            self._host_rng.streams_used = True
            self._host_rng.seed(0)
        slots = self._read_slots(reply.filled_slots)
        gradients = [None if index is None else slots.get(index) for index in self._tensor_indices]
        for position, index in enumerate(self._tensor_indices if reply.other_gradients else ()):
            other = None if index is None else reply.other_gradients.get(index)
            if gradients[position] is None:
                gradients[position] = _on_leaf_device(self.leaf(position), other)
            elif other is not None:
                late.append(LateGradient(self._task.index, position, other))
        self._call.received_gradients = gradients
        for leaf, index in zip(self._graph.inputs, self._call.input_indices, strict=True):
            leaf.grad = _on_leaf_device(leaf, reply.input_gradients.get(index))


def _on_leaf_device(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient on the device of its leaf."""
    return None if gradient is None else gradient.to(leaf.device)
