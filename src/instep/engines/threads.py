"""One persistent thread for each replica, in this process: any object, no pickling, notebooks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from instep.bridge import Gradients, Side, Span, collect, live, take
from instep.engines.pool import Lease
from instep.engines.protocol import Job, perform, raise_first
from instep.reduce import add_up, gather
from instep.replicas.replica import Outcome
from instep.replicas.tensors import Guard

_SPREAD_BYTES = 2**18


class ThreadsEngine:
    """Runs replicas at the same time; on the CPU their backward too."""

    name = "threads"
    joint = False

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._on_host = all(device.type == "cpu" for device in devices)
        self._lease: Lease | None = None
        self._lock = threading.RLock()
        self.holding = False
        """Whether gradients stay on the replicas for now (`no_sync`)."""
        self._held: dict[int, Span] = {}

    @property
    def lease(self) -> Lease:
        with self._lock:
            if self._lease is None:
                self._lease = Lease(self._devices)
                weakref.finalize(self, self._lease.close)
            return self._lease

    def forward(self, job: Job) -> list[Outcome]:
        outcomes: list[Outcome] = self.lease.run([partial(perform, job, index) for index in range(len(job.replicas))])
        raise_first(job.replicas, outcomes)
        return outcomes

    def backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            pairs = [live(side, grads) for side, grads in zip(span.sides, gradients, strict=True)]
            error = self._on_threads(span, pairs, keep) if self._on_host else self._at_once(span, pairs, keep)
            inputs = [take(side.inputs) for side in span.sides]
            if error is not None:
                for side in span.sides:
                    take(side.leaves)
                raise error
            if self.holding:
                self._hold(span)
                return [None] * len(span.sources), inputs
            return self._reduce(span), inputs

    def _on_threads(self, span: Span, pairs: Sequence[Any], keep: bool) -> BaseException | None:
        """Each replica's backward in its own thread: autograd runs a CPU graph in the thread that asks for it."""
        tasks = [
            partial(_attempt, side, outputs, grads, keep)
            for side, (outputs, grads) in zip(span.sides, pairs, strict=True)
        ]
        errors = self.lease.run(tasks)
        return next((error for error in errors if error is not None), None)

    def _at_once(self, span: Span, pairs: Sequence[Any], keep: bool) -> BaseException | None:
        """All replicas in one backward call: autograd's own device threads run them at the same time."""
        outputs = [output for outs, _ in pairs for output in outs]
        grads = [grad for _, gs in pairs for grad in gs]
        guards = [side.guard for side in span.sides]
        return _attempt(_Together(guards), outputs, grads, keep)

    def _reduce(self, span: Span) -> Gradients:
        """The sum over replicas on the source's device; large sums are spread over the replica threads."""
        home = self._devices[0]
        columns = [gather(take(side.leaves), home) for side in span.sides]
        chunks = _chunks(columns[0], len(columns)) if home.type == "cpu" and self._on_host else []
        if len(chunks) < 2:
            return add_up(columns)
        tasks: list[Callable[[], Gradients]] = [partial(_add_chunk, columns, start, stop) for start, stop in chunks]
        return [gradient for part in self.lease.run(tasks) for gradient in part]

    def _hold(self, span: Span) -> None:
        """Remember where gradients wait, but nothing of the call's graph."""
        if span.sources:
            sides = [Side(side.leaves, [], [], side.guard) for side in span.sides]
            key = id(span.sides[0].leaves[0])  # the same leaves in every call of the same replicas
            self._held.setdefault(key, Span(self, sides, span.sources))
            if len(self._held[key].sides) < len(sides):
                self._held[key] = Span(self, sides, span.sources)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Leave gradients on the replicas while inside, and bring them home on the way out."""
        outer, self.holding = self.holding, True
        try:
            yield
        finally:
            self.holding = outer
            if not outer:
                self._release()

    def _release(self) -> None:
        """Bring home what was held back; gradients reach the source as a backward would bring them."""
        with self._lock:
            held, self._held = self._held, {}
            for span in held.values():
                totals = self._reduce(span)
                pairs = [(s, g) for s, g in zip(span.sources, totals, strict=True) if g is not None]
                if pairs:
                    torch.autograd.backward([s for s, _ in pairs], [g for _, g in pairs])

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None


class _Together:
    """Several replicas' guards, opened as one."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = guards

    @property
    def guard(self) -> _Together:
        return self

    def set(self, state: bool) -> None:
        for guard in self._guards:
            guard.set(state)


def _attempt(side: Any, outputs: list[Tensor], grads: list[Tensor], keep: bool) -> BaseException | None:
    side.guard.set(True)
    try:
        collect(outputs, grads, keep)
    except BaseException as error:
        return error
    finally:
        side.guard.set(False)
    return None


def _add_chunk(columns: Sequence[Gradients], start: int, stop: int) -> Gradients:
    with torch.no_grad():
        return add_up([column[start:stop] for column in columns])


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
    bounds.append(len(column))
    return list(pairwise(bounds))
