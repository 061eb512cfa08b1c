"""Walking autograd graphs: reachable leaves, custom functions, and the collectives that a backward reaches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.replicas.user_hooks import KNOWN_LIBRARIES
from instep.runtime.torch_private import custom_function


def walk_graph(nodes: Iterable[Any], stop_at: Collection[Any] = ()) -> Iterator[Any]:
    """Yield every autograd node that a backward from `nodes` reaches, once; does not go beyond nodes in `stop_at`."""
    pending = [node for node in nodes if node is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        if node in stop_at:
            continue
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                pending.append(next_node)


def reachable_leaves(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of the leaves that a backward from `tensors` reaches."""
    leaves = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    for node in walk_graph(tensor.grad_fn for tensor in tensors):
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
    return leaves


def find_custom_functions(tensors: Iterable[Tensor]) -> list[str]:
    """The names of the user's `torch.autograd.Function` classes in the graph of `tensors`."""
    names: dict[str, None] = {}
    for node in walk_graph(tensor.grad_fn for tensor in tensors):
        function = custom_function(node)
        if function is not None and (function.__module__ or "").partition(".")[0] not in KNOWN_LIBRARIES:
            names[function.__qualname__] = None
    return list(names)


class ReachedCollectives(NamedTuple):
    """The collectives that one replica's backward reaches next. Collectives are numbered in the order of forward."""

    from_outputs: set[int]
    """From the outputs at which the backward starts."""
    from_collectives: list[set[int]]
    """From each collective."""


def find_reached_collectives(tokens: Sequence[Tensor], roots: Sequence[Tensor]) -> ReachedCollectives:
    """The collectives, one for each token, that a backward from `roots` and from each collective reaches next."""
    numbers = {token.grad_fn: number for number, token in enumerate(tokens)}

    def reached(nodes: Iterable[Any]) -> set[int]:
        return {numbers[node] for node in walk_graph(nodes, stop_at=numbers) if node in numbers}

    following = [reached(node for node, _ in token.grad_fn.next_functions) for token in tokens if token.grad_fn]
    return ReachedCollectives(reached(root.grad_fn for root in roots), following)


def required_collectives(replicas: Sequence[ReachedCollectives]) -> list[int]:
    """The collectives that a backward reaches on any replica. Every replica's backward has to take part in them."""
    required: set[int] = set()
    pending = set().union(*(replica.from_outputs for replica in replicas))
    while pending:
        required |= pending
        pending = set().union(*(replica.from_collectives[i] for replica in replicas for i in pending)) - required
    return sorted(required)
