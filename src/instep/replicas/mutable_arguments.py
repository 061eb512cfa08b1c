"""Arguments that `forward` can change in place, other than tensors."""

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
from instep.structure.tree import SCALARS, Path, attributes_of

_MAX_VISITS = 2000
"""The most parts of arguments that are looked at."""
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NOT_VISITED = (*_FUNCTIONS, Tensor, nn.Module, torch.Generator, np.random.Generator)


class MutableArgument(NamedTuple):
    """Something among the arguments that can be changed in place."""

    indices: tuple[int, ...]
    """The way to it: the number of the argument, and of the part inside of that, and so on."""
    path: Path
    """The same way in words."""
    value: Any
    container: Any
    """What holds its entries or attributes: itself, or its dictionary."""

    def contents(self) -> Contents:
        """What it holds now; nothing for an array, whose numbers nobody tells apart by where they were."""
        return Contents((), ()) if is_numeric_array(self.value) else read_contents(self.container)


def find_mutable(
    names: Sequence[Any], values: Sequence[Any], wanted: Collection[int] | None = None
) -> list[MutableArgument]:
    """What can be changed in place among arguments, once each; of what is no array, only those with wanted ids."""
    found: list[MutableArgument] = []
    pending: deque[tuple[tuple[int, ...], Path, Any]] = deque()
    pending.extend(((number,), (name,), value) for number, (name, value) in enumerate(zip(names, values, strict=True)))
    seen: set[int] = set()
    left = _MAX_VISITS
    while pending and left:
        steps, path, value = pending.popleft()
        if _is_skipped(value) or id(value) in seen:
            continue
        left -= 1
        seen.add(id(value))
        container = _container_of(value)
        if container is not None and (wanted is None or is_numeric_array(value) or id(container) in wanted):
            found.append(MutableArgument(steps, path, value, container))
        for number, (key, part) in enumerate(_named_parts(value)):
            pending.append(((*steps, number), (*path, key), part))
    return found


def _is_skipped(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _NOT_VISITED)


def mutable_ids(values: Sequence[Any]) -> set[int]:
    """The ids of everything among the caller's arguments that can be changed in place."""
    if all(map(_is_skipped, values)):
        return set()
    return {id(held.container) for held in find_mutable(range(len(values)), values)}


def mutable_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], theirs: Collection[int]) -> list[MutableArgument]:
    """Of one replica's arguments, what is the caller's own and can be changed in place; arrays are parts of it."""
    values = [*args, *kwargs.values()]
    if all(map(_is_skipped, values)):
        return []
    return find_mutable(range(len(values)), values, theirs)


def resolve(values: Sequence[Any], steps: Sequence[int]) -> Any:
    """What lies at the end of a way."""
    value = values[steps[0]]
    for step in steps[1:]:
        value = value[step] if isinstance(value, (list, tuple)) else list(_named_parts(value))[step][1]
    return value


def _container_of(value: Any) -> Any:
    if isinstance(value, (dict, list, set, deque)) or is_numeric_array(value):
        return value
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        return held
    return value if not isinstance(value, tuple) and attributes_of(value) else None


def _named_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from dict.items(value)
    elif not isinstance(value, (set, frozenset, np.ndarray)):
        yield from attributes_of(value).items()


class ArgumentSnapshot:
    """What lay among the arguments of a replica when its part of a call began."""

    def __init__(self, values: Sequence[Any], ways: Sequence[Sequence[int]]) -> None:
        found = [resolve(values, steps) for steps in ways]
        self._saved = [(held, read_contents(held)) for held in map(_container_of, found)]

    def changes(self) -> Iterator[tuple[int, tuple[Any, ...], list[tuple[int, Any]]]]:
        """What has changed since: the number of the way, the keys now, and each item as `by_place` writes it."""
        for number, (container, before) in enumerate(self._saved):
            if not is_unchanged(container, before):
                now = read_contents(container)
                yield number, now.keys, list(encode_items(container, before.items, now.items))


class ArgumentChange(NamedTuple):
    """What a replica of another process did to its copy of something among the arguments."""

    argument: MutableArgument
    before: Contents
    after: Contents

    def is_read_only(self) -> bool:
        """Whether all that is new are attributes that an object computes when they are first read, and keeps."""
        if self.argument.container is self.argument.value:
            return False
        found = (vars(cls).items() for cls in type(self.argument.value).__mro__)
        lazy = {name for items in found for name, one in items if isinstance(one, functools.cached_property)}
        before, now = self.before.by_key(), self.after.by_key()
        rest = {key: item for key, item in now.items() if key not in lazy - before.keys()}
        return rest.keys() == before.keys() and all(item is before[key] for key, item in rest.items())

    def apply(self) -> None:
        """Do it to the caller's own; what replicas compute alike is there once."""
        if not self.is_read_only():
            write_contents(self.argument.container, self.after)
            return
        for key, item in self.after.by_key().items():
            self.argument.container.setdefault(key, item)


def encode_items(container: Any, before: Sequence[Any], after: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Each item by its place before, in rising order as far as may be; -1 and the item itself for a new one.

    What is in a set has no place: its order is another in another process.
    """
    places: dict[int, list[int]] = {}
    for number, item in enumerate(() if isinstance(container, set) else before):
        places.setdefault(id(item), []).append(number)
    last = -1
    for item in after:
        known = places.get(id(item), [])
        last = next((number for number in known if number > last), known[0] if known else last)
        yield (last, None) if known else (-1, item)


def decode_contents(before: Contents, keys: Sequence[Any], items: Sequence[tuple[int, Any]]) -> Contents:
    """The inverse of `by_place`, around the objects that are here.

    Something that another replica changes meanwhile may have lost the place; what several change is refused anyway.
    """
    names = {(type(key), key): key for key in before.keys if _is_atomic_scalar(key)}
    own = {(type(item), item): item for item in before.items if _is_atomic_scalar(item)}
    known = [(old, item) for old, item in items if old < len(before.items)]
    here = (before.items[old] if old >= 0 else _existing_object(item, own) for old, item in known)
    return Contents(tuple(_existing_object(key, names) for key in keys), tuple(here))


def _existing_object(item: Any, own: dict[Any, Any]) -> Any:
    """The very object that is here already, for one of those that nobody tells apart but by identity."""
    return own.get((type(item), item), item) if _is_atomic_scalar(item) else item


def _is_atomic_scalar(item: Any) -> bool:
    return isinstance(item, SCALARS) and is_atomic(item)
