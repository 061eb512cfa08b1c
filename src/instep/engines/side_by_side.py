"""What engines have in common whose replicas run at the same time, each with a graph of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor

from instep.bridge import Gradients, Side, Span, live, take
from instep.engines.pages import keep_pages
from instep.engines.pool import Lease
from instep.engines.protocol import Job, perform, raise_first, raised_in
from instep.engines.room import BACKWARD, FORWARD, Room, run_here
from instep.engines.tasks import inside_replica
from instep.locks import ProcessLock, surely
from instep.meeting import attend
from instep.private import accumulates, run_backward
from instep.reaching import Reach, needed_tokens, reach
from instep.reduce import add_up, free_to_use, gather
from instep.replicas.ambient import Casts
from instep.replicas.replica import Outcome, Replica

_SPREAD_BYTES = 2**22
"""Of gradients for each thread: below that, their sum is there before the threads have woken up."""

_ENDS_SOON = 0.05
"""Seconds that an interrupted call waits for its replicas to end."""


@dataclass(frozen=True)
class Part:
    """One replica's part of a backward."""

    room: Room
    index: int
    span: Span
    outputs: list[Tensor]
    """The outputs that a gradient has arrived for."""
    gradients: list[Tensor]
    keep: bool
    """Whether the graph is kept."""
    crossings: list[int]
    """Where replicas met in the forward and meet again."""
    casts: Casts
    """Autocast around whoever asked for it."""


class SideBySide:
    """One thread of this process for each replica, that runs it or waits for it; on the CPU their backward too."""

    name = ""
    joint = False
    in_turn = far = False

    def __init__(self, devices: Sequence[torch.device], *, timeout: float = inf) -> None:
        self._devices = list(devices)
        self.timeout = timeout
        """Seconds that replicas which meet wait for one that does not move."""
        self._on_host = all(device.type == "cpu" for device in devices)
        if self._on_host:
            keep_pages()
        self._lease: Lease | None = None
        self._lock = ProcessLock()
        self._holding = False
        self._held: dict[int, tuple[list[Tensor], list[Gradients]]] = {}
        """Gradients that `no_sync` holds back: by the sources they belong to, one column for each replica."""

    @property
    def lease(self) -> Lease:
        with self._lock:
            if self._lease is None:
                self._lease = Lease(self._devices)
                weakref.finalize(self, self._lease.drop)
            return self._lease

    def kinds(self) -> Sequence[type[Replica]]:
        return ()

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        """Replicas of this process reach them wherever they are."""

    def words(self) -> str:
        return ""

    def forward(self, job: Job) -> list[Outcome]:
        names, streams = [replica.name for replica in job.replicas], job.streams
        joint = not self._on_host and not self.far
        job.room = self.room_for(names, FORWARD, joint=joint, in_turn=streams.in_turn, step_aside=streams.step_aside)
        tasks = [partial(self.perform, job, index) for index in range(len(job.replicas))]
        try:
            outcomes = self.lease.run(tasks, stop=job.room.abort, patience=_ENDS_SOON, watch=job.room.check)
            job.room.close()
        except BaseException:
            surely(job.room.abort, job.room.close)
            raise
        raise_first(job.replicas, outcomes)
        return outcomes

    def wait(self) -> None:
        if self._lease is not None and not inside_replica():
            self._lease.wait()

    def afterwards(self, then: Callable[[], object]) -> None:
        if self._lease is not None:
            self._lease.afterwards(then)

    def perform(self, job: Job, index: int) -> Outcome:
        """One replica's part of a forward, in its thread."""
        return perform(job, index)

    def backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            try:
                self._run_backward(span, gradients, keep)
                inputs = [take(side.inputs) for side in span.sides]
                columns = [side.collect() for side in span.sides]
                if not self._on_host:
                    columns = [gather(column, self._devices[0]) for column in columns]
                if self._holding and all(accumulates(source) for source in span.sources):
                    self._hold(span.sources, columns)
                    return [None] * len(span.sources), inputs
                return self._sum(columns), inputs
            except BaseException:
                surely(*(do for side in span.sides for do in (side.collect, partial(take, side.inputs))))
                raise

    def _run_backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> None:
        pairs = [live(side, grads) for side, grads in zip(span.sides, gradients, strict=True)]
        span.streams.renew()
        if self._on_host or self.far:  # autograd runs a CPU graph in the thread that asks for it
            needed = self._add_tokens(span, pairs, keep)
            nested = inside_replica()  # the replicas' threads may be waiting for this one
            names, in_turn = [side.name for side in span.sides], span.streams.in_turn or nested
            room = self.room_for(names, BACKWARD, in_turn=in_turn, step_aside=span.streams.step_aside)
            casts = Casts.capture()
            parts = [Part(room, i, span, *pair, keep, needed, casts) for i, pair in enumerate(pairs)]
            if nested:
                run_here([partial(self.differentiate, part) for part in parts], room, stop=lambda _: False)
            else:
                self.differentiate_all(parts, room)
        else:  # autograd's own device threads run the replicas at the same time
            outputs = [output for outs, _ in pairs for output in outs]
            arrived = [grad for _, grads in pairs for grad in grads]
            _backward(span.sides, outputs, arrived, keep, span.streams.joint_backward())
        span.streams.settle()

    def _add_tokens(self, span: Span, pairs: Sequence[tuple[list[Tensor], list[Tensor]]], keep: bool) -> list[int]:
        """Start each backward also at what any replica did together with the others; returns where that was."""
        rows = [_tokens(side) for side in span.sides]
        if not any(rows) or not any(outputs for outputs, _ in pairs):
            return []
        if all(len(outputs) == len(side.outputs) for side, (outputs, _) in zip(span.sides, pairs, strict=True)):
            needed = list(range(len(rows[0])))
        else:
            needed = needed_tokens([self.reach(span, index, outputs) for index, (outputs, _) in enumerate(pairs)])
        for side, row, (outputs, grads) in zip(span.sides, rows, pairs, strict=True):
            if side.remote is not None:
                continue
            outputs += [row[number] for number in needed]
            grads += [torch.zeros_like(row[number]) for number in needed]
            if not keep and side.seat is not None:
                side.seat.tokens = [token for number, token in enumerate(row) if number not in needed]
        return needed

    def reach(self, span: Span, index: int, outputs: Sequence[Tensor]) -> Reach:
        """Where one replica's backward from these outputs comes to meet the others."""
        return reach(_tokens(span.sides[index]), outputs)

    def room_for(self, names: Sequence[str], end: str, **options: Any) -> Room:
        """Where the replicas of a call, or of a backward, meet."""
        return Room(names, end, timeout=self.timeout, **options)

    def differentiate_all(self, parts: Sequence[Part], room: Room) -> None:
        """Every replica's part of a backward, each in its thread."""
        self.lease.run([partial(self.differentiate, part) for part in parts], stop=room.abort, here=not self._on_host)

    def differentiate(self, part: Part) -> None:
        """One replica's part of a backward, in its thread: gradients are left on its leaves and inputs."""
        side, streams = part.span.sides[part.index], part.span.streams
        around = streams.backward(part.index) if self._on_host else streams.joint_backward(part.index)
        with part.casts.enter():
            in_room(part.room, part.index, side, part.outputs, part.gradients, part.keep, around)

    def _sum(self, columns: Sequence[Gradients], into: Collection[int] | None = None) -> Gradients:
        """The sum over replicas on the source's device; a large one is spread over the replica threads.

        `into` are the places of the first ones that it can be made in, where that is known.
        """
        chunks = _chunks(columns[0], len(columns)) if self._on_host else []
        if len(chunks) < 2:
            return add_up(columns, free_to_use(columns[0]) if into is None else into)
        parts = self.lease.run([partial(_add_chunk, columns, *chunk) for chunk in chunks])
        return [gradient for part in parts for gradient in part]

    def _hold(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        key = id(sources[0]) if sources else 0
        known = self._held.get(key)
        if known is None or len(known[0]) != len(sources):
            self._release_held(known)
            self._held[key] = (sources, columns)
            return
        both = [known[1][i : i + 1] + columns[i : i + 1] for i in range(max(len(known[1]), len(columns)))]
        self._held[key] = (sources, [add_up(pair) for pair in both])

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Leave gradients on the replicas while inside, and bring them home on the way out."""
        outer, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = outer
            if not outer:
                with self._lock:
                    held, self._held = self._held, {}
                    for entry in held.values():
                        self._release_held(entry)

    def _release_held(self, held: tuple[list[Tensor], list[Gradients]] | None) -> None:
        """Bring home what was held back; gradients reach the source as a backward would bring them."""
        if held is not None:
            pairs = [(s, g) for s, g in zip(held[0], self._sum(held[1]), strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([source for source, _ in pairs], [gradient for _, gradient in pairs])

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def _backward(
    sides: Sequence[Side],
    outputs: list[Tensor],
    grads: list[Tensor],
    keep: bool,
    around: AbstractContextManager[None],
) -> None:
    """A backward inside replicas: gradients accumulate on their leaves, which are open to it alone."""
    if not outputs:
        return
    with around:
        try:
            for side in sides:
                side.guard.set(True)
            run_backward(outputs, grads, keep)
        except BaseException as error:
            if len(sides) == 1:
                raised_in(sides[0].name, error)
            raise
        finally:
            for side in sides:
                side.guard.set(False)


def in_room(
    room: Any,
    index: int,
    side: Side,
    outputs: list[Tensor],
    grads: list[Tensor],
    keep: bool,
    around: AbstractContextManager[None],
) -> None:
    """One replica's backward, in which it meets the others where it did in its forward."""
    failure: BaseException | None = None
    try:
        room.enter(index)
        with attend(None if side.seat is None else side.seat.again(room)):
            _backward([side], outputs, grads, keep, around)
    except BaseException as error:
        failure = error
        raise
    finally:
        room.leave(index, failure)
        failure = None  # its traceback holds this frame


def _tokens(side: Side) -> list[Tensor]:
    return [] if side.seat is None else side.seat.tokens


def _add_chunk(columns: Sequence[Gradients], start: int, stop: int) -> Gradients:
    with torch.no_grad():
        return add_up([column[start:stop] for column in columns], free_to_use(columns[0][start:stop]))


def _chunks(column: Gradients, count: int) -> list[tuple[int, int]]:
    """Runs of gradients of about equal bytes, one for each thread; none where there is too little to share out."""
    sizes = [0 if g is None else g.numel() * g.element_size() for g in column]
    total = sum(sizes)
    if total < _SPREAD_BYTES * count:
        return []
    bounds, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled + size / 2 >= total * len(bounds) / count and len(bounds) < count:
            bounds.append(index)
        filled += size
    return list(pairwise([*bounds, len(column)]))
