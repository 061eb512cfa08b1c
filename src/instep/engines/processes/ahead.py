"""Adding up gradients ahead of the answers: what lies in a worker's slots is added while it still works on the rest.

Each element is added in the order of the replicas, whichever worker was first: the sum is the same bit for bit.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from instep.bridge import Gradients, Side
from instep.engines.processes.bell import LEAST, Bell, Stretch
from instep.engines.processes.call import Call
from instep.engines.processes.cores import stay_awake
from instep.errors import EngineError
from instep.reduce import are_alike

_QUIET, _SHARE = 10.0, 0.1
"""Seconds without a ring, or a part of the time that a worker has, after which the answers are waited for."""
_MOMENT = 10
"""Milliseconds after which it is seen that another thread has heard an answer, or that a worker has ended."""
_AT_ONCE = 4
"""Stretches that are added before the workers are looked at again."""


@dataclass
class _Sum:
    """This process's own gradient of one weight, as it lies in memory, and how far the workers' are added to it."""

    own: Tensor
    slots: list[Tensor]
    """Each worker's, as they lie in memory."""
    spans: list[Stretch]
    """All that it consists of."""
    rung: dict[int, set[int]] = field(default_factory=dict)
    """By the start of a stretch: the workers that were heard to have it."""
    added: dict[int, int] = field(default_factory=dict)
    """By the start of a stretch: how many workers' are in the sum."""

    def add(self, start: int, stop: int) -> None:
        """Add what has come of a stretch, as far as no worker before is missing."""
        count = self.added.get(start, 0)
        while count in self.rung[start]:
            self.own[start:stop].add_(self.slots[count][start:stop])
            count += 1
            self.added[start] = count  # at once: an interruption may come


class _Expected(NamedTuple):
    """A worker that may ring."""

    replica: int
    call: Call
    bell: Bell
    number: int
    """Of the backward."""
    answered: Callable[[], bool]
    """Whether another thread has heard its answer."""
    places: dict[int, int]
    """By the numbers of its larger weights: which ones they are."""


class Late(NamedTuple):
    """A gradient that a worker came by after it had rung for one of the same weight."""

    replica: int
    place: int
    """The weight's, among the sources."""
    gradient: Tensor


class Ahead:
    """The sum of one backward's gradients, as far as it is there before the answers."""

    def __init__(self) -> None:
        self._workers: list[_Expected] = []
        self._sums: dict[int, _Sum] = {}
        """By the place of a weight."""
        self.late: list[Late] = []
        self.into: set[int] | None = None
        """The places of this process's own gradients that the others can be added to, once that is known."""

    def expect(self, replica: int, call: Call, number: int, answered: Callable[[], bool]) -> None:
        """A worker was asked for its part of the backward, and may ring while it works on it."""
        bell = call.told.bell
        if bell is not None and bell.about == number:
            self._workers.append(_Expected(replica, call, bell, number, answered, {}))

    def work(self, sides: Sequence[Side]) -> None:
        """Add up what lies in slots, until all workers have answered or none says anything.

        To be called when this process's own gradients are there. Only where every worker rings, and none has died: they
        come in order, and a successor has slots of its own.
        """
        if len(self._workers) != len(sides) - 1 or not all(map(_rings, self._workers)):
            return
        self._sums = self._begin(sides)
        if not self._sums:
            return
        ringing = {worker.bell.fd: place for place, worker in enumerate(self._workers)}
        waiting = {worker.call.desk.worker.line.fileno(): worker for worker in self._workers}
        poll = select.poll()
        for fd in (*ringing, *waiting):
            poll.register(fd, select.POLLIN)
        ready: deque[tuple[int, Stretch]] = deque()
        last, quiet = time.monotonic(), min(_QUIET, *(_SHARE * worker.call.desk.timeout for worker in self._workers))
        while waiting:
            events = poll.poll(0) if ready else stay_awake(poll) or poll.poll(_MOMENT)
            for fd, _ in events:
                if fd in ringing:
                    ready.extend((ringing[fd], stretch) for stretch in self._workers[ringing[fd]].bell.heard())
                elif waiting.pop(fd, None) is not None:
                    poll.unregister(fd)
            for _ in range(min(_AT_ONCE, len(ready)) if waiting else 0):  # with all answers there, threads are quicker
                self._add(*ready.popleft())
            if events or ready:
                last = time.monotonic()
            elif time.monotonic() - last > quiet or any(map(_is_over, waiting.values())):
                return

    def _begin(self, sides: Sequence[Side]) -> dict[int, _Sum]:
        """The larger ones of this process's own gradients that slots can be added to."""
        sums: dict[int, _Sum] = {}
        rows = [worker.call.numbers_of(sides[worker.replica].leaves) for worker in self._workers]
        for place, leaf in enumerate(sides[0].leaves):
            own = leaf.grad
            if own is None or place not in (self.into or ()) or own.nbytes < LEAST:
                continue
            numbers = [row[place] for row in rows]
            known = zip(self._workers, numbers, strict=True)
            pairs = [(w, n) for w, n in known if n is not None and n in w.bell.spans]
            slots = [worker.call.told.slots[number] for worker, number in pairs]
            if len(pairs) == len(numbers) and all(are_alike(own, slot) for slot in slots):
                spans = pairs[0][0].bell.spans[pairs[0][1]]
                sums[place] = _Sum(own.view(-1), [slot.view(-1) for slot in slots], spans)
                for worker, number in pairs:
                    worker.places[number] = place
        return sums

    def _add(self, worker: int, stretch: Stretch) -> None:
        place = self._workers[worker].places.get(stretch.number)
        if place is not None:
            one = self._sums[place]
            one.rung.setdefault(stretch.start, set()).add(worker)
            one.add(stretch.start, stretch.stop)

    def finish(self, columns: Sequence[Gradients]) -> dict[int, Tensor]:
        """The sums that were begun, by their places; all answers are there, and what is missing is added."""
        begun = {place: one for place, one in self._sums.items() if one.added}
        self._sums = {}  # the views in it keep the rest from being added to in place
        return {place: _finish(one, [column[place] for column in columns]) for place, one in begun.items()}


def _rings(worker: _Expected) -> bool:
    """Whether what a worker rings for is what its slots hold."""
    return worker.bell is worker.call.told.bell and worker.bell.about == worker.number


def _is_over(worker: _Expected) -> bool:
    """Whether nothing comes any longer from a worker that has not answered here."""
    return worker.answered() or not worker.call.desk.worker.alive()


def _finish(one: _Sum, row: Gradients) -> Tensor:
    """One weight's sum, with what was not added yet."""
    total, *others = row
    assert total is not None
    for worker, gradient in enumerate(others):
        left = [span for span in one.spans if one.added.get(span.start, 0) <= worker]
        if gradient is not None and are_alike(total, gradient):
            sums, more = total.view(-1), gradient.reshape(-1)
            spans = [(0, len(sums))] if len(left) == len(one.spans) else [(span.start, span.stop) for span in left]
            for start, stop in spans:
                sums[start:stop].add_(more[start:stop])
        elif len(left) < len(one.spans):
            raise EngineError(
                "a worker died in a backward, and the one that took its place came to other gradients: the backward "
                "is not the same when it is run again.\nRun the step again, or write engine='threads'."
            )
        elif gradient is not None:
            total = total + gradient
    return total
