"""Walking autograd graphs: reachable leaves, custom functions, and the collectives that a backward reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.replicas.user_hooks import KNOWN_LIBRARIES
from instep.runtime.torch_private import custom_function


def reachable_leaves(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of the leaves that a graph leads to."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return found


class ReachedCollectives(NamedTuple):
    """The crossings that a backward of one replica comes to next, by their numbers."""

    from_outputs: set[int]
    """From the outputs that it starts at."""
    from_collectives: list[set[int]]
    """From each crossing."""


def find_reached_collectives(tokens: Sequence[Tensor], roots: Sequence[Tensor]) -> ReachedCollectives:
    """Which crossings a backward from these roots comes to next, and from each crossing, told by its token."""
    numbers = {token.grad_fn: number for number, token in enumerate(tokens)}
    below = [
        _next_collectives([node for node, _ in token.grad_fn.next_functions], numbers)
        for token in tokens
        if token.grad_fn
    ]
    return ReachedCollectives(_next_collectives([root.grad_fn for root in roots], numbers), below)


def required_collectives(reaches: Sequence[ReachedCollectives]) -> list[int]:
    """The crossings that a backward comes to on any replica; on every other it has to start there too."""
    needed: set[int] = set()
    pending = set().union(*(one.from_outputs for one in reaches))
    while pending:
        needed |= pending
        pending = set().union(*(one.from_collectives[number] for one in reaches for number in pending)) - needed
    return sorted(needed)


def _next_collectives(nodes: list[Any], numbers: dict[Any, int]) -> set[int]:
    """Walk a graph down from some nodes, up to crossings: the numbers of these."""
    found: set[int] = set()
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in numbers:
            found.add(numbers[node])
        else:
            nodes.extend(below for below, _ in node.next_functions)
    return found


def find_custom_functions(tensors: Iterable[Tensor]) -> list[str]:
    """The names of the functions with a backward of the user's own that tensors were made by."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(pending), {}
    while pending:
        node = pending.pop()
        made = custom_function(node)
        if made is not None and (made.__module__ or "").partition(".")[0] not in KNOWN_LIBRARIES:
            found[made.__qualname__] = True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return list(found)
