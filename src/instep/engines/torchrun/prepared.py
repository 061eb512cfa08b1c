"""Prepared runs of the `torchrun` engine: calls like an earlier one, without what does not change between them.

Messages between ranks are those of the general path: ranks with and without a prepared run can take part in one call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextvars import Context
from dataclasses import replace
from typing import Any, Protocol

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

    def may_run_prepared(self, call: ReplicaCall) -> bool:
        """Whether such a call is expected to call no collectives, and no call has written to an argument."""
        ...

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
        # Without what would keep objects of this call alive.
        self._template = replace(call, arguments=[], ambient=replace(call.ambient, context_vars=Context()))
        self.is_valid = True
        """False after a call that did not fit."""

    @classmethod
    def create(
        cls, engine: PreparedEngine, call: ReplicaCall, own: ReplicaResult, results: Sequence[ReplicaResult]
    ) -> PreparedRankRun | None:
        """A prepared run for calls like this one; None if a replica has changed something or called a collective."""
        if not call.has_plain_arguments or any(call.rng.generator_pairs):
            return None
        if any(result.written_state or result.statistics or result.changes for result in results):
            return None
        if not isinstance(own.context, ReplicaContext) or own.context.exchange_count:
            return None
        own_leaves = {id(leaf) for _, leaf in call.replicas[own.context.info.index].trainable}
        nodes = walk_graph(tensor.grad_fn for tensor in tensors_in(own.output))
        return cls(engine, call, captures=not any(_needs_accumulation(node, own_leaves) for node in nodes))

    def can_run(self) -> bool:
        """Whether a call can be run now."""
        return self._engine.may_run_prepared(self._template)

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


def _needs_accumulation(node: Any, leaves: Collection[int]) -> bool:
    """Whether a backward through this node does more than to compute gradients of the replica's leaves."""
    variable = getattr(node, "variable", None)
    return custom_function(node) is not None or (variable is not None and id(variable) not in leaves)
