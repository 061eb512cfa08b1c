"""Base of engines whose replicas run concurrently, each with its own autograd graph."""

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

from instep.autograd.bridge import CallGraph, Gradients, ReplicaGraph, outputs_with_gradients, take_gradients
from instep.autograd.graph_walk import ReachedCollectives, find_reached_collectives, required_collectives
from instep.collectives.buckets import gather_gradients, reusable_gradients, sum_gradients
from instep.collectives.group import use_context
from instep.engines.base import ReplicaCall, add_replica_note, raise_first_error, run_forward
from instep.engines.rendezvous import LEFT_BACKWARD, LEFT_FORWARD, Rendezvous, run_serialized
from instep.engines.thread_pool import ReplicaThreads, is_replica_thread
from instep.replicas.replica import Replica, ReplicaResult
from instep.runtime.allocator import retain_freed_memory
from instep.runtime.ambient import AutocastState
from instep.runtime.locks import ForkSafeLock, run_uninterrupted
from instep.runtime.torch_private import run_backward, will_accumulate_grad

_PARALLEL_SUM_BYTES = 2**22
"""Of gradients for each thread: below that, their sum is there before the threads have woken up."""

_INTERRUPT_GRACE_SECONDS = 0.05
"""Seconds that an interrupted call waits for its replicas to end."""


@dataclass(frozen=True)
class BackwardTask:
    """One replica's part of a backward."""

    group: Rendezvous
    index: int
    graph: CallGraph
    outputs: list[Tensor]
    """The outputs that a gradient has arrived for."""
    gradients: list[Tensor]
    retain_graph: bool
    """Whether the graph is kept."""
    collectives: list[int]
    """Where replicas met in the forward and meet again."""
    autocast: AutocastState
    """Autocast around whoever asked for it."""


class ConcurrentEngine:
    """One thread of this process for each replica, that runs it or waits for it; on the CPU their backward too."""

    name = ""
    joint_graph = False
    serialized = out_of_process = False

    def __init__(self, devices: Sequence[torch.device], *, timeout: float = inf) -> None:
        self._devices = list(devices)
        self.timeout = timeout
        """Seconds that replicas which meet wait for one that does not move."""
        self._on_cpu = all(device.type == "cpu" for device in devices)
        if self._on_cpu:
            retain_freed_memory()
        self._threads: ReplicaThreads | None = None
        self._lock = ForkSafeLock()
        self._in_no_sync = False
        self._deferred: dict[int, tuple[list[Tensor], list[Gradients]]] = {}
        """Gradients that `no_sync` holds back: by the sources they belong to, one column for each replica."""

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> ConcurrentEngine:  # noqa: ARG003
        return cls(devices, timeout=timeout)

    @classmethod
    def shutdown(cls) -> None:
        """Only threads are shared, which `engines.select.shutdown` stops."""

    @property
    def threads(self) -> ReplicaThreads:
        with self._lock:
            if self._threads is None:
                self._threads = ReplicaThreads(self._devices)
                weakref.finalize(self, self._threads.release_async)
            return self._threads

    def replica_classes(self) -> Sequence[type[Replica]]:
        return ()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replicas of this process reach them wherever they are."""

    def describe_transport(self) -> str:
        return ""

    def forward(self, job: ReplicaCall) -> list[ReplicaResult]:
        names, streams = [replica.name for replica in job.replicas], job.rng
        joint = not self._on_cpu and not self.out_of_process
        job.group = self.make_group(
            names, LEFT_FORWARD, joint_graph=joint, serialized=streams.serialized, suspend=streams.suspend
        )
        tasks = [partial(self.run_forward, job, index) for index in range(len(job.replicas))]
        try:
            outcomes = self.threads.run(
                tasks, on_interrupt=job.group.abort, grace=_INTERRUPT_GRACE_SECONDS, poll=job.group.check_timeout
            )
            job.group.close()
        except BaseException:
            run_uninterrupted(job.group.abort, job.group.close)
            raise
        raise_first_error(job.replicas, outcomes)
        return outcomes

    def wait_idle(self) -> None:
        if self._threads is not None and not is_replica_thread():
            self._threads.wait_idle()

    def add_idle_callback(self, then: Callable[[], object]) -> None:
        if self._threads is not None:
            self._threads.add_idle_callback(then)

    def run_forward(self, job: ReplicaCall, index: int) -> ReplicaResult:
        """One replica's part of a forward, in its thread."""
        return run_forward(job, index)

    def backward(
        self, span: CallGraph, gradients: Sequence[Gradients], keep: bool
    ) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            try:
                self._run_backward(span, gradients, keep)
                inputs = [take_gradients(side.inputs) for side in span.replicas]
                columns = [side.collect_gradients() for side in span.replicas]
                if not self._on_cpu:
                    columns = [gather_gradients(column, self._devices[0]) for column in columns]
                if self._in_no_sync and all(will_accumulate_grad(source) for source in span.sources):
                    self._defer(span.sources, columns)
                    return [None] * len(span.sources), inputs
                return self._sum_gradients(columns), inputs
            except BaseException:
                run_uninterrupted(
                    *(
                        do
                        for side in span.replicas
                        for do in (side.collect_gradients, partial(take_gradients, side.inputs))
                    )
                )
                raise

    def _run_backward(self, span: CallGraph, gradients: Sequence[Gradients], keep: bool) -> None:
        pairs = [outputs_with_gradients(side, grads) for side, grads in zip(span.replicas, gradients, strict=True)]
        span.rng.refresh()
        if self._on_cpu or self.out_of_process:  # autograd runs a CPU graph in the thread that asks for it
            needed = self._add_tokens(span, pairs, keep)
            nested = is_replica_thread()  # the replicas' threads may be waiting for this one
            names, in_turn = [side.name for side in span.replicas], span.rng.serialized or nested
            room = self.make_group(names, LEFT_BACKWARD, serialized=in_turn, suspend=span.rng.suspend)
            casts = AutocastState.capture()
            parts = [BackwardTask(room, i, span, *pair, keep, needed, casts) for i, pair in enumerate(pairs)]
            if nested:
                run_serialized(
                    [partial(self.backward_replica, part) for part in parts], room, should_stop=lambda _: False
                )
            else:
                self.backward_replicas(parts, room)
        else:  # autograd's own device threads run the replicas at the same time
            outputs = [output for outs, _ in pairs for output in outs]
            arrived = [grad for _, grads in pairs for grad in grads]
            _backward_graphs(span.replicas, outputs, arrived, keep, span.rng.joint_backward_context())
        span.rng.advance()

    def _add_tokens(self, span: CallGraph, pairs: Sequence[tuple[list[Tensor], list[Tensor]]], keep: bool) -> list[int]:
        """Start each backward also at what any replica did together with the others; returns where that was."""
        rows = [_tokens(side) for side in span.replicas]
        if not any(rows) or not any(outputs for outputs, _ in pairs):
            return []
        if all(len(outputs) == len(side.outputs) for side, (outputs, _) in zip(span.replicas, pairs, strict=True)):
            needed = list(range(len(rows[0])))
        else:
            needed = required_collectives(
                [self.reached_collectives(span, index, outputs) for index, (outputs, _) in enumerate(pairs)]
            )
        for side, row, (outputs, grads) in zip(span.replicas, rows, pairs, strict=True):
            if side.remote_call is not None:
                continue
            outputs += [row[number] for number in needed]
            grads += [torch.zeros_like(row[number]) for number in needed]
            if not keep and side.context is not None:
                side.context.tokens = [token for number, token in enumerate(row) if number not in needed]
        return needed

    def reached_collectives(self, span: CallGraph, index: int, outputs: Sequence[Tensor]) -> ReachedCollectives:
        """Where one replica's backward from these outputs comes to meet the others."""
        return find_reached_collectives(_tokens(span.replicas[index]), outputs)

    def make_group(self, names: Sequence[str], exit_description: str, **options: Any) -> Rendezvous:
        """Where the replicas of a call, or of a backward, meet."""
        return Rendezvous(names, exit_description, timeout=self.timeout, **options)

    def backward_replicas(self, parts: Sequence[BackwardTask], room: Rendezvous) -> None:
        """Every replica's part of a backward, each in its thread."""
        self.threads.run(
            [partial(self.backward_replica, part) for part in parts],
            on_interrupt=room.abort,
            first_inline=not self._on_cpu,
        )

    def backward_replica(self, part: BackwardTask) -> None:
        """One replica's part of a backward, in its thread: gradients are left on its leaves and inputs."""
        side, streams = part.graph.replicas[part.index], part.graph.rng
        around = streams.backward_context(part.index) if self._on_cpu else streams.joint_backward_context(part.index)
        with part.autocast.enter():
            backward_in_group(part.group, part.index, side, part.outputs, part.gradients, part.retain_graph, around)

    def _sum_gradients(self, columns: Sequence[Gradients], into: Collection[int] | None = None) -> Gradients:
        """The sum over replicas on the source's device; a large one is spread over the replica threads.

        `into` are the places of the first ones that it can be made in, where that is known.
        """
        chunks = _balanced_chunks(columns[0], len(columns)) if self._on_cpu else []
        if len(chunks) < 2:
            return sum_gradients(columns, reusable_gradients(columns[0]) if into is None else into)
        parts = self.threads.run([partial(_sum_chunk, columns, *chunk) for chunk in chunks])
        return [gradient for part in parts for gradient in part]

    def _defer(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        key = id(sources[0]) if sources else 0
        known = self._deferred.get(key)
        if known is None or len(known[0]) != len(sources):
            self._release_deferred(known)
            self._deferred[key] = (sources, columns)
            return
        both = [known[1][i : i + 1] + columns[i : i + 1] for i in range(max(len(known[1]), len(columns)))]
        self._deferred[key] = (sources, [sum_gradients(pair) for pair in both])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on the replicas while inside, and bring them home on the way out."""
        outer, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = outer
            if not outer:
                with self._lock:
                    held, self._deferred = self._deferred, {}
                    for entry in held.values():
                        self._release_deferred(entry)

    def _release_deferred(self, held: tuple[list[Tensor], list[Gradients]] | None) -> None:
        """Bring home what was held back; gradients reach the source as a backward would bring them."""
        if held is not None:
            pairs = [(s, g) for s, g in zip(held[0], self._sum_gradients(held[1]), strict=True) if g is not None]
            if pairs:
                torch.autograd.backward([source for source, _ in pairs], [gradient for _, gradient in pairs])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _backward_graphs(
    sides: Sequence[ReplicaGraph],
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
                add_replica_note(sides[0].name, error)
            raise
        finally:
            for side in sides:
                side.guard.set(False)


def backward_in_group(
    room: Any,
    index: int,
    side: ReplicaGraph,
    outputs: list[Tensor],
    grads: list[Tensor],
    keep: bool,
    around: AbstractContextManager[None],
) -> None:
    """One replica's backward, in which it meets the others where it did in its forward."""
    failure: BaseException | None = None
    try:
        room.enter(index)
        with use_context(None if side.context is None else side.context.with_group(room)):
            _backward_graphs([side], outputs, grads, keep, around)
    except BaseException as error:
        failure = error
        raise
    finally:
        room.leave(index, failure)
        failure = None  # its traceback holds this frame


def _tokens(side: ReplicaGraph) -> list[Tensor]:
    return [] if side.context is None else side.context.tokens


def _sum_chunk(columns: Sequence[Gradients], start: int, stop: int) -> Gradients:
    with torch.no_grad():
        return sum_gradients([column[start:stop] for column in columns], reusable_gradients(columns[0][start:stop]))


def _balanced_chunks(column: Gradients, count: int) -> list[tuple[int, int]]:
    """Runs of gradients of about equal bytes, one for each thread; none where there is too little to share out."""
    sizes = [0 if g is None else g.numel() * g.element_size() for g in column]
    total = sum(sizes)
    if total < _PARALLEL_SUM_BYTES * count:
        return []
    bounds, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled + size / 2 >= total * len(bounds) / count and len(bounds) < count:
            bounds.append(index)
        filled += size
    return list(pairwise([*bounds, len(column)]))
