"""Shard sizes: balanced, proportional to shares, or balanced by cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def balanced_sizes(batch: int, replicas: int, min_shard: int = 1, shares: Sequence[float] = ()) -> tuple[int, ...]:
    """Sizes that sum to `batch` and use fewer replicas rather than less than `min_shard`.

    They differ by at most one, or follow `shares` as closely as whole samples can.

    >>> balanced_sizes(10, 4)
    (3, 3, 2, 2)
    >>> balanced_sizes(3, 4)
    (1, 1, 1)
    >>> balanced_sizes(7, 4, min_shard=3)
    (4, 3)
    >>> balanced_sizes(10, 2, shares=(3, 1))
    (8, 2)
    """
    least = max(1, min_shard)
    active = max(1, min(replicas, batch // least))
    if not shares:
        base, extra = divmod(batch, active)
        return tuple(base + (index < extra) for index in range(active))
    return _sizes_near_ends([1.0] * batch, _shard_ends(shares[:active], float(batch)), least)


def sizes_by_cost(
    costs: Sequence[float], parts: int, min_shard: int = 1, shares: Sequence[float] = ()
) -> tuple[int, ...]:
    """Sizes of `parts` runs of samples whose costs add up to about the same, or to about their shares.

    >>> sizes_by_cost([8, 1, 1, 1, 1, 4], 2)
    (1, 5)
    """
    numbers = [max(0.0, float(cost)) for cost in costs]
    total = sum(numbers)
    if not total > 0:
        numbers, total = [1.0] * len(numbers), float(len(numbers))
    return _sizes_near_ends(numbers, _shard_ends(shares[:parts] or [1.0] * parts, total), max(1, min_shard))


def _shard_ends(shares: Sequence[float], total: float) -> list[float]:
    """Where each part should end, on the scale of what is added up."""
    whole = sum(shares)
    return [total * reached / whole for reached in accumulate(shares)]


def _sizes_near_ends(amounts: Sequence[float], targets: Sequence[float], least: int) -> tuple[int, ...]:
    """Runs that end as near to the targets as they can, none shorter than `least`."""
    reached = [0.0, *accumulate(amounts)]
    count, parts, start = len(amounts), len(targets), 0
    sizes = []
    for index, target in enumerate(targets[:-1]):
        at = bisect_left(reached, target)
        if at > 0 and target - reached[at - 1] < reached[min(at, count)] - target:
            at -= 1
        stop = min(max(at, start + least), count - least * (parts - 1 - index))
        sizes.append(stop - start)
        start = stop
    return (*sizes, count - start)
