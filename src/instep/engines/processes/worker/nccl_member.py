"""A worker's membership in an NCCL group: broadcasts of weights, reductions of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from instep.engines.processes import messages
from instep.engines.processes.messages import BackwardReply, BroadcastRequest, JoinGroupRequest, ReduceRequest
from instep.engines.processes.nccl.collectives import REDUCIBLE_DTYPES, broadcast_coalesced, reduce_coalesced
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.engines.processes.transport.channel import Channel
from instep.engines.processes.transport.connection import Message
from instep.engines.processes.transport.copy_streams import synchronize_stream
from instep.engines.processes.worker.module import WorkerModule


class NcclMember:
    """A worker as a member of the group that it was last asked into."""

    def __init__(self, talk: Channel, mirrors: Mapping[int, WorkerModule]) -> None:
        self._channel, self._modules = talk, mirrors
        self._group: NcclGroup | None = None
        self._kept_gradients: dict[int, tuple[WorkerModule, dict[int, Tensor]]] = {}
        """By the number of a backward: the gradients that it has left here."""
        self.handlers: dict[str, Callable[[Message], None]] = {
            messages.JOIN_GROUP: self._join_group,
            messages.BROADCAST: self._receive_broadcast,
            messages.REDUCE: self._reduce_gradients,
            messages.FETCH_GRADIENTS: self._send_gradients,
        }

    def _join_group(self, message: Message) -> None:
        order, _ = self._channel.decode(message)
        assert isinstance(order, JoinGroupRequest)
        self._group = NcclGroup(order, *message.fds)
        self._group.connect()
        self._channel.send(messages.DONE, message.call_id, None)

    def _receive_broadcast(self, message: Message) -> None:
        order, _ = self._channel.decode(message)
        assert isinstance(order, BroadcastRequest)
        group = self._require_group()
        with group.collective(order.sequence_number):
            mirror = self._modules[order.module_id]
            mirror.sequence_number = 0
            pieces = mirror.host_pieces()
            if (len(pieces), sum(piece.tensor.nbytes for piece in pieces)) != (order.num_tensors, order.nbytes):
                raise GroupAborted("a worker has other tensors than it is sent")
            broadcast_coalesced(group, pieces)
            synchronize_stream(group.device)
            group.raise_if_aborted()
            mirror.sequence_number = order.sequence_number

    def _reduce_gradients(self, message: Message) -> None:
        order, _ = self._channel.decode(message)
        assert isinstance(order, ReduceRequest)
        group = self._require_group()
        with group.collective(order.sequence_number):
            kept: dict[int, Tensor] = self._kept_gradients[order.backward_id][1] if order.backward_id else {}
            have = {index: kept[number] for index, number in enumerate(order.tensor_indices) if number in kept}
            reduce_coalesced(group, order.buckets, order.numels, have)
            synchronize_stream(group.device)
            group.raise_if_aborted()
        self._channel.send(messages.DONE, message.call_id, None)

    def _send_gradients(self, message: Message) -> None:
        """Leave what was kept of a backward where it goes without a group."""
        call, _ = self._channel.decode(message)
        mirror, kept = self._kept_gradients.pop(call)
        present, others = mirror.flush_gradients(dict(kept))
        synchronize_stream(mirror.device)
        self._channel.send(messages.DONE, message.call_id, BackwardReply(present, other_gradients=others))

    def _require_group(self) -> NcclGroup:
        if self._group is None:
            raise GroupAborted("a worker is in no group")
        return self._group

    def keep_gradients(self, call: int, mirror: WorkerModule, gradients: dict[int, Tensor | None]) -> list[int]:
        """Keep those gradients of a backward that a group can sum; says which, and takes them out."""
        kept = {
            n: g
            for n, g in gradients.items()
            if g is not None and mirror.fits_slot(n, g) and g.dtype in REDUCIBLE_DTYPES
        }
        for number in kept:
            del gradients[number]
        self._kept_gradients[call] = mirror, kept
        return sorted(kept)

    def discard(self, calls: Sequence[int]) -> None:
        """Nobody asks for what these backwards have left any longer."""
        for call in calls:
            self._kept_gradients.pop(call, None)
