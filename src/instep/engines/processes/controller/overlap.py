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
from instep.engines.processes.transport.connection import Connection
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

    @property
    def connection(self) -> Connection:
        """The connection to the worker."""
        return self.call.client.worker.connection


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

    def add_worker(
        self, replica_index: int, call: ReplayableCall, request_id: int, has_replied: Callable[[], bool]
    ) -> None:
        """Register a worker whose backward was requested."""
        doorbell = call.module_state.doorbell
        if doorbell is not None and doorbell.backward_id == request_id:
            self._workers.append(_ExpectedWorker(replica_index, call, doorbell, request_id, has_replied, {}))

    def run(self, replicas: Sequence[ReplicaGraph]) -> None:
        """Add chunks as they become ready, until all workers have replied or none signals any more.

        Call it after replica 0's backward. It does nothing unless every worker signals its gradients and none was
        replaced: gradients are added in the order of the replicas, and a replacement has its own slots.
        """
        if len(self._workers) != len(replicas) - 1 or not all(map(_doorbell_is_current, self._workers)):
            return
        self._sums = self._start_sums(replicas)
        if not self._sums:
            return
        waiting = {worker.connection.fileno(): worker for worker in self._workers}
        begun: list[Connection] = []
        try:
            for worker in self._workers:
                worker.connection.begin_wake_ups()
                begun.append(worker.connection)
            self._add_until_replied(waiting)
        finally:
            for connection in begun:
                connection.end_wake_ups()

    def _add_until_replied(self, waiting: dict[int, _ExpectedWorker]) -> None:
        """Add chunks until the workers in `waiting`, by the descriptor of their connection, have replied."""
        doorbells = {worker.doorbell.fd: number for number, worker in enumerate(self._workers)}
        poll = select.poll()
        for fd in (*doorbells, *waiting):
            poll.register(fd, select.POLLIN)
        ready: deque[tuple[int, GradientChunk]] = deque()
        last_event = time.monotonic()
        idle_limit = min(_IDLE_SECONDS, *(_IDLE_FRACTION * worker.call.client.timeout for worker in self._workers))
        while waiting:
            events = poll.poll(0) if ready else spin_poll(poll) or poll.poll(_POLL_MS)
            for fd, _ in events:
                if fd in doorbells:
                    worker = doorbells[fd]
                    ready.extend((worker, chunk) for chunk in self._workers[worker].doorbell.poll())
                elif waiting.pop(fd, None) is not None:
                    poll.unregister(fd)
            for fd in [fd for fd, worker in waiting.items() if worker.connection.has_mail()]:
                del waiting[fd]
                poll.unregister(fd)
            if waiting:  # after the last reply, `finish` is faster: it uses several threads
                for _ in range(min(_CHUNKS_PER_POLL, len(ready))):
                    self._add_chunk(*ready.popleft())
            if events or ready:
                last_event = time.monotonic()
            elif time.monotonic() - last_event > idle_limit or any(map(_has_ended, waiting.values())):
                return

    def _start_sums(self, replicas: Sequence[ReplicaGraph]) -> dict[int, _PartialSum]:
        """The sums for replica 0's large gradients, by position."""
        sums: dict[int, _PartialSum] = {}
        rows = [worker.call.tensor_indices(replicas[worker.replica_index].leaves) for worker in self._workers]
        for position, leaf in enumerate(replicas[0].leaves):
            total = leaf.grad
            if total is None or position not in (self.writable or ()) or total.nbytes < MIN_GRADIENT_BYTES:
                continue
            pairs = [
                (worker, index)
                for worker, row in zip(self._workers, rows, strict=True)
                if (index := row[position]) is not None and index in worker.doorbell.chunks_by_tensor
            ]
            slots = [worker.call.module_state.gradient_slots[index] for worker, index in pairs]
            if len(pairs) == len(rows) and all(is_dense_pair(total, slot) for slot in slots):
                first, first_index = pairs[0]
                chunks = first.doorbell.chunks_by_tensor[first_index]  # the same for all workers
                sums[position] = _PartialSum(total.view(-1), [slot.view(-1) for slot in slots], chunks)
                for worker, index in pairs:
                    worker.positions[index] = position
        return sums

    def _add_chunk(self, worker: int, chunk: GradientChunk) -> None:
        position = self._workers[worker].positions.get(chunk.tensor_index)
        if position is not None:
            partial_sum = self._sums[position]
            partial_sum.ready.setdefault(chunk.start, set()).add(worker)
            partial_sum.add(chunk.start, chunk.stop)

    def finish(self, columns: Sequence[Gradients]) -> dict[int, Tensor]:
        """Complete the sums that were started, by position. Call it when all workers have replied."""
        if not self._sums:
            return {}
        started = {position: partial_sum for position, partial_sum in self._sums.items() if partial_sum.added}
        self._sums = {}  # its views would count as users of the other gradients' memory
        return {
            position: _finish_sum(partial_sum, [column[position] for column in columns])
            for position, partial_sum in started.items()
        }


def _doorbell_is_current(worker: _ExpectedWorker) -> bool:
    """Whether the worker's doorbell signals this backward."""
    return worker.doorbell is worker.call.module_state.doorbell and worker.doorbell.backward_id == worker.request_id


def _has_ended(worker: _ExpectedWorker) -> bool:
    """Whether the worker has died, or its reply went to another thread."""
    return worker.has_replied() or not worker.call.client.worker.is_alive()


def _finish_sum(partial_sum: _PartialSum, row: Gradients) -> Tensor:
    """Add the chunks that are missing from a sum."""
    total, *others = row
    assert total is not None
    for worker, gradient in enumerate(others):
        missing = [chunk for chunk in partial_sum.chunks if partial_sum.added.get(chunk.start, 0) <= worker]
        all_missing = len(missing) == len(partial_sum.chunks)
        if gradient is not None and is_dense_pair(total, gradient):
            flat_total, flat = total.view(-1), gradient.reshape(-1)
            for start, stop in [(0, len(flat))] if all_missing else [(chunk.start, chunk.stop) for chunk in missing]:
                flat_total[start:stop].add_(flat[start:stop])
        elif not all_missing:
            raise EngineError(
                "a worker died in a backward, and its replacement computed other gradients: the backward is not "
                "deterministic.\nRun the step again, or write engine='threads'."
            )
        elif gradient is not None:
            total = total + gradient
    return total
