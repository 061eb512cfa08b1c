"""Base of engines whose replicas run concurrently, each with its own autograd graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar

import torch
from torch import Tensor

from instep.autograd.bridge import CallGraph, Gradients, ReplicaGraph, outputs_with_gradients, take_gradients
from instep.autograd.graph_walk import ReachedCollectives, find_reached_collectives, required_collectives
from instep.collectives.buckets import gather_gradients, reusable_gradients, sum_gradients
from instep.collectives.group import Group, ReplicaContext, use_context
from instep.collectives.sync_batchnorm import replace_batch_norm
from instep.engines.base import Engine, ReplicaCall, add_replica_note, raise_first_error, run_forward
from instep.engines.rendezvous import LEFT_BACKWARD, LEFT_FORWARD, Rendezvous, run_serialized
from instep.engines.thread_pool import ReplicaThreads, is_replica_thread
from instep.replicas.replica import ReplicaResult
from instep.replicas.tensors import has_gradients
from instep.runtime.allocator import retain_freed_memory
from instep.runtime.ambient import AutocastState
from instep.runtime.locks import ForkSafeLock, run_uninterrupted
from instep.runtime.torch_private import capture_gradients, run_backward, will_accumulate_grad

GroupT = TypeVar("GroupT", bound=Rendezvous)

_PARALLEL_SUM_BYTES = 2**22
"""Gradient bytes per thread below which summing in several threads does not pay."""

_INTERRUPT_GRACE_SECONDS = 0.05
"""Seconds that an interrupted call waits for its replicas to finish."""


@dataclass(slots=True)
class BackwardTask(Generic[GroupT]):
    """One replica's task of a backward."""

    group: GroupT
    index: int
    graph: CallGraph
    replica: ReplicaGraph
    outputs: list[Tensor]
    """The outputs for which a gradient arrived."""
    gradients: list[Tensor]
    retain_graph: bool
    collectives: list[int]
    """The numbers of forward's collectives that the backward reaches."""
    autocast: AutocastState
    """Autocast of the thread that called backward."""


class ConcurrentEngine(Engine, Generic[GroupT]):
    """Runs each replica from its own thread of this process, with its own autograd graph.

    On the CPU, and for replicas in other processes, each thread runs its replica's backward too. Otherwise one backward
    call runs all graphs, and autograd's device threads work concurrently.
    """

    group_class: type[GroupT]

    def __init__(self, devices: Sequence[torch.device], *, timeout: float = inf) -> None:
        self._devices = list(devices)
        self.timeout = timeout
        """Seconds that a collective waits for a replica that makes no progress."""
        self._on_cpu = all(device.type == "cpu" for device in devices)
        if self._on_cpu:
            retain_freed_memory()
        self._threads: ReplicaThreads | None = None
        self._lock = ForkSafeLock()
        self._in_no_sync = False
        self._deferred: dict[int, tuple[list[Tensor], list[Gradients]]] = {}
        """Gradients that `no_sync` defers, for each list of sources: one list of gradients for each replica."""

    @property
    def threads(self) -> ReplicaThreads:
        threads = self._threads
        if threads is None:
            with self._lock:
                if self._threads is None:
                    self._threads = ReplicaThreads(self._devices)
                    weakref.finalize(self, self._threads.release_async)
                threads = self._threads
        return threads

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]:
        group = self.forward_group(call)
        return self.forward_in_threads(call, group, partial(run_forward, call, group=group))

    def forward_group(self, call: ReplicaCall) -> GroupT:
        """The group of the replicas in a forward."""
        return self.group_class(
            call.replica_names,
            LEFT_FORWARD,
            joint_graph=not self._on_cpu and not self.out_of_process,
            serialized=call.rng.serialized,
            suspend=call.rng.suspend,
            timeout=self.timeout,
        )

    def backward_group(self, graph: CallGraph, *, serialized: bool) -> GroupT:
        """The group of the replicas in a backward."""
        return self.group_class(
            [replica.name for replica in graph.replicas],
            LEFT_BACKWARD,
            serialized=serialized,
            suspend=graph.rng.suspend,
            timeout=self.timeout,
        )

    def forward_in_threads(
        self, call: ReplicaCall, group: GroupT, run: Callable[[int], ReplicaResult]
    ) -> list[ReplicaResult]:
        """Run each replica's forward, given its index, in its thread."""
        tasks = [partial(run, index) for index in range(len(call.replicas))]
        try:
            results = self.threads.run(
                tasks, on_interrupt=group.abort, grace=_INTERRUPT_GRACE_SECONDS, poll=group.check_timeout
            )
            group.close()
        except BaseException:
            run_uninterrupted(group.abort, group.close)
            raise
        raise_first_error(call.replicas, results)
        return results

    def wait_idle(self) -> None:
        if self._threads is not None and not is_replica_thread():
            self._threads.wait_idle()

    def add_idle_callback(self, callback: Callable[[], object]) -> None:
        if self._threads is not None:
            self._threads.add_idle_callback(callback)

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            try:
                self._run_backward(graph, gradients, retain_graph)
                inputs = [take_gradients(replica.inputs) for replica in graph.replicas]
                columns = [replica.collect_gradients() for replica in graph.replicas]
                if not self._on_cpu:
                    columns = [gather_gradients(column, self._devices[0]) for column in columns]
                if self._in_no_sync and all(will_accumulate_grad(source) for source in graph.sources):
                    self._defer(graph.sources, columns)
                    return [None] * len(graph.sources), inputs
                return self._reduce_gradients(columns), inputs
            except BaseException:
                run_uninterrupted(
                    *(
                        do
                        for replica in graph.replicas
                        for do in (replica.collect_gradients, partial(take_gradients, replica.inputs))
                    )
                )
                raise

    def _run_backward(self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool) -> None:
        pairs = [
            outputs_with_gradients(replica, grads) for replica, grads in zip(graph.replicas, gradients, strict=True)
        ]
        graph.rng.refresh()
        if self._on_cpu or self.out_of_process:  # autograd runs a CPU graph in the calling thread
            needed = self._add_tokens(graph, pairs, retain_graph)
            nested = is_replica_thread()  # the replica threads may be waiting for this one
            group = self.backward_group(graph, serialized=graph.rng.serialized or nested)
            autocast = AutocastState.capture()
            tasks = [
                BackwardTask(group, i, graph, graph.replicas[i], *pair, retain_graph, needed, autocast)
                for i, pair in enumerate(pairs)
            ]
            if nested:
                run_serialized(
                    [partial(self.backward_replica, task) for task in tasks], group, should_stop=lambda _: False
                )
            else:
                self.backward_replicas(tasks, group)
        else:  # autograd's device threads run the graphs concurrently
            outputs = [output for outs, _ in pairs for output in outs]
            output_gradients = [grad for _, grads in pairs for grad in grads]
            _backward_graphs(
                graph.replicas, outputs, output_gradients, retain_graph, graph.rng.joint_backward_context()
            )
        graph.rng.advance()

    def _add_tokens(
        self, graph: CallGraph, pairs: Sequence[tuple[list[Tensor], list[Tensor]]], retain_graph: bool
    ) -> list[int]:
        """Add the tokens of collectives that any replica's backward reaches; returns their numbers."""
        rows = [replica.tokens for replica in graph.replicas]
        if not any(rows) or not any(outputs for outputs, _ in pairs):
            return []
        if all(
            len(outputs) == len(replica.outputs) for replica, (outputs, _) in zip(graph.replicas, pairs, strict=True)
        ):
            needed = list(range(len(rows[0])))
        else:
            needed = required_collectives(
                [self.reached_collectives(graph, index, outputs) for index, (outputs, _) in enumerate(pairs)]
            )
        for replica, (outputs, grads) in zip(graph.replicas, pairs, strict=True):
            if replica.remote is not None:
                continue
            replica.add_tokens(needed, outputs, grads)
            if not retain_graph:
                replica.drop_tokens(needed)
        return needed

    def reached_collectives(self, graph: CallGraph, index: int, outputs: Sequence[Tensor]) -> ReachedCollectives:
        """The collectives that one replica's backward from these outputs reaches."""
        return find_reached_collectives(graph.replicas[index].tokens, outputs)

    def backward_replicas(self, tasks: Sequence[BackwardTask[GroupT]], group: GroupT) -> None:
        """Run every replica's backward, each in its thread."""
        self.threads.run(
            [partial(self.backward_replica, task) for task in tasks],
            on_interrupt=group.abort,
            first_inline=not self._on_cpu,
        )

    def backward_replica(self, task: BackwardTask[GroupT]) -> None:
        """Run one replica's backward, in its thread; gradients accumulate in its leaves and inputs."""
        rng = task.graph.rng
        rng_context = rng.backward_context(task.index) if self._on_cpu else rng.joint_backward_context(task.index)
        with task.autocast.enter():
            backward_in_group(
                task.group, task.index, task.replica, task.outputs, task.gradients, task.retain_graph, rng_context
            )

    def _reduce_gradients(self, columns: Sequence[Gradients]) -> Gradients:
        """Reduce the gradients of a backward to the source's device."""
        return self._sum_gradients(columns)

    def _sum_gradients(self, columns: Sequence[Gradients], into: Collection[int] | None = None) -> Gradients:
        """Sum gradients over replicas on the source's device; large sums use the replica threads.

        `into` are the indices of the first replica's gradients that may be overwritten, if existing.
        """
        chunks = _balanced_chunks(columns[0], len(columns)) if self._on_cpu else []
        if len(chunks) < 2:
            return sum_gradients(columns, reusable_gradients(columns[0]) if into is None else into)
        tasks = self.threads.run([partial(_sum_chunk, columns, *chunk) for chunk in chunks])
        return [gradient for task in tasks for gradient in task]

    def _sum_deferred(self, sources: Sequence[Tensor], columns: Sequence[Gradients]) -> Gradients:  # noqa: ARG002
        """Reduce the gradients of `sources` that `no_sync` has deferred."""
        return self._sum_gradients(columns)

    def _defer(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        key = id(sources[0]) if sources else 0
        existing = self._deferred.get(key)
        if existing is None or len(existing[0]) != len(sources):
            self._release_deferred(existing)
            self._deferred[key] = (sources, columns)
            return
        pairs = [existing[1][i : i + 1] + columns[i : i + 1] for i in range(max(len(existing[1]), len(columns)))]
        self._deferred[key] = (sources, [sum_gradients(pair) for pair in pairs])

    @property
    def in_no_sync(self) -> bool:
        """Whether gradients are not reduced now."""
        return self._in_no_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer the reduction of gradients until the context exits."""
        outer, self._in_no_sync = self._in_no_sync, True
        try:
            yield
        finally:
            self._in_no_sync = outer
            if not outer:
                with self._lock:
                    deferred, self._deferred = self._deferred, {}
                    for entry in deferred.values():
                        self._release_deferred(entry)

    def _release_deferred(self, deferred: tuple[list[Tensor], list[Gradients]] | None) -> None:
        """Sum deferred gradients and accumulate them into the sources through autograd."""
        if deferred is not None:
            sums = self._sum_deferred(*deferred)
            pairs = [
                (source, gradient)
                for source, gradient in zip(deferred[0], sums, strict=True)
                if gradient is not None and source.requires_grad  # it may have been frozen meanwhile
            ]
            if pairs:
                torch.autograd.backward([source for source, _ in pairs], [gradient for _, gradient in pairs])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _backward_graphs(
    replicas: Sequence[ReplicaGraph],
    outputs: list[Tensor],
    grads: list[Tensor],
    retain_graph: bool,
    rng_context: AbstractContextManager[None],
    capture: Sequence[Tensor] | None = None,
) -> Gradients | None:
    """Run a backward of replicas' graphs. Only meanwhile may gradients accumulate in the replicas' leaves.

    With `capture`, the gradients of these leaves are returned instead, if torch can do that.
    """
    if not outputs:
        return None
    with rng_context:
        try:
            for replica in replicas:
                replica.guard.set(True)
            if capture is not None:
                captured = capture_gradients(outputs, grads, capture, retain_graph)
                if captured is not None:
                    return _add_accumulated(captured, capture)
            run_backward(outputs, grads, retain_graph)
            return None
        except BaseException as error:
            if len(replicas) == 1:
                add_replica_note(replicas[0].name, error)
            raise
        finally:
            for replica in replicas:
                replica.guard.set(False)


def _add_accumulated(captured: Gradients, leaves: Sequence[Tensor]) -> Gradients:
    """Add what a backward inside a backward has accumulated in the leaves to their captured gradients."""
    if not has_gradients(leaves):
        return captured
    return sum_gradients([captured, take_gradients(leaves)])


def backward_in_group(
    group: Group,
    index: int,
    replica: ReplicaGraph,
    outputs: list[Tensor],
    grads: list[Tensor],
    retain_graph: bool,
    rng_context: AbstractContextManager[None],
    capture: Sequence[Tensor] | None = None,
) -> Gradients | None:
    """Run one replica's backward in a group, with the collectives of its forward. See `_backward_graphs`."""
    failure: BaseException | None = None
    try:
        group.enter(index)
        context = replica.context.with_group(group) if isinstance(replica.context, ReplicaContext) else None
        with use_context(context), replace_batch_norm(context):  # a checkpointed region runs again
            return _backward_graphs([replica], outputs, grads, retain_graph, rng_context, capture)
    except BaseException as error:
        failure = error
        raise
    finally:
        group.leave(index, failure)
        failure = None  # breaks the cycle with this frame


def _sum_chunk(columns: Sequence[Gradients], start: int, stop: int) -> Gradients:
    with torch.no_grad():
        return sum_gradients([column[start:stop] for column in columns], reusable_gradients(columns[0][start:stop]))


def _balanced_chunks(column: Gradients, count: int) -> list[tuple[int, int]]:
    """Index ranges of about equal bytes, one for each thread; empty if there is too little to split."""
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
