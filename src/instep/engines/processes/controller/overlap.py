"""Sums gradients from workers while the workers' backward is still running."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from instep.autograd.bridge import Gradients, ReplicaGraph
from instep.collectives.buckets import is_dense_pair
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.transport.doorbell import MIN_GRADIENT_BYTES, Doorbell, GradientChunk
from instep.errors import EngineError
from instep.runtime.affinity import spin_poll

_IDLE_SECONDS, _IDLE_FRACTION = 10.0, 0.1
"""Seconds without a ring, or a part of the time that a worker has, after which the answers are waited for."""
_POLL_MS = 10
"""Milliseconds after which it is seen that another thread has heard an answer, or that a worker has ended."""
_CHUNKS_PER_POLL = 4
"""Stretches that are added before the workers are looked at again."""


@dataclass
class _PartialSum:
    """This process's own gradient of one weight, as it lies in memory, and how far the workers' are added to it."""

    total: Tensor
    slots: list[Tensor]
    """Each worker's, as they lie in memory."""
    chunks: list[GradientChunk]
    """All that it consists of."""
    ready: dict[int, set[int]] = field(default_factory=dict)
    """By the start of a stretch: the workers that were heard to have it."""
    added: dict[int, int] = field(default_factory=dict)
    """By the start of a stretch: how many workers' are in the sum."""

    def add(self, start: int, stop: int) -> None:
        """Add what has come of a stretch, as far as no worker before is missing."""
        count = self.added.get(start, 0)
        while count in self.ready[start]:
            self.total[start:stop].add_(self.slots[count][start:stop])
            count += 1
            self.added[start] = count  # at once: an interruption may come


class _ExpectedWorker(NamedTuple):
    """A worker that may ring."""

    replica_index: int
    call: ReplayableCall
    doorbell: Doorbell
    request_id: int
    """Of the backward."""
    has_replied: Callable[[], bool]
    """Whether another thread has heard its answer."""
    positions: dict[int, int]
    """By the numbers of its larger weights: which ones they are."""


class LateGradient(NamedTuple):
    """A gradient that a worker came by after it had rung for one of the same weight."""

    replica_index: int
    position: int
    """The weight's, among the sources."""
    gradient: Tensor


class OverlappedSum:
    """The sum of one backward's gradients, as far as it is there before the answers."""

    def __init__(self) -> None:
        self._workers: list[_ExpectedWorker] = []
        self._sums: dict[int, _PartialSum] = {}
        """By the place of a weight."""
        self.late_gradients: list[LateGradient] = []
        self.writable: set[int] | None = None
        """The places of this process's own gradients that the others can be added to, once that is known."""

    def add_worker(self, replica: int, call: ReplayableCall, number: int, answered: Callable[[], bool]) -> None:
        """A worker was asked for its part of the backward, and may ring while it works on it."""
        bell = call.module_state.doorbell
        if bell is not None and bell.backward_id == number:
            self._workers.append(_ExpectedWorker(replica, call, bell, number, answered, {}))

    def run(self, sides: Sequence[ReplicaGraph]) -> None:
        """Add up what lies in slots, until all workers have answered or none says anything.

        To be called when this process's own gradients are there. Only where every worker rings, and none has died: they
        come in order, and a successor has slots of its own.
        """
        if len(self._workers) != len(sides) - 1 or not all(map(_doorbell_is_current, self._workers)):
            return
        self._sums = self._start_sums(sides)
        if not self._sums:
            return
        ringing = {worker.doorbell.fd: place for place, worker in enumerate(self._workers)}
        waiting = {worker.call.client.worker.connection.fileno(): worker for worker in self._workers}
        poll = select.poll()
        for fd in (*ringing, *waiting):
            poll.register(fd, select.POLLIN)
        ready: deque[tuple[int, GradientChunk]] = deque()
        last, quiet = (
            time.monotonic(),
            min(_IDLE_SECONDS, *(_IDLE_FRACTION * worker.call.client.timeout for worker in self._workers)),
        )
        while waiting:
            events = poll.poll(0) if ready else spin_poll(poll) or poll.poll(_POLL_MS)
            for fd, _ in events:
                if fd in ringing:
                    ready.extend((ringing[fd], stretch) for stretch in self._workers[ringing[fd]].doorbell.poll())
                elif waiting.pop(fd, None) is not None:
                    poll.unregister(fd)
            for _ in range(
                min(_CHUNKS_PER_POLL, len(ready)) if waiting else 0
            ):  # with all answers there, threads are quicker
                self._add_chunk(*ready.popleft())
            if events or ready:
                last = time.monotonic()
            elif time.monotonic() - last > quiet or any(map(_has_ended, waiting.values())):
                return

    def _start_sums(self, sides: Sequence[ReplicaGraph]) -> dict[int, _PartialSum]:
        """The larger ones of this process's own gradients that slots can be added to."""
        sums: dict[int, _PartialSum] = {}
        rows = [worker.call.tensor_indices(sides[worker.replica_index].leaves) for worker in self._workers]
        for place, leaf in enumerate(sides[0].leaves):
            own = leaf.grad
            if own is None or place not in (self.writable or ()) or own.nbytes < MIN_GRADIENT_BYTES:
                continue
            numbers = [row[place] for row in rows]
            known = zip(self._workers, numbers, strict=True)
            pairs = [(w, n) for w, n in known if n is not None and n in w.doorbell.chunks_by_tensor]
            slots = [worker.call.module_state.gradient_slots[number] for worker, number in pairs]
            if len(pairs) == len(numbers) and all(is_dense_pair(own, slot) for slot in slots):
                spans = pairs[0][0].doorbell.chunks_by_tensor[pairs[0][1]]
                sums[place] = _PartialSum(own.view(-1), [slot.view(-1) for slot in slots], spans)
                for worker, number in pairs:
                    worker.positions[number] = place
        return sums

    def _add_chunk(self, worker: int, stretch: GradientChunk) -> None:
        place = self._workers[worker].positions.get(stretch.tensor_index)
        if place is not None:
            one = self._sums[place]
            one.ready.setdefault(stretch.start, set()).add(worker)
            one.add(stretch.start, stretch.stop)

    def finish(self, columns: Sequence[Gradients]) -> dict[int, Tensor]:
        """The sums that were begun, by their places; all answers are there, and what is missing is added."""
        begun = {place: one for place, one in self._sums.items() if one.added}
        self._sums = {}  # the views in it keep the rest from being added to in place
        return {place: _finish_sum(one, [column[place] for column in columns]) for place, one in begun.items()}


def _doorbell_is_current(worker: _ExpectedWorker) -> bool:
    """Whether what a worker rings for is what its slots hold."""
    return worker.doorbell is worker.call.module_state.doorbell and worker.doorbell.backward_id == worker.request_id


def _has_ended(worker: _ExpectedWorker) -> bool:
    """Whether nothing comes any longer from a worker that has not answered here."""
    return worker.has_replied() or not worker.call.client.worker.is_alive()


def _finish_sum(one: _PartialSum, row: Gradients) -> Tensor:
    """One weight's sum, with what was not added yet."""
    total, *others = row
    assert total is not None
    for worker, gradient in enumerate(others):
        left = [span for span in one.chunks if one.added.get(span.start, 0) <= worker]
        if gradient is not None and is_dense_pair(total, gradient):
            sums, more = total.view(-1), gradient.reshape(-1)
            spans = [(0, len(sums))] if len(left) == len(one.chunks) else [(span.start, span.stop) for span in left]
            for start, stop in spans:
                sums[start:stop].add_(more[start:stop])
        elif len(left) < len(one.chunks):
            raise EngineError(
                "a worker died in a backward, and the one that took its place came to other gradients: the backward "
                "is not the same when it is run again.\nRun the step again, or write engine='threads'."
            )
        elif gradient is not None:
            total = total + gradient
    return total
