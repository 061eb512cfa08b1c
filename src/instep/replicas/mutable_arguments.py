"""Objects among the arguments of a call that `forward` can change in place, other than tensors."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.replicas.object_graph import (
    Contents,
    is_atomic,
    is_numeric_array,
    is_unchanged,
    read_contents,
    write_contents,
)
from instep.structure.tree import Path, attributes_of

_MAX_VISITS = 2000
"""The most objects that are visited in one search."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NOT_VISITED = (*_FUNCTIONS, Tensor, nn.Module, torch.Generator, np.random.Generator)


class MutableArgument(NamedTuple):
    """An object among the arguments that can be changed in place."""

    indices: tuple[int, ...]
    """Where it is: the index of the argument, then of the child at each level below."""
    path: Path
    """The same location by keys and attribute names; the first entry is the argument's index."""
    container: Any
    """What holds its entries or attributes: the object itself, or its `__dict__`."""


def mutable_ids(values: Sequence[Any]) -> set[int]:
    """The ids of all containers among the caller's arguments."""
    return {id(found.container) for found in _find_mutable(values)}


def mutable_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], caller_ids: Collection[int]
) -> list[MutableArgument]:
    """Objects among one replica's arguments that belong to the caller. Arrays do: they are views of the caller's."""
    found = _find_mutable([*args, *kwargs.values()])
    return [one for one in found if is_numeric_array(one.container) or id(one.container) in caller_ids]


def _find_mutable(values: Sequence[Any]) -> list[MutableArgument]:
    found: list[MutableArgument] = []
    pending: deque[tuple[tuple[int, ...], Path, Any]] = deque()
    pending.extend(((index,), (index,), value) for index, value in enumerate(values) if not _is_skipped(value))
    visited: set[int] = set()
    while pending and len(visited) < _MAX_VISITS:
        indices, path, value = pending.popleft()
        if id(value) in visited:
            continue
        visited.add(id(value))
        container = _container_of(value)
        if container is not None:
            found.append(MutableArgument(indices, path, container))
        for index, (key, child) in enumerate(_children(value)):
            if not _is_skipped(child):
                pending.append(((*indices, index), (*path, key), child))
    return found


def _is_skipped(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _NOT_VISITED)


def _container_of(value: Any) -> Any:
    if isinstance(value, (dict, list, set, deque)) or is_numeric_array(value):
        return value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return attributes
    return value if not isinstance(value, tuple) and attributes_of(value) else None


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from dict.items(value)
    elif not isinstance(value, (set, frozenset, np.ndarray)):
        yield from attributes_of(value).items()


def _resolve(values: Sequence[Any], indices: Sequence[int]) -> Any:
    value = values[indices[0]]
    for index in indices[1:]:
        value = value[index] if isinstance(value, (list, tuple)) else list(_children(value))[index][1]
    return value


class ArgumentSnapshot:
    """The contents of mutable arguments before a call."""

    def __init__(self, values: Sequence[Any], locations: Sequence[Sequence[int]]) -> None:
        """`locations` are the `indices` of the arguments to watch."""
        found = [(value, _container_of(value)) for value in (_resolve(values, indices) for indices in locations)]
        self._saved = [(value, container, read_contents(container)) for value, container in found]

    def changed(self) -> list[int]:
        """Which of the arguments have changed, by their position in `locations`.

        An object that has only filled in a `functools.cached_property` counts as unchanged.
        """
        return [
            number
            for number, (value, container, before) in enumerate(self._saved)
            if not is_unchanged(container, before) and not _only_cached(value, container, before)
        ]

    def restore(self) -> None:
        """Undo all changes."""
        for _, container, before in self._saved:
            if not is_unchanged(container, before):
                write_contents(container, before)


def _only_cached(value: Any, container: Any, before: Contents) -> bool:
    """Whether all that is new are values of cached properties."""
    if container is value:
        return False
    members = (item for cls in type(value).__mro__ for item in vars(cls).items())
    cached = {name for name, member in members if isinstance(member, functools.cached_property)}
    old = before.by_key()
    rest = {key: item for key, item in read_contents(container).by_key().items() if key in old or key not in cached}
    return rest.keys() == old.keys() and all(item is old[key] for key, item in rest.items())
