"""A worker's place in a group: what it does there, order by order, and how it leaves when the group is given up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from instep.engines.processes import orders
from instep.engines.processes.flats import SUMMABLE, add_up, share
from instep.engines.processes.group import Broken, Group
from instep.engines.processes.mirror import Mirror
from instep.engines.processes.orders import Join, Share, Sum, WentBack
from instep.engines.processes.shore import wait_for
from instep.engines.processes.talk import Talk
from instep.engines.processes.wire import Message


class Member:
    """A worker as a member of the group that it was last asked into."""

    def __init__(self, talk: Talk, mirrors: Mapping[int, Mirror]) -> None:
        self._talk, self._mirrors = talk, mirrors
        self._group: Group | None = None
        self._kept: dict[int, tuple[Mirror, dict[int, Tensor]]] = {}
        """By the number of a backward: the gradients that it has left here."""
        self.answers: dict[str, Callable[[Message], None]] = {
            orders.JOIN: self._join,
            orders.SHARE: self._share,
            orders.SUM: self._sum,
            orders.HAND_IN: self._hand_in,
        }

    def _join(self, message: Message) -> None:
        order, _ = self._talk.take(message)
        assert isinstance(order, Join)
        self._group = Group(order, *message.fds)
        self._group.make()
        self._talk.say(orders.DONE, message.call, None)

    def _share(self, message: Message) -> None:
        order, _ = self._talk.take(message)
        assert isinstance(order, Share)
        group = self._in()
        with group.turn(order.ticket):
            mirror = self._mirrors[order.number]
            mirror.ticket = 0
            pieces = mirror.pieces()
            if (len(pieces), sum(piece.tensor.nbytes for piece in pieces)) != (order.pieces, order.nbytes):
                raise Broken("a worker has other tensors than it is sent")
            share(group, pieces)
            wait_for(group.device)
            group.check()
            mirror.ticket = order.ticket

    def _sum(self, message: Message) -> None:
        order, _ = self._talk.take(message)
        assert isinstance(order, Sum)
        group = self._in()
        with group.turn(order.ticket):
            kept: dict[int, Tensor] = self._kept[order.call][1] if order.call else {}
            have = {index: kept[number] for index, number in enumerate(order.numbers) if number in kept}
            add_up(group, order.buckets, order.sizes, have)
            wait_for(group.device)
            group.check()
        self._talk.say(orders.DONE, message.call, None)

    def _hand_in(self, message: Message) -> None:
        """Leave what was kept of a backward where it goes without a group."""
        call, _ = self._talk.take(message)
        mirror, kept = self._kept.pop(call)
        present, others = mirror.hand_in(dict(kept))
        wait_for(mirror.device)
        self._talk.say(orders.DONE, message.call, WentBack(present, others=others))

    def _in(self) -> Group:
        if self._group is None:
            raise Broken("a worker is in no group")
        return self._group

    def keep(self, call: int, mirror: Mirror, gradients: dict[int, Tensor | None]) -> list[int]:
        """Keep those gradients of a backward that a group can sum; says which, and takes them out."""
        kept = {n: g for n, g in gradients.items() if g is not None and mirror.fits(n, g) and g.dtype in SUMMABLE}
        for number in kept:
            del gradients[number]
        self._kept[call] = mirror, kept
        return sorted(kept)

    def forget(self, calls: Sequence[int]) -> None:
        """Nobody asks for what these backwards have left any longer."""
        for call in calls:
            self._kept.pop(call, None)
