"""Chooses how many samples, and which ones, a trial runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.structure.tree import Path
from instep.structure.weights import is_batch_first, named_tensors, sample_sizes

MAX_PART_SIZE = 16
"""The maximum size of a part, for trials with more samples than the default."""


def default_part_sizes(batch: int, min_size: int = 1) -> tuple[int, int]:
    """The sizes of the two parts of a trial: small, at least `min_size`, and unequal if the batch allows it.

    >>> [default_part_sizes(batch) for batch in (2, 3, 4, 5, 100)]
    [(1, 1), (1, 2), (1, 3), (2, 3), (2, 3)]
    """
    small = max(2, min_size)
    if batch > 2 * small:
        return small, small + 1
    min_size = min(min_size, batch // 2)
    return min_size, batch - min_size


def even_part_sizes(batch: int, min_size: int = 1) -> tuple[int, int] | None:
    """Even part sizes, for modules that need an even batch size, such as two views of each image.

    Returns None if the batch is too small.

    >>> [even_part_sizes(batch) for batch in (3, 4, 6, 100)]
    [None, (2, 2), (2, 4), (2, 4)]
    """
    small = max(2, min_size + min_size % 2)
    if batch < 2 * small:
        return None
    return (small, small + 2) if batch >= 2 * small + 2 else (small, small)


def large_part_sizes(batch: int, min_size: int = 1) -> tuple[int, int]:
    """Larger part sizes, for outputs that a small trial left undetermined."""
    half = max(min_size, min(MAX_PART_SIZE, (batch - 1) // 2))
    return (half, half + 1) if 2 <= half <= (batch - 1) // 2 else default_part_sizes(batch, min_size)


Trait = tuple[Path, int | str]
"""The path of an argument and one of its values, or a property of values (`"zero"`) if it has many, as token ids do."""

MAX_VALUES = 256
MAX_SAMPLES = 1 << 14


def find_traits(inputs: Mapping[str, Any], batch: int) -> dict[Trait, Tensor]:
    """The count of each trait in each sample, for traits whose counts differ between samples."""
    found: dict[Trait, Tensor] = {}
    for path, value in named_tensors(inputs):
        if not is_batch_first(value, batch) or not value.numel():
            continue
        rows = value[:MAX_SAMPLES].detach().reshape(min(batch, MAX_SAMPLES), -1)
        for label, counts in _count_values(rows):
            if bool((counts != counts[0]).any()):
                found[path, label] = counts
    for path, sizes in sample_sizes(inputs):
        if len(sizes) == batch and bool((sizes != sizes[0]).any()):
            found[path, "size"] = sizes[:MAX_SAMPLES].double()
    return found


def distinguished_traits(traits: Mapping[Trait, Tensor], start: int, sizes: Sequence[int]) -> set[Trait]:
    """The traits whose mean count differs between the two parts of the window at `start`."""
    middle, stop = start + sizes[0], start + sum(sizes)
    return {
        trait
        for trait, counts in traits.items()
        if stop <= len(counts) and float((counts[start:middle].mean() - counts[middle:stop].mean()).abs()) > 1e-9
    }


def discriminating_window(traits: Mapping[Trait, Tensor], seen: set[Trait], sizes: Sequence[int]) -> int | None:
    """The start of the window that distinguishes the most traits not yet seen; None if no window does."""
    counts = [value for trait, value in traits.items() if trait not in seen]
    first_size, num_samples = sizes[0], sum(sizes)
    if not counts or len(counts[0]) < num_samples:
        return None
    table = torch.stack(counts)
    cumulative = torch.zeros(len(counts), len(counts[0]) + 1, dtype=torch.float64)
    cumulative[:, 1:] = table.cumsum(1)
    num_windows = cumulative.shape[1] - num_samples
    first = (cumulative[:, first_size : first_size + num_windows] - cumulative[:, :num_windows]) / first_size
    second = (cumulative[:, num_samples:] - cumulative[:, first_size : first_size + num_windows]) / (
        num_samples - first_size
    )
    differences = (first - second).abs()
    largest = differences.max(1, keepdim=True).values
    if not bool((largest > 1e-9).any()):
        return None
    relative = differences / largest.clamp(min=1e-9)
    # Prefer windows that distinguish many traits, and rare ones, which are more likely to have weights. Prefer
    # moderate differences: a part in which every entry is ignored shows nothing.
    rarity = 1 / (table != 0).sum(1, keepdim=True).clamp(min=1)
    return int((rarity * (relative > 1e-9) * (2 - (relative - 0.5).abs())).sum(0).argmax())


def _to_integers(rows: Tensor) -> Tensor | None:
    """Convert entries to int64; None if they are not integers. Floats are included because masks may be 0.0 and 1.0."""
    if rows.is_complex() or rows.is_quantized:
        return None
    if rows.is_floating_point() and rows.dtype.itemsize < 2:  # float8 supports few operations
        rows = rows.float()
    if not rows.is_floating_point():
        return rows.long()
    for subset in (rows[:1], rows):
        if not bool((subset == subset.round()).all()) or not bool((subset.abs() < 1e9).all()):
            return None
    return rows.long()


def _count_values(entries: Tensor) -> Iterator[tuple[int | str, Tensor]]:
    """Each value or property of entries, with its count in every sample.

    Fractional values are used only if there is one per sample, which may be the sample's weight.
    """
    rows = _to_integers(entries)
    if rows is None:
        if entries.shape[1] == 1 and entries.is_floating_point():
            yield "total", entries[:, 0].cpu().double().nan_to_num()
        return
    low, high = int(rows.min()), int(rows.max())
    width = high - low + 1
    if width <= MAX_VALUES:
        offsets = torch.arange(len(rows), device=rows.device)[:, None] * width
        table = torch.bincount((rows - low + offsets).flatten(), minlength=len(rows) * width)
        for value, counts in enumerate(table.reshape(len(rows), width).T.cpu().double()):
            yield low + value, counts
        return
    masks = {
        "negative": rows < 0,
        "zero": rows == 0,
        "lowest": rows == low,
        "highest": rows == high,
        "commonest": rows == rows.flatten()[: 1 << 16].mode().values,
    }
    for name, mask in masks.items():
        yield name, mask.sum(1).cpu().double()
    yield "total", rows.double().sum(1).cpu()
