"""Cached merge functions for outputs that repeat an earlier structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.structure.placements import Nested, PerSample, Reading
from instep.structure.tree import SCALARS, Path

CachedMerge: TypeAlias = Callable[[Sequence[Any]], Any]
"""Merges parts of a known structure. Raises `CacheMiss` for any other structure."""

_PLAIN_TYPES = frozenset(SCALARS)


class CacheMiss(Exception):
    """The parts differ in structure from those that the merge was cached for."""


def build_cached_merge(
    parts: Sequence[Any],
    sizes: Sequence[int],
    batch_dims: Mapping[Path, tuple[int, int]],
    readings: Mapping[Path, Reading],
    path: Path = (),
) -> CachedMerge | None:
    """Build a merge function for parts of this structure; None if it contains anything that cannot be cached.

    `batch_dims` and `readings` are the records of the `Merger`.
    """
    first = parts[0]
    cls = type(first)
    if cls is Tensor:
        return _cached_cat(sizes, *batch_dims[path]) if path in batch_dims else None
    if any(type(part) is not cls for part in parts):
        return None
    if cls is dict:
        keys = tuple(first)
        if any(tuple(part) != keys for part in parts):
            return None
    elif cls is list or cls is tuple:
        lengths = [len(part) for part in parts]
        plain = all(_PLAIN_TYPES.issuperset(map(type, part)) for part in parts)
        reading = readings.get(path)
        is_per_sample = reading is PerSample or (plain and reading is not Nested)
        if lengths == list(sizes) and cls is list and is_per_sample:
            return _cached_list_concat(sizes, plain and reading is not PerSample)
        if len(set(lengths)) > 1 or lengths == list(sizes):
            return None
        keys = tuple(range(len(first)))
    else:
        return None
    columns = [[part[key] for part in parts] for key in keys]
    child_merges = [
        build_cached_merge(column, sizes, batch_dims, readings, (*path, key)) for key, column in zip(keys, columns)
    ]
    cached = [child_merge for child_merge in child_merges if child_merge is not None]
    if len(cached) < len(keys):
        return None
    return _cached_dict_merge(keys, cached) if cls is dict else _cached_sequence_merge(cls, cached)


def build_cached_sum(parts: Sequence[Any]) -> CachedMerge | None:
    """Build a function that sums dictionaries of tensors and integers, as the parts of a loss are; else None."""
    keys = tuple(parts[0]) if type(parts[0]) is dict and parts[0] is not parts[-1] else ()

    def merge_parts(parts: Sequence[Any]) -> Any:
        if parts[0] is parts[-1]:
            raise CacheMiss
        for part in parts:
            if type(part) is not dict or tuple(part) != keys:
                raise CacheMiss
        columns = list(zip(*[part.values() for part in parts]))
        for first, *others in columns:
            cls = type(first)
            if cls not in (Tensor, int) or any(type(value) is not cls for value in others):
                raise CacheMiss
            if cls is Tensor and any(value.shape != first.shape for value in others):
                raise CacheMiss
        return {key: reduce(add, column) for key, column in zip(keys, columns)}

    return merge_parts if keys and all(type(value) in (Tensor, int) for value in parts[0].values()) else None


def _cached_cat(sizes: Sequence[int], rank: int, dim: int) -> CachedMerge:
    cat, strided = torch.cat, torch.strided

    def merge_parts(parts: Sequence[Any]) -> Any:
        for part, size in zip(parts, sizes):
            if type(part) is not Tensor or part.layout is not strided:
                raise CacheMiss
            shape = part.shape
            if len(shape) != rank or shape[dim] != size:
                raise CacheMiss
        if parts[0] is parts[-1]:
            raise CacheMiss
        return cat(parts, dim)  # type: ignore[arg-type]

    return merge_parts


def _cached_list_concat(sizes: Sequence[int], only_plain: bool) -> CachedMerge:
    def merge_parts(parts: Sequence[Any]) -> Any:
        items: list[Any] = []
        for part, size in zip(parts, sizes):
            if type(part) is not list or len(part) != size:
                raise CacheMiss
            items += part
        if parts[0] is parts[-1] or (only_plain and not _PLAIN_TYPES.issuperset(map(type, items))):
            raise CacheMiss
        return items

    return merge_parts


def _cached_dict_merge(keys: tuple[Any, ...], child_merges: Sequence[CachedMerge]) -> CachedMerge:
    def merge_parts(parts: Sequence[Any]) -> Any:
        for part in parts:
            if type(part) is not dict or tuple(part) != keys:
                raise CacheMiss
        columns = zip(*[part.values() for part in parts])
        return {key: merge(column) for key, merge, column in zip(keys, child_merges, columns)}

    return merge_parts


def _cached_sequence_merge(
    cls: type[list[Any]] | type[tuple[Any, ...]], child_merges: Sequence[CachedMerge]
) -> CachedMerge:
    length = len(child_merges)

    def merge_parts(parts: Sequence[Any]) -> Any:
        for part in parts:
            if type(part) is not cls or len(part) != length:
                raise CacheMiss
        return cls([merge(column) for merge, column in zip(child_merges, zip(*parts))])

    return merge_parts
