"""Containers of the source module that all replicas share, and detection of changes to them."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from instep.replicas.clone import Cloner
from instep.replicas.object_graph import (
    Contents,
    attribute_storage,
    extra_attributes,
    is_atomic,
    is_numeric_array,
    is_unchanged,
    read_contents,
    write_contents,
)
from instep.structure.tree import SCALARS, attributes_of

# What `nn.Module` keeps for itself, and lists that torch's own layers make once.
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) | {
    "_compiled_call_impl",
    "_reversed_padding_repeated_twice",
    "_all_weights",
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
}
_MAX_OBJECTS = 100_000


class StatePath(NamedTuple):
    """Where a container hangs: an attribute's path, and the keys that lead on from there."""

    attribute: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.attribute, *self.keys))

    def child(self, key: Any) -> StatePath:
        return StatePath(self.attribute, (*self.keys, str(key)))

    def without_indices(self) -> StatePath:
        """The place to name in a rule: a list rather than an entry of it, which has another number at each call."""
        keys = self.keys
        while keys and keys[-1].isdigit():
            keys = keys[:-1]
        return StatePath(self.attribute, keys)


class SharedContainers:
    """Every container that can be reached from the attributes of some modules, as it was."""

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], cloner: Cloner) -> None:
        self.paths: dict[int, StatePath] = {}
        """By the id of a container: where it is."""
        self._shared: list[tuple[Any, Contents]] = []
        self._visited: set[int] = set()
        for module, name in zip(modules, names, strict=True):
            for attribute, value in module.__dict__.items():
                if attribute not in _TORCH_ATTRIBUTES and not is_atomic(value):
                    self._add(value, StatePath(f"{name}.{attribute}" if name else attribute), cloner)

    def _add(self, value: Any, place: StatePath, cloner: Cloner) -> None:
        pending = [(value, place)]
        while pending and len(self._visited) < _MAX_OBJECTS:
            value, place = pending.pop()
            if id(value) in self._visited or is_atomic(value) or isinstance(value, (Tensor, nn.Module)):
                continue
            self._visited.add(id(value))
            container, attributes = container_of(value), extra_attributes(value)
            for held, where in ((container, place), (attributes, place.child("__dict__"))):
                if held is not None:
                    self.paths.setdefault(id(held), where)
                    if not cloner.has_clone(value):
                        self._shared.append((held, read_contents(held)))
            pending.extend((child, place.child("__dict__").child(key)) for key, child in (attributes or {}).items())
            pending.extend((child, place.child(key)) for key, child in _named_children(value, container))

    def at_paths(self, places: Sequence[str]) -> list[Any]:
        """The shared containers at some places."""
        return [container for container, _ in self._shared if places and str(self.paths[id(container)]) in places]

    def changed(self) -> list[Any]:
        """The shared containers that hold something else now."""
        return [container for container, contents in self._shared if not is_unchanged(container, contents)]

    def restore(self) -> list[Any]:
        """Give shared containers back what they held, and say which ones had changed."""
        found = [(container, contents) for container, contents in self._shared if not is_unchanged(container, contents)]
        for container, contents in found:
            write_contents(container, contents)
        return [container for container, _ in found]


def container_of(value: Any) -> Any:
    """What a value is changed through, if it can be: itself, or an object's dictionary of attributes."""
    if isinstance(value, (dict, list, deque, set)) or is_numeric_array(value):
        return value
    cls: type = type(value)
    if not _is_user_class(cls):
        return None
    holder = attribute_storage(value)
    return value if holder is None else holder


@functools.cache
def _is_user_class(cls: Any) -> bool:
    """Whether objects of a class hold a program's own values: not those of Python, torch or numpy."""
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return True
    root = (cls.__module__ or "").partition(".")[0]
    if root in sys.stdlib_module_names and root not in ("__main__", "collections"):
        return False
    if root in ("torch", "numpy", "builtins") or issubclass(cls, (np.ndarray, BaseException, tuple, frozenset)):
        return False
    return bool(cls.__dictoffset__) or any("__slots__" in base.__dict__ for base in cls.__mro__[:-1])


def _named_children(value: Any, container: Any) -> Iterator[tuple[Any, Any]]:
    """What can be reached from a value, with the key or the attribute it is known by."""
    if is_numeric_array(value):
        return
    if isinstance(value, dict):
        yield from dict.items(value)
        yield from _named_hashables(dict.keys(value))
    elif isinstance(value, (set, frozenset)):
        yield from _named_hashables(value)
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, types.FunctionType):
        if not (value.__module__ or "").startswith("torch"):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield name, cell.cell_contents
                except ValueError:  # not filled yet
                    continue
    elif isinstance(value, functools.partial):
        yield from enumerate(value.args)
        yield from value.keywords.items()
    elif container is not None:
        yield from attributes_of(value).items()


def _named_hashables(items: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Keys, or what is in a set, that may have attributes, by what they are called."""
    found = [item for item in items if not is_atomic(item)]
    return ((str(item) if isinstance(item, SCALARS) else type(item).__name__, item) for item in found)
