"""Which meetings of replicas a backward comes to, read off its graph (see `meeting`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Reach(NamedTuple):
    """The crossings that a backward of one replica comes to next, by their numbers."""

    first: set[int]
    """From the outputs that it starts at."""
    below: list[set[int]]
    """From each crossing."""


def reach(tokens: Sequence[Tensor], roots: Sequence[Tensor]) -> Reach:
    """Which crossings a backward from these roots comes to next, and from each crossing, told by its token."""
    numbers = {token.grad_fn: number for number, token in enumerate(tokens)}
    below = [_next([node for node, _ in token.grad_fn.next_functions], numbers) for token in tokens if token.grad_fn]
    return Reach(_next([root.grad_fn for root in roots], numbers), below)


def needed_tokens(reaches: Sequence[Reach]) -> list[int]:
    """The crossings that a backward comes to on any replica; on every other it has to start there too."""
    needed: set[int] = set()
    pending = set().union(*(one.first for one in reaches))
    while pending:
        needed |= pending
        pending = set().union(*(one.below[number] for one in reaches for number in pending)) - needed
    return sorted(needed)


def _next(nodes: list[Any], numbers: dict[Any, int]) -> set[int]:
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
