"""Gradients that workers have kept, on their way here: summed in a group, or one by one through host memory.

A worker that dies on the way has its part of the backward run again, and the sum is begun anew, in a new group: what
comes is the same sum, in the same order, as if nobody had died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType

from torch import Tensor

from instep.engines.processes import orders
from instep.engines.processes.asking import ask_now
from instep.engines.processes.flats import add_up
from instep.engines.processes.fleet import Fleet, Home, Officer
from instep.engines.processes.group import Broken, Group
from instep.engines.processes.hands import Worker
from instep.engines.processes.orders import Sum, WentBack
from instep.engines.processes.parts import BackwardPart
from instep.engines.processes.rounds import Round
from instep.engines.processes.shore import Passage
from instep.engines.processes.waiting import Box, Stuck
from instep.engines.processes.wire import Gone
from instep.reduce import buckets_of, unpack

_TRIES = 4
"""Groups in which a sum is tried, before gradients come one by one."""


class Homecoming:
    """The gradients of one backward; around the replicas' own parts of it."""

    def __init__(self, office: Officer, fleet: Fleet, passage: Passage, count: int) -> None:
        self._office, self._fleet, self._passage = office, fleet, passage
        self._count = count
        self._backs: dict[int, BackwardPart] = {}

    def __enter__(self) -> Homecoming:
        return self

    def expect(self, index: int, back: BackwardPart) -> None:
        """Have a worker keep the gradients of its part."""
        back.keep(True)
        self._backs[index] = back

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._bring()
        finally:
            for back in self._backs.values():
                back.forget()

    def _bring(self) -> None:
        if not any(back.held for back in self._backs.values()):
            return
        for _ in range(_TRIES):
            lost = [index for index in self._backs if not self._is_there(index)]
            if lost:
                self._at_desks(self._do_again, lost)
            home = self._fleet.ready(self._passage) if self._fleet.fits(self._count) else None
            if home is None and not self._fleet.fits(self._count):
                break
            if home is not None and self._sum(home):
                return
        self._at_desks(self._fetch, self._backs)

    def _at_desks(self, do: Callable[[int], None], indices: Iterable[int]) -> None:
        """Do something for some workers, each in the thread of its replica; `Broken` only where nothing worse came."""
        broken: list[Broken] = []

        def one(index: int) -> None:
            try:
                with self._passage.enter():
                    do(index)
            except Broken as error:
                broken.append(error)

        wanted = set(indices)
        tasks = [partial(one, index) if index in wanted else _nothing for index in range(self._count)]
        self._office.lease.run(tasks, here=True)
        if broken:
            raise broken[0]

    def _do_again(self, index: int) -> None:
        """Where a worker was replaced, its part of the backward is run again."""
        back = self._backs[index]
        back.take_back()
        went = ask_now(self._office, index, back, self._passage, back.near)
        back.leave(went, [])  # nothing comes late from a GPU

    def _is_there(self, index: int) -> bool:
        """Whether the worker that has kept the gradients is still the replica's."""
        try:
            return self._office.worker(index)[1] is self._backs[index].desk
        except Gone:
            return False

    def _sum(self, home: Home) -> bool:
        """Whether the sum of what workers have kept came; it is left where the first of them would leave its own."""
        kept = {index: back.kept() for index, back in sorted(self._backs.items())}
        places = sorted({place for mine in kept.values() for place in mine})
        owners = [self._backs[next(index for index in kept if place in kept[index])] for place in places]
        leaves = [owner.leaf(place) for owner, place in zip(owners, places, strict=True)]
        buckets, sizes = buckets_of(leaves), [leaf.numel() for leaf in leaves]
        sums: list[Tensor] = []
        together = Round(home)

        def begin(group: Group) -> None:
            sums.extend(add_up(group, buckets, sizes, {}))

        def ask(index: int) -> None:
            call = self._backs[index].number if index in kept else 0
            numbers = [kept.get(index, {}).get(place) for place in places]
            self._ask(index, together, begin, Sum(0, call, numbers, sizes, buckets))

        try:
            self._at_desks(ask, range(1, self._count))
        except Broken:
            return False
        except BaseException:
            together.abandon()
            raise
        self._passage.hand_over(sums)
        for flat, bucket in zip(sums, buckets, strict=True):
            for index, part in zip(bucket.indices, unpack(flat, leaves, bucket), strict=True):
                owners[index].bring(places[index], part)
        return True

    def _ask(self, index: int, together: Round, begin: Callable[[Group], None], order: Sum) -> None:
        """Have one worker take part in a sum."""
        boxes: list[Box] = []
        worker: Worker | None = None

        def say(ticket: int) -> None:
            boxes.append(desk.ask(orders.SUM, replace(order, ticket=ticket)))

        try:
            worker, desk = self._office.worker(index)
            if not together.join(worker, begin, say):
                raise Broken("a worker takes no part in a sum")
            desk.answer(boxes[0], None)
        except Gone as gone:
            together.fail("a worker ended")
            self._office.bury(index, worker, gone)
            raise Broken("a worker ended") from gone
        except Stuck:
            together.fail("a worker does not answer")
            self._office.give_up(index)
            raise
        except BaseException:
            together.fail("a worker failed")
            raise

    def _fetch(self, index: int) -> None:
        """Have one worker leave what it has kept in host memory; where another one took its place, its part again."""
        back = self._backs[index]
        if self._is_there(index):
            desk = back.desk
            try:
                fields, _ = desk.talk.take(desk.answer(desk.ask(orders.HAND_IN, back.number), None))
                back.add(WentBack(*fields))
                return
            except Gone as gone:
                self._office.bury(index, desk.worker, gone)
            except Stuck:
                self._office.give_up(index)
                raise
        back.keep(False)
        self._do_again(index)


def _nothing() -> None:
    """There is nothing to do for the first replica, which is here."""
