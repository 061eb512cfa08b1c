"""How many samples of a batch are tried in two parts."""

from __future__ import annotations

WIDE = 16
"""The samples of a part, at most, where a few did not show enough."""


def sizes_for(batch: int, least: int = 1) -> tuple[int, int]:
    """The samples of the two parts: few, not fewer than `least`, and unequal wherever the batch allows.

    >>> [sizes_for(batch) for batch in (2, 3, 4, 5, 100)]
    [(1, 1), (1, 2), (1, 3), (2, 3), (2, 3)]
    """
    few = max(2, least)
    if batch > 2 * few:
        return few, few + 1
    least = min(least, batch // 2)
    return least, batch - least


def even_sizes(batch: int, least: int = 1) -> tuple[int, int] | None:
    """Samples for a module that takes only even numbers of them, such as two views of each image.

    >>> [even_sizes(batch) for batch in (3, 4, 6, 100)]
    [None, (2, 2), (2, 4), (2, 4)]
    """
    few = max(2, least + least % 2)
    if batch < 2 * few:
        return None
    return (few, few + 2) if batch >= 2 * few + 2 else (few, few)


def wider(batch: int, least: int = 1) -> tuple[int, int]:
    """Parts of more samples, for what a few did not show."""
    half = max(least, min(WIDE, (batch - 1) // 2))
    return (half, half + 1) if 2 <= half <= (batch - 1) // 2 else sizes_for(batch, least)
