"""Objects among the arguments of a call that `forward` can change in place, other than tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.replicas.object_graph import (
    Contents,
    is_atomic,
    is_numeric_array,
    is_unchanged,
    mutable_storage,
    read_contents,
    walk,
    write_contents,
)
from instep.structure.tree import Path

_MAX_ARGUMENT_OBJECTS = 2000  # arguments are searched in every call
_SKIPPED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, np.random.Generator)


class MutableArgument(NamedTuple):
    """An object among the arguments that can be changed in place."""

    path: Path
    """The index of the argument, then the keys and attribute names that lead to the object."""
    value: Any
    container: Any
    """The object that is changed with it: the object itself, or its `__dict__`."""


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
    visits = walk(enumerate(values), skip=_is_skipped, limit=_MAX_ARGUMENT_OBJECTS)
    found = ((visit, mutable_storage(visit.value)) for visit in visits)
    return [MutableArgument(visit.path, visit.value, storage) for visit, storage in found if storage is not None]


def _is_skipped(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _SKIPPED)


class ArgumentSnapshot:
    """The contents of mutable arguments before a call."""

    def __init__(self, values: Sequence[Any], paths: Sequence[Path]) -> None:
        """`paths` are those of the arguments to watch (see `MutableArgument`)."""
        found = {one.path: one for one in _find_mutable(values)}
        watched = ((number, found[path]) for number, path in enumerate(paths) if path in found)
        self._saved = [(number, one.value, one.container, read_contents(one.container)) for number, one in watched]

    def changed(self) -> list[int]:
        """The indices in `paths` of the arguments that have changed.

        An object that has only computed a `functools.cached_property` counts as unchanged.
        """
        return [
            number
            for number, value, container, before in self._saved
            if not is_unchanged(container, before) and not _only_cached(value, container, before)
        ]

    def restore(self) -> None:
        """Undo all changes."""
        for _, _, container, before in self._saved:
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
