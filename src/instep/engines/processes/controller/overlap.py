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
"""Seconds without a signal, as an absolute limit and as a fraction of the timeout, after which summing stops."""
_POLL_MS = 10
"""Milliseconds between checks for dead workers and for replies that another thread received."""
_CHUNKS_PER_POLL = 4
"""Chunks that are added before polling again."""


@dataclass
class _PartialSum:
    """The sum of one parameter's gradients, started with replica 0's gradient."""

    total: Tensor
    slots: list[Tensor]
    """The workers' gradients, flattened."""
    chunks: list[GradientChunk]
    """The chunks of the gradient."""
    ready: dict[int, set[int]] = field(default_factory=dict)
    """By the start of a chunk: the workers that have written it."""
    added: dict[int, int] = field(default_factory=dict)
    """By the start of a chunk: how many workers' chunks are in the sum."""

    def add(self, start: int, stop: int) -> None:
        """Add the chunks that are ready, in the order of the replicas."""
        count = self.added.get(start, 0)
        while count in self.ready[start]:
            self.total[start:stop].add_(self.slots[count][start:stop])
            count += 1
            self.added[start] = count  # per chunk: the loop may be interrupted


class _ExpectedWorker(NamedTuple):
    """A worker that may signal its doorbell."""

    replica_index: int
    call: ReplayableCall
    doorbell: Doorbell
    request_id: int
    """The id of the backward request."""
    has_replied: Callable[[], bool]
    """Whether another thread has received the reply."""
    positions: dict[int, int]
    """By the tensor index of a large parameter: its position among the sources."""


class LateGradient(NamedTuple):
    """A gradient that a worker produced after it had signalled one for the same parameter."""

    replica_index: int
    position: int
    """The parameter's position among the sources."""
    gradient: Tensor


class OverlappedSum:
    """Sums gradients of one backward as workers signal them. Replicas are added in order, so the result is exact."""

    def __init__(self) -> None:
        self._workers: list[_ExpectedWorker] = []
        self._sums: dict[int, _PartialSum] = {}
        """By the position of a parameter."""
        self.late_gradients: list[LateGradient] = []
        self.writable: set[int] | None = None
        """Positions of replica 0's gradients that can be added to in place, once known."""

    def add_worker(self, replica: int, call: ReplayableCall, number: int, answered: Callable[[], bool]) -> None:
        """Register a worker whose backward was requested."""
        doorbell = call.module_state.doorbell
        if doorbell is not None and doorbell.backward_id == number:
            self._workers.append(_ExpectedWorker(replica, call, doorbell, number, answered, {}))

    def run(self, sides: Sequence[ReplicaGraph]) -> None:
        """Add chunks as they become ready, until all workers have replied or none signals any more.

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
        """The sums for replica 0's large gradients."""
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
        """Complete the sums that were started, by position. To be called when all workers have replied."""
        begun = {place: one for place, one in self._sums.items() if one.added}
        self._sums = {}  # the views in it keep the rest from being added to in place
        return {place: _finish_sum(one, [column[place] for column in columns]) for place, one in begun.items()}


def _doorbell_is_current(worker: _ExpectedWorker) -> bool:
    """Whether the worker's doorbell signals this backward."""
    return worker.doorbell is worker.call.module_state.doorbell and worker.doorbell.backward_id == worker.request_id


def _has_ended(worker: _ExpectedWorker) -> bool:
    """Whether the worker has died, or its reply went to another thread."""
    return worker.has_replied() or not worker.call.client.worker.is_alive()


def _finish_sum(one: _PartialSum, row: Gradients) -> Tensor:
    """Add the chunks that are missing from a sum."""
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
