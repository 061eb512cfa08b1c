"""Containers of the source that replicas share, and whether somebody changed them.

A list, a dictionary or an object without tensors is the same object on every replica, so that an edit of the user
reaches all of them. A `forward` that changes one would do so once for each replica: the change is taken back, each
replica is given a container of its own from then on, and the call runs once more.
"""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from instep.replicas.clone import Cloner
from instep.replicas.contents import Contents, beside, contents_of, holder_of, holds_still, is_array, put
from instep.replicas.opaque import is_opaque
from instep.structure.tree import attributes_of

# What `nn.Module` keeps for itself, and lists that torch's own layers make once.
_OWN = frozenset(nn.Module().__dict__) | {
    "_compiled_call_impl",
    "_reversed_padding_repeated_twice",
    "_all_weights",
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
}
_MOST = 100_000


class Place(NamedTuple):
    """Where a container hangs: an attribute's path, and the keys that lead on from there."""

    attribute: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.attribute, *self.keys))

    def at(self, key: Any) -> Place:
        return Place(self.attribute, (*self.keys, str(key)))

    def spoken(self) -> Place:
        """The place to name in a rule: a list rather than an entry of it, which has another number at each call."""
        keys = self.keys
        while keys and keys[-1].isdigit():
            keys = keys[:-1]
        return Place(self.attribute, keys)


class Shelf:
    """Every container that can be reached from the attributes of some modules, as it was."""

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], cloner: Cloner) -> None:
        self.places: dict[int, Place] = {}
        """By the id of a container: where it is."""
        self._shared: list[tuple[Any, Contents]] = []
        self._seen: set[int] = set()
        for module, name in zip(modules, names, strict=True):
            for attribute, value in module.__dict__.items():
                if attribute not in _OWN and not is_opaque(value):
                    self._walk(value, Place(f"{name}.{attribute}" if name else attribute), cloner)

    def _walk(self, value: Any, place: Place, cloner: Cloner) -> None:
        pending = [(value, place)]
        while pending and len(self._seen) < _MOST:
            value, place = pending.pop()
            if id(value) in self._seen or is_opaque(value) or isinstance(value, (Tensor, nn.Module)):
                continue
            self._seen.add(id(value))
            container, attributes = container_of(value), beside(value)
            for held, where in ((container, place), (attributes, place.at("__dict__"))):
                if held is not None:
                    self.places.setdefault(id(held), where)
                    if not cloner.has_own(value):
                        self._shared.append((held, contents_of(held)))
            pending.extend((child, place.at("__dict__").at(key)) for key, child in (attributes or {}).items())
            pending.extend((child, place.at(key)) for key, child in _inside(value, container))

    def at(self, places: Sequence[str]) -> list[Any]:
        """The shared containers at some places."""
        return [container for container, _ in self._shared if places and str(self.places[id(container)]) in places]

    def changed(self) -> list[Any]:
        """The shared containers that hold something else now."""
        return [container for container, contents in self._shared if not holds_still(container, contents)]

    def restore(self) -> list[Any]:
        """Give shared containers back what they held, and say which ones had changed."""
        found = [(container, contents) for container, contents in self._shared if not holds_still(container, contents)]
        for container, contents in found:
            put(container, contents)
        return [container for container, _ in found]


def container_of(value: Any) -> Any:
    """What a value is changed through, if it can be: itself, or an object's dictionary of attributes."""
    if isinstance(value, (dict, list, deque, set)) or is_array(value):
        return value
    cls: type = type(value)
    if not _is_users(cls):
        return None
    holder = holder_of(value)
    return value if holder is None else holder


@functools.cache
def _is_users(cls: Any) -> bool:
    """Whether objects of a class hold a program's own values: not those of Python, torch or numpy."""
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return True
    root = (cls.__module__ or "").partition(".")[0]
    if root in sys.stdlib_module_names and root not in ("__main__", "collections"):
        return False
    if root in ("torch", "numpy", "builtins") or issubclass(cls, (np.ndarray, BaseException, tuple, frozenset)):
        return False
    return bool(cls.__dictoffset__) or any("__slots__" in base.__dict__ for base in cls.__mro__[:-1])


def _inside(value: Any, container: Any) -> Iterator[tuple[Any, Any]]:
    """What can be reached from a value, with the key or the attribute it is known by."""
    if is_array(value):
        return
    if isinstance(value, dict):
        yield from dict.items(value)
        yield from ((key, key) for key in dict.keys(value))
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
    elif container is not None and not isinstance(value, set):
        yield from attributes_of(value).items()
