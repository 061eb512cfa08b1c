"""Objects among the arguments of a call that `forward` can change in place, other than tensors."""

from __future__ import annotations

import logging
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.replicas.object_graph import is_atomic, is_numeric_array, mutable_storage, walk
from instep.replicas.write_watch import ObjectSnapshot
from instep.structure.tree import Path

_MAX_ARGUMENT_OBJECTS = 2000  # arguments are searched in every call
_SKIPPED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, np.random.Generator, logging.Logger)
"""Loggers are sent by name, and keep caches."""


class MutableArgument(NamedTuple):
    """An object among the arguments that can be changed in place."""

    path: Path
    """The index of the argument, then the keys and attribute names that lead to the object."""
    value: Any
    container: Any
    """The object that is changed with it: the object itself, or its `__dict__`."""


def mutable_ids(values: Sequence[Any]) -> set[int]:
    """The ids of all containers among the caller's arguments."""
    return {id(found.container) for found in find_mutable(enumerate(values))}


def mutable_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], caller_ids: Collection[int]
) -> list[MutableArgument]:
    """Objects among one replica's arguments that belong to the caller. Arrays do: they are views of the caller's."""
    found = find_mutable(enumerate([*args, *kwargs.values()]))
    return [one for one in found if is_numeric_array(one.container) or id(one.container) in caller_ids]


def find_mutable(values: Iterable[tuple[Any, Any]]) -> list[MutableArgument]:
    """The mutable objects that can be reached from (key, value) pairs. Paths begin with the keys."""
    visits = walk(values, skip=_is_skipped, limit=_MAX_ARGUMENT_OBJECTS)
    found = ((visit, mutable_storage(visit.value)) for visit in visits)
    return [MutableArgument(visit.path, visit.value, storage) for visit, storage in found if storage is not None]


def _is_skipped(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _SKIPPED)


class ArgumentSnapshot:
    """The contents of mutable arguments before a call."""

    def __init__(self, values: Sequence[Any], paths: Sequence[Path]) -> None:
        """`paths` are those of the arguments to watch (see `MutableArgument`)."""
        found = {one.path: one for one in find_mutable(enumerate(values))}
        self._saved = {
            number: ObjectSnapshot.of(found[path].value) for number, path in enumerate(paths) if path in found
        }

    def changed(self) -> list[int]:
        """The indices in `paths` of the arguments that have changed."""
        return [number for number, saved in self._saved.items() if saved is not None and not saved.is_unchanged()]

    def restore(self) -> None:
        """Undo all changes."""
        for saved in filter(None, self._saved.values()):
            saved.restore()
