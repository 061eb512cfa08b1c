"""Shard sizes: balanced, proportional to shares, or balanced by cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def balanced_sizes(batch: int, replicas: int, min_shard: int = 1, shares: Sequence[float] = ()) -> tuple[int, ...]:
    """Shard sizes that sum to `batch`. Uses fewer replicas if shards would be smaller than `min_shard`.

    The sizes differ by at most one, or are proportional to `shares` up to rounding.

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
    """Sizes of `parts` consecutive shards with similar total costs, or with costs proportional to `shares`.

    >>> sizes_by_cost([8, 1, 1, 1, 1, 4], 2)
    (1, 5)
    """
    numbers = [max(0.0, float(cost)) for cost in costs]
    total = sum(numbers)
    if not total > 0:
        numbers, total = [1.0] * len(numbers), float(len(numbers))
    return _sizes_near_ends(numbers, _shard_ends(shares[:parts] or [1.0] * parts, total), max(1, min_shard))


def _shard_ends(shares: Sequence[float], total: float) -> list[float]:
    """The cumulative cost at which each shard should end."""
    return [total * cumulative / sum(shares) for cumulative in accumulate(shares)]


def _sizes_near_ends(costs: Sequence[float], ends: Sequence[float], min_shard: int) -> tuple[int, ...]:
    """Sizes of shards whose cumulative costs are nearest to `ends`, none smaller than `min_shard`."""
    cumulative = [0.0, *accumulate(costs)]
    count, parts, start = len(costs), len(ends), 0
    sizes = []
    for index, end in enumerate(ends[:-1]):
        nearest = bisect_left(cumulative, end)
        if nearest > 0 and end - cumulative[nearest - 1] < cumulative[min(nearest, count)] - end:
            nearest -= 1
        stop = min(max(nearest, start + min_shard), count - min_shard * (parts - 1 - index))
        sizes.append(stop - start)
        start = stop
    return (*sizes, count - start)
