"""Prepared runs of the `torchrun` engine: calls like an earlier one, without what does not change between them.

Messages between ranks are those of the general path. Each says whether its rank runs the call as it was prepared: if
only some ranks do, all of them run it again on the general path, which alone may choose another way for the next try.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from instep.autograd.bridge import CallGraph, Gradients
from instep.autograd.graph_walk import walk_graph
from instep.collectives.group import ReplicaContext
from instep.engines.base import Arguments, ReplicaCall
from instep.replicas.replica import ReplicaResult
from instep.runtime.rng import ReplicaRng
from instep.runtime.torch_private import custom_function
from instep.structure.tree import tensors_in


class PreparedEngine(Protocol):
    """What a prepared run asks of its engine."""

    def forward(self, call: ReplicaCall, *, prepared: bool = False) -> list[ReplicaResult]:
        """Run the forward of this rank's replica, and get the results of all."""
        ...

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool, *, captures: bool = False
    ) -> tuple[Gradients, list[Gradients]]:
        """Run the backward of this rank's replica, and sum the gradients of all."""
        ...


class PreparedRankRun:
    """Runs calls like the one that it is created for. Also their backward, as the engine of their graphs."""

    def __init__(self, engine: PreparedEngine, call: ReplicaCall, *, captures: bool) -> None:
        """`captures` is whether backward may capture gradients instead of accumulating them."""
        self._engine, self._captures = engine, captures
        self._template = replace(call, arguments=[])
        self.is_valid = True
        """Whether no call has turned out to be different since."""

    def can_run(self) -> bool:
        """Nothing outside of the call can prevent it."""
        return True

    def forward(self, rows: Sequence[Arguments], rng: ReplicaRng) -> list[ReplicaResult]:
        """Run a forward with these arguments of each replica.

        Raises `LostExchange` if it cannot be run so: the general path has to run it.
        """
        return self._engine.forward(replace(self._template, arguments=rows, rng=rng), prepared=True)

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward (see `autograd.bridge.BackwardEngine`)."""
        return self._engine.backward(graph, gradients, retain_graph, captures=self._captures)


def prepare_run(
    engine: PreparedEngine, call: ReplicaCall, own: ReplicaResult, results: Sequence[ReplicaResult]
) -> PreparedRankRun | None:
    """A prepared run for a call in which no replica has changed anything or called a collective."""
    if not call.has_plain_arguments or any(call.rng.generator_pairs):
        return None
    if any(result.written_state or result.statistics or result.changes for result in results):
        return None
    if not isinstance(own.context, ReplicaContext) or own.context.exchange_count:
        return None
    nodes = walk_graph(tensor.grad_fn for tensor in tensors_in(own.output))
    has_functions = any(custom_function(node) is not None for node in nodes)
    return PreparedRankRun(engine, call, captures=not has_functions)
