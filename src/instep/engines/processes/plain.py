"""The short way for most messages: numbers, texts, small lists, tuples and dictionaries of them, and tensors.

`marshal` writes these many times quicker than a pickler that has to look out for classes and functions; whatever else
is in a value sends it the long way.
"""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from instep.engines.processes.reducers import has_plain_memory

_SCALARS = frozenset({type(None), bool, int, float, str})
_DEEPEST, _LONGEST, _MOST = 16, 64, 64
"""Levels, entries of one container, and containers and tensors: beyond that C code is quicker."""


class _NotPlain(Exception):
    """Something is in a value that the short way has no word for."""


def to_plain(value: Any) -> tuple[Any, list[Tensor]] | None:
    """A value with a complex number, of which it holds no others, for each tensor, and the tensors; or None."""
    tensors: list[Tensor] = []
    try:
        return _stripped(value, tensors, {}, 0), tensors
    except _NotPlain:
        return None


def fields_to_plain(
    fields: Sequence[Any], names: Iterable[str], loose: Collection[str]
) -> tuple[Any, list[Tensor]] | None:
    """The same for values with names, of which only some may hold anything."""
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    try:
        pairs = zip(fields, names, strict=False)
        return tuple([_stripped(v, tensors, seen, 1) if name in loose else v for v, name in pairs]), tensors
    except _NotPlain:
        return None


def _stripped(value: Any, tensors: list[Tensor], seen: dict[int, Any], depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is Tensor:
        place = seen.get(id(value))
        if place is None:
            if not is_bare(value):
                raise _NotPlain
            place = seen[id(value)] = complex(len(tensors))
            tensors.append(value)
        return place
    if kind is tuple:
        if not value:
            return value
        seen.setdefault(id(value))
    elif (kind is not list and kind is not dict) or id(value) in seen:  # one list in two places stays one
        raise _NotPlain
    else:
        seen[id(value)] = None
        if not value:
            return kind()
    if len(value) > _LONGEST or len(seen) > _MOST or depth > _DEEPEST:
        raise _NotPlain
    below = depth + 1
    if kind is dict:
        if not all(type(key) in _SCALARS for key in value):
            raise _NotPlain
        return {
            key: item if type(item) in _SCALARS else _stripped(item, tensors, seen, below)
            for key, item in value.items()
        }
    items = [item if type(item) in _SCALARS else _stripped(item, tensors, seen, below) for item in value]
    return items if kind is list else tuple(items)


def is_bare(tensor: Tensor) -> bool:
    """Whether a tensor goes the short way."""
    return type(tensor) is Tensor and not tensor.__dict__ and has_plain_memory(tensor)


def is_empty(value: Any) -> bool:
    """Whether there is nothing to look into."""
    return type(value) in _SCALARS or (not value and type(value) in (tuple, list, dict))


def from_plain(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that `to_plain` was given, with these tensors; lists and dictionaries are filled where they are."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is complex:
        return tensors[int(value.real)]
    if kind is tuple:
        return tuple([item if type(item) in _SCALARS else from_plain(item, tensors) for item in value])
    for key, item in value.items() if kind is dict else enumerate(value):
        if type(item) not in _SCALARS:
            value[key] = from_plain(item, tensors)
    return value


def dumps(value: Any) -> bytes:
    """What `to_plain` gave, as bytes that begin like no pickle."""
    return b"\0" + marshal.dumps(value)


def loads(body: bytes) -> Any | None:
    """What `dumps` was given; None for the bytes of a pickle."""
    return None if body[:1] != b"\0" else marshal.loads(memoryview(body)[1:])
