"""Chooses how many samples, and which ones, a trial runs."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from instep.structure.placements import Nested, Placement, Replicate
from instep.structure.tree import SCALARS, Path, flatten_one_level
from instep.structure.weights import is_batch_first, named_tensors, sample_sizes

MAX_PART_SIZE = 16
"""The maximum size of a part, for trials with more samples than the default."""

MAX_PARTS = 8
"""The number of parts on which a mean is confirmed."""
MAX_SAMPLE_NUMBER = 64
"""Integers among the arguments below this are tried as numbers of samples."""


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


def many_part_sizes(batch: int, min_size: int = 1) -> list[tuple[int, ...]]:
    """Sizes of many equal parts: large ones, to see many samples, then the smallest.

    A weight that two parts have in common by chance differs between some of these.

    >>> many_part_sizes(18), many_part_sizes(4), many_part_sizes(3, 2)
    ([(2, 2, 2, 2, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1, 1)], [(1, 1, 1, 1)], [])
    """
    large = max(1, min(4, batch // MAX_PARTS) // min_size) * min_size
    found = dict.fromkeys((size,) * min(MAX_PARTS, batch // size) for size in (large, min_size))
    return [sizes for sizes in found if len(sizes) > 1]


def sizes_beyond(
    values: Iterable[Any], tried: tuple[int, int], batch: int, min_size: int = 1, *, even: bool = False
) -> tuple[int, int] | None:
    """Sizes of two parts with more samples than an integer among plain arguments, which may count samples: `y[:n]`.

    None if the sizes that were tried are enough, or the batch is too small.

    >>> sizes_beyond([0.5, 3, 8], (2, 3), 12), sizes_beyond([3], (2, 3), 12), sizes_beyond([12], (2, 3), 12)
    ((4, 5), None, None)
    """
    numbers = [n for n in values if type(n) is int and sum(tried) <= n < min(batch, MAX_SAMPLE_NUMBER)]
    total = max(numbers, default=batch) + 1
    total += -total % 4 if even else 0
    return (total // 2, total - total // 2) if 2 * min_size <= total <= batch else None


def replicated_scalars(placement: Placement, value: Any) -> Iterator[Any]:
    """Strings, numbers and other plain values of an argument that every replica gets."""
    if isinstance(placement, Replicate):
        if isinstance(value, (*SCALARS, enum.Enum)):
            yield value
        elif type(value) is Tensor and value.ndim == 0 and value.device.type == "cpu":  # others would synchronize
            yield value.item()
    elif isinstance(placement, Nested):
        node = flatten_one_level(value)
        assert node is not None
        for child_placement, child in zip(placement.placements, node.children, strict=True):
            yield from replicated_scalars(child_placement, child)


Trait = tuple[Path, int | str]
"""The path of an argument and one of its values, or a property of values (`"zero"`) if it has many, as token ids do.

Sequences `[B, T]` have the same traits without their first and without their last position, because losses shift them.
"""

MAX_VALUES = 256
MAX_SAMPLES = 1 << 12


def find_traits(inputs: Mapping[str, Any], batch: int) -> dict[Trait, Tensor]:
    """The count of each trait in each sample, for traits whose counts differ between samples."""
    found: dict[Trait, Tensor] = {}
    for path, value in named_tensors(inputs):
        if not is_batch_first(value, batch) or not value.numel():
            continue
        rows = value[:MAX_SAMPLES].detach().reshape(min(batch, MAX_SAMPLES), -1)
        integers = _to_integers(rows)
        if integers is not None:
            ranges = {"": integers}
            if value.ndim == 2 and value.shape[1] > 1:
                ranges |= {"[1:]": integers[:, 1:], "[:-1]": integers[:, :-1]}
            for name, entries in ranges.items():
                labels, table = _count_values(entries)
                differs = (table != table[:, :1]).any(1).tolist()
                where = (*path, name) if name else path
                found.update({(where, labels[i]): table[i] for i, differ in enumerate(differs) if differ})
        elif rows.shape[1] == 1 and rows.is_floating_point():  # may be the weight of the sample
            weights = rows[:, 0].cpu().double().nan_to_num()
            if bool((weights != weights[0]).any()):
                found[path, "total"] = weights
    for path, sizes in sample_sizes(inputs):
        if len(sizes) == batch and bool((sizes != sizes[0]).any()):
            found[path, "size"] = sizes[:MAX_SAMPLES].double()
    return found


def distinguished_traits(traits: Mapping[Trait, Tensor], start: int, sizes: Sequence[int]) -> set[Trait]:
    """The traits whose mean count differs between the parts of the window at `start`."""
    stop = start + sum(sizes)
    means = {
        trait: torch.stack([part.mean() for part in counts[start:stop].split(list(sizes))])
        for trait, counts in traits.items()
        if stop <= len(counts)
    }
    return {trait for trait, parts in means.items() if float(parts.max() - parts.min()) > 1e-9}


def discriminating_window(traits: Mapping[Trait, Tensor], seen: set[Trait], sizes: Sequence[int]) -> int | None:
    """The start of the window that distinguishes the most traits not yet seen; None if no window does."""
    counts = [value for trait, value in traits.items() if trait not in seen]
    if not counts or len(counts[0]) < sum(sizes):
        return None
    table = torch.stack(counts)
    cumulative = torch.zeros(len(counts), len(counts[0]) + 1, dtype=torch.float64)
    cumulative[:, 1:] = table.cumsum(1)
    num_windows = cumulative.shape[1] - sum(sizes)
    totals = [cumulative[:, stop : stop + num_windows] for stop in accumulate(sizes, initial=0)]
    means = ((after - before) / size for (before, after), size in zip(pairwise(totals), sizes, strict=True))
    low = high = next(means)
    for mean in means:
        low, high = torch.minimum(low, mean), torch.maximum(high, mean)
    differences = high - low
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


def _count_values(rows: Tensor) -> tuple[Sequence[int | str], Tensor]:
    """The values or properties of entries, and a table of their counts: one row for each, one column per sample."""
    low, high = int(rows.min()), int(rows.max())
    width = high - low + 1
    if width <= MAX_VALUES:
        offsets = torch.arange(len(rows), device=rows.device)[:, None] * width
        table = torch.bincount((rows - low + offsets).flatten(), minlength=len(rows) * width)
        return range(low, high + 1), table.reshape(len(rows), width).T.cpu().double()
    properties = {
        "negative": rows < 0,
        "zero": rows == 0,
        "lowest": rows == low,
        "highest": rows == high,
        "commonest": rows == rows.flatten()[: 1 << 16].mode().values,
        "total": rows,
    }
    return tuple(properties), torch.stack([entries.sum(1) for entries in properties.values()]).cpu().double()
