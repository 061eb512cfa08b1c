"""Merging again what was merged before: for outputs of the same shape as the last ones, without asking anew.

A recipe is made from parts that were merged by looking at them, and only where looking would find the same again: plain
containers, dense tensors and lists of one entry a sample. It checks what that rests on, and raises `Miss` for anything
else, which is then looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.structure.tree import SCALARS, Path

Recipe: TypeAlias = Callable[[Sequence[Any]], Any]

COLUMN = "column"
_PLAIN_TYPES = frozenset(SCALARS)


class Miss(Exception):
    """These parts are not like those that the recipe was made from."""


def recipe_for(
    parts: Sequence[Any],
    sizes: Sequence[int],
    joined: Mapping[Path, tuple[int, int]],
    readings: Mapping[Path, str],
    path: Path = (),
) -> Recipe | None:
    """How parts like these are merged, if that can be said: `joined` and `readings` are what was seen of them."""
    first = parts[0]
    cls = type(first)
    if cls is Tensor:
        return _tensors(sizes, *joined[path]) if path in joined else None
    if any(type(part) is not cls for part in parts):
        return None
    if cls is dict:
        keys = tuple(first)
        if any(tuple(part) != keys for part in parts):
            return None
    elif cls is list or cls is tuple:
        lengths = [len(part) for part in parts]
        plain = all(_PLAIN_TYPES.issuperset(map(type, part)) for part in parts)
        column = readings.get(path) == COLUMN or (plain and readings.get(path) != "inside")
        if lengths == list(sizes) and cls is list and column:
            return _column(sizes, plain and readings.get(path) != COLUMN)
        if len(set(lengths)) > 1 or lengths == list(sizes):
            return None
        keys = tuple(range(len(first)))
    else:
        return None
    columns = [[part[key] for part in parts] for key in keys]
    below = [recipe_for(column, sizes, joined, readings, (*path, key)) for key, column in zip(keys, columns)]
    known = [recipe for recipe in below if recipe is not None]
    if len(known) < len(keys):
        return None
    return _dicts(keys, known) if cls is dict else _sequences(cls, known)


def _tensors(sizes: Sequence[int], rank: int, dim: int) -> Recipe:
    cat, strided = torch.cat, torch.strided

    def join(parts: Sequence[Any]) -> Any:
        for part, size in zip(parts, sizes):
            if type(part) is not Tensor or part.layout is not strided:
                raise Miss
            shape = part.shape
            if len(shape) != rank or shape[dim] != size:
                raise Miss
        if parts[0] is parts[-1]:
            raise Miss
        return cat(parts, dim)  # type: ignore[arg-type]

    return join


def _column(sizes: Sequence[int], only_plain: bool) -> Recipe:
    def join(parts: Sequence[Any]) -> Any:
        items: list[Any] = []
        for part, size in zip(parts, sizes):
            if type(part) is not list or len(part) != size:
                raise Miss
            items += part
        if parts[0] is parts[-1] or (only_plain and not _PLAIN_TYPES.issuperset(map(type, items))):
            raise Miss
        return items

    return join


def _dicts(keys: tuple[Any, ...], below: Sequence[Recipe]) -> Recipe:
    def join(parts: Sequence[Any]) -> Any:
        for part in parts:
            if type(part) is not dict or tuple(part) != keys:
                raise Miss
        columns = zip(*[part.values() for part in parts])
        return {key: merge(column) for key, merge, column in zip(keys, below, columns)}

    return join


def _sequences(cls: type[list[Any]] | type[tuple[Any, ...]], below: Sequence[Recipe]) -> Recipe:
    length = len(below)

    def join(parts: Sequence[Any]) -> Any:
        for part in parts:
            if type(part) is not cls or len(part) != length:
                raise Miss
        return cls([merge(column) for merge, column in zip(below, zip(*parts))])

    return join
