"""Chooses how many samples, and which ones, a trial runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.structure.tree import Path
from instep.structure.weights import has_batch_size, named_tensors

MAX_PART_SIZE = 16
"""The samples of a part, at most, where a few did not show enough."""


def default_part_sizes(batch: int, least: int = 1) -> tuple[int, int]:
    """The samples of the two parts: few, not fewer than `least`, and unequal wherever the batch allows.

    >>> [sizes_for(batch) for batch in (2, 3, 4, 5, 100)]
    [(1, 1), (1, 2), (1, 3), (2, 3), (2, 3)]
    """
    few = max(2, least)
    if batch > 2 * few:
        return few, few + 1
    least = min(least, batch // 2)
    return least, batch - least


def even_part_sizes(batch: int, least: int = 1) -> tuple[int, int] | None:
    """Samples for a module that takes only even numbers of them, such as two views of each image.

    >>> [even_sizes(batch) for batch in (3, 4, 6, 100)]
    [None, (2, 2), (2, 4), (2, 4)]
    """
    few = max(2, least + least % 2)
    if batch < 2 * few:
        return None
    return (few, few + 2) if batch >= 2 * few + 2 else (few, few)


def large_part_sizes(batch: int, least: int = 1) -> tuple[int, int]:
    """Parts of more samples, for what a few did not show."""
    half = max(least, min(MAX_PART_SIZE, (batch - 1) // 2))
    return (half, half + 1) if 2 <= half <= (batch - 1) // 2 else default_part_sizes(batch, least)


Trait = tuple[Path, int | str]
"""An argument and a value of it; for one of very many values (words) something that a value may be."""

MAX_VALUES = 256
MAX_SAMPLES = 1 << 14


def find_traits(inputs: Mapping[str, Any], batch: int) -> dict[Trait, Tensor]:
    """How often each sample has each trait, for traits that samples have differently often."""
    found: dict[Trait, Tensor] = {}
    for path, value in named_tensors(inputs):
        if not has_batch_size(value, batch) or not value.numel():
            continue
        rows = value[:MAX_SAMPLES].detach().reshape(min(batch, MAX_SAMPLES), -1)
        for what, counts in _count_values(rows):
            if bool((counts != counts[0]).any()):
                found[path, what] = counts
    return found


def distinguished_traits(traits: Mapping[Trait, Tensor], start: int, sizes: Sequence[int]) -> set[Trait]:
    """The traits that two parts have differently often, from a first sample on."""
    a, n = start + sizes[0], start + sum(sizes)
    return {
        trait
        for trait, counts in traits.items()
        if n <= len(counts) and float((counts[start:a].mean() - counts[a:n].mean()).abs()) > 1e-9
    }


def discriminating_window(traits: Mapping[Trait, Tensor], told: set[Trait], sizes: Sequence[int]) -> int | None:
    """The first sample of the stretch that tells of most traits that were not told yet; None if none does."""
    counts = [value for trait, value in traits.items() if trait not in told]
    a, n = sizes[0], sum(sizes)
    if not counts or len(counts[0]) < n:
        return None
    table = torch.stack(counts)
    total = torch.zeros(len(counts), len(counts[0]) + 1, dtype=torch.float64)
    total[:, 1:] = table.cumsum(1)
    last = total.shape[1] - n
    first = (total[:, a : a + last] - total[:, :last]) / a
    second = (total[:, n:] - total[:, a : a + last]) / (n - a)
    apart = (first - second).abs()
    most = apart.max(1, keepdim=True).values
    if not bool((most > 1e-9).any()):
        return None
    share = apart / most.clamp(min=1e-9)
    # As many traits as can be, rare ones first, which are the ones that are given weights; and of each something in
    # between: a part in which all is ignored tells nothing.
    rare = 1 / (table != 0).sum(1, keepdim=True).clamp(min=1)
    return int((rare * (share > 1e-9) * (2 - (share - 0.5).abs())).sum(0).argmax())


def _to_integers(rows: Tensor) -> Tensor | None:
    """The entries as integers; None for fractions. A mask is often kept as 0.0 and 1.0."""
    if rows.is_complex() or rows.is_quantized:
        return None
    if rows.is_floating_point() and rows.dtype.itemsize < 2:  # torch computes little with these
        rows = rows.float()
    if not rows.is_floating_point():
        return rows.long()
    for some in (rows[:1], rows):
        if not bool((some == some.round()).all()) or not bool((some.abs() < 1e9).all()):
            return None
    return rows.long()


def _count_values(entries: Tensor) -> Iterator[tuple[int | str, Tensor]]:
    """Each value or property that entries may have, and how many of every sample's have it.

    Of fractions only one a sample is looked at, which may be its weight.
    """
    rows = _to_integers(entries)
    if rows is None:
        if entries.shape[1] == 1 and entries.is_floating_point():
            yield "total", entries[:, 0].cpu().double().nan_to_num()
        return
    low, high = int(rows.min()), int(rows.max())
    width = high - low + 1
    if width <= MAX_VALUES:
        place = torch.arange(len(rows), device=rows.device)[:, None] * width
        table = torch.bincount((rows - low + place).flatten(), minlength=len(rows) * width)
        for value, counts in enumerate(table.reshape(len(rows), width).T.cpu().double()):
            yield low + value, counts
        return
    tests = {
        "negative": rows < 0,
        "zero": rows == 0,
        "lowest": rows == low,
        "highest": rows == high,
        "commonest": rows == rows.flatten()[: 1 << 16].mode().values,
    }
    for name, true in tests.items():
        yield name, true.sum(1).cpu().double()
    yield "total", rows.double().sum(1).cpu()
