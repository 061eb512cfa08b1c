"""A worker's membership in an NCCL group: broadcasts of weights, reductions of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from instep.collectives.buckets import REDUCIBLE_DTYPES, gradient_buckets
from instep.engines.processes import messages
from instep.engines.processes.messages import (
    BackwardReduction,
    BackwardReply,
    BackwardRequest,
    BroadcastRequest,
    JoinGroupRequest,
    ReduceRequest,
)
from instep.engines.processes.nccl.broadcast import broadcast_coalesced
from instep.engines.processes.nccl.bucket_reducer import BucketReducer
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.engines.processes.transport.channel import Channel
from instep.engines.processes.transport.connection import Message
from instep.engines.processes.transport.copy_streams import synchronize_stream
from instep.engines.processes.worker.module import WorkerModule


class NcclMember:
    """A worker as a member of NCCL groups. Several wrappers may share a worker, each with a group of its own."""

    def __init__(self, channel: Channel, modules: Mapping[int, WorkerModule]) -> None:
        self._channel, self._modules = channel, modules
        self._groups: dict[int, NcclGroup] = {}
        """By the upper half of their sequence numbers, which is unique to each group."""
        self._kept_gradients: dict[int, tuple[WorkerModule, dict[int, Tensor]]] = {}
        """Gradients kept for a reduction, by the id of their backward."""
        self.handlers: dict[str, Callable[[Message], None]] = {
            messages.JOIN_GROUP: self._join_group,
            messages.BROADCAST: self._receive_broadcast,
            messages.REDUCE: self._reduce_gradients,
            messages.FETCH_GRADIENTS: self._send_gradients,
        }

    def _join_group(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        assert isinstance(request, JoinGroupRequest)
        self._groups = {key: group for key, group in self._groups.items() if not group.abort_reason}
        group = self._groups[request.sequence_base >> 32] = NcclGroup(request, *message.fds)
        group.connect()
        self._channel.send(messages.DONE, message.call_id, None)

    def _receive_broadcast(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        assert isinstance(request, BroadcastRequest)
        group = self._get_group(request.sequence_number)
        with group.collective(request.sequence_number):
            module = self._modules[request.module_id]
            module.sequence_number = 0
            tensors = module.staged_tensors()
            if (len(tensors), sum(staged.tensor.nbytes for staged in tensors)) != (request.num_tensors, request.nbytes):
                raise GroupAborted("the tensors of a worker differ from those that are broadcast")
            broadcast_coalesced(group, tensors, module.find_memory)
            synchronize_stream(group.device)
            group.raise_if_aborted()
            module.sequence_number = request.sequence_number

    def _reduce_gradients(self, message: Message) -> None:
        request, _ = self._channel.decode(message)
        assert isinstance(request, ReduceRequest)
        group = self._get_group(request.sequence_number)
        with group.collective(request.sequence_number):
            kept: dict[int, Tensor] = self._kept_gradients[request.backward_id][1] if request.backward_id else {}
            gradients = [None if number is None else kept.get(number) for number in request.tensor_indices]
            BucketReducer(group, request.buckets, request.numels, gradients.__getitem__).finish()
            synchronize_stream(group.device)
            group.raise_if_aborted()
        self._channel.send(messages.DONE, message.call_id, None)

    def start_reduction(
        self, request: BackwardRequest, module: WorkerModule, leaves: Sequence[Tensor]
    ) -> BucketReducer | None:
        """Reduce gradients while the backward that follows runs; None if that is not asked for, or not possible."""
        if not request.reduction:
            return None
        reduction, numbers = BackwardReduction(*request.reduction), request.wanted_tensors
        group, buckets = self._find_group(reduction.sequence_number), gradient_buckets(leaves)
        if group is None:  # it was aborted
            return None
        if sum(bucket.numel for bucket in buckets) != reduction.numel:
            group.abort("the gradients of a worker differ from those that are reduced")

        def gradient_of(index: int) -> Tensor | None:
            gradient = leaves[index].grad
            return gradient if gradient is not None and _is_kept(module, numbers[index], gradient) else None

        try:
            group.begin(reduction.sequence_number)
        except GroupAborted:
            return None
        reducer = BucketReducer(group, buckets, [leaf.numel() for leaf in leaves], gradient_of)
        module.report_gradients(leaves, reducer.mark_ready)
        return reducer

    def finish_reduction(self, request: BackwardRequest, reducer: BucketReducer) -> bool:
        """Wait for the reduction, on the device. Returns whether that has succeeded; if not, the group is aborted."""
        group = self._get_group(request.reduction[0])
        try:
            reducer.finish()
            group.last_end = group.record_end()
        except RuntimeError as error:  # of the group, or out of memory
            group.abort(str(error))
            return False
        return reducer.is_exact

    def abort(self, request: BackwardRequest | None) -> None:
        """Abort the reduction that the others have begun with a backward; if that is unknown, all groups."""
        if request is None:
            groups: list[NcclGroup | None] = list(self._groups.values())
        else:
            groups = [self._find_group(request.reduction[0])] if request.reduction else []
        for group in filter(None, groups):
            group.abort("a worker does not take part in the reduction")

    def _send_gradients(self, message: Message) -> None:
        """Send kept gradients through their slots, without the group."""
        backward_id, _ = self._channel.decode(message)
        module, kept = self._kept_gradients.pop(backward_id)
        present, others = module.flush_gradients(dict(kept))
        synchronize_stream(module.device)
        self._channel.send(messages.DONE, message.call_id, BackwardReply(present, other_gradients=others))

    def _find_group(self, sequence_number: int) -> NcclGroup | None:
        return self._groups.get(sequence_number >> 32)

    def _get_group(self, sequence_number: int) -> NcclGroup:
        group = self._find_group(sequence_number)
        if group is None:
            raise GroupAborted("the worker is not in the NCCL group")
        return group

    def keep_gradients(self, backward_id: int, module: WorkerModule, gradients: dict[int, Tensor | None]) -> list[int]:
        """Keep the gradients that a group can reduce: remove them from `gradients` and return their numbers."""
        kept = {n: g for n, g in gradients.items() if g is not None and _is_kept(module, n, g)}
        for number in kept:
            del gradients[number]
        self._kept_gradients[backward_id] = module, kept
        return sorted(kept)

    def discard(self, calls: Sequence[int]) -> None:
        """Drop the kept gradients of these backwards."""
        for backward_id in calls:
            self._kept_gradients.pop(backward_id, None)


def _is_kept(module: WorkerModule, number: int, gradient: Tensor) -> bool:
    """Whether a gradient is kept for a reduction, and not sent."""
    return module.fits_slot(number, gradient) and gradient.dtype in REDUCIBLE_DTYPES
