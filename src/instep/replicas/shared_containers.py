"""Containers of the source module that all replicas share, and detection of changes to them."""

from __future__ import annotations

import argparse
import functools
import sys
import types
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from instep.replicas.clone import Cloner
from instep.replicas.object_graph import (
    Contents,
    References,
    is_unchanged,
    mutable_storage,
    read_contents,
    references_of,
    walk,
    write_contents,
)

# Attributes of `nn.Module` itself, and lists that layers of torch create once.
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__) | {
    "_compiled_call_impl",
    "_reversed_padding_repeated_twice",
    "_all_weights",
    "_flat_weights",
    "_flat_weights_names",
    "_flat_weight_refs",
}


class StatePath(NamedTuple):
    """The location of a container or an entry: the dotted name of an attribute, and the keys from there."""

    attribute: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.attribute, *self.keys))

    def child(self, key: Any) -> StatePath:
        return StatePath(self.attribute, (*self.keys, str(key)))

    def without_indices(self) -> StatePath:
        """The path to name in a rule: the list instead of its entry, whose index differs from call to call."""
        keys = self.keys
        while keys and keys[-1].isdigit():
            keys = keys[:-1]
        return StatePath(self.attribute, keys)


class SharedContainers:
    """The containers that can be reached from the attributes of modules, with the contents of those not copied."""

    def __init__(self, modules: Sequence[nn.Module], names: Sequence[str], cloner: Cloner) -> None:
        self.paths: dict[int, StatePath] = {}
        """The path of each container, by its id."""
        self._shared: list[tuple[Any, Contents]] = []
        roots = (
            (f"{name}.{attribute}" if name else attribute, value)
            for module, name in zip(modules, names, strict=True)
            for attribute, value in module.__dict__.items()
            if attribute not in _TORCH_ATTRIBUTES
        )
        for visit in walk(roots, _references):
            container = tracked_storage(visit.value)
            if container is not None:
                attribute, *keys = visit.path
                self.paths.setdefault(id(container), StatePath(attribute, tuple(map(str, keys))))
                if not cloner.has_clone(visit.value):
                    self._shared.append((container, read_contents(container)))

    def at_paths(self, paths: Sequence[str]) -> list[Any]:
        """The shared containers at some paths."""
        return [container for container, _ in self._shared if paths and str(self.paths[id(container)]) in paths]

    def changed(self) -> list[Any]:
        """The shared containers whose contents have changed."""
        return [container for container, contents in self._shared if not is_unchanged(container, contents)]

    def restore(self) -> list[Any]:
        """Restore shared containers. Returns those that had changed."""
        found = [(container, contents) for container, contents in self._shared if not is_unchanged(container, contents)]
        for container, contents in found:
            write_contents(container, contents)
        return [container for container, _ in found]


def tracked_storage(value: Any) -> Any:
    """The storage of a container or of an object of a user's class (see `mutable_storage`); None for other objects."""
    cls: Any = type(value)
    is_container = isinstance(value, (dict, list, deque, set, np.ndarray))
    return mutable_storage(value) if is_container or _is_user_class(cls) else None


def _references(value: Any) -> References:
    """References of containers, of the user's functions and of objects of the user's classes."""
    if isinstance(value, types.FunctionType):
        return () if (value.__module__ or "").startswith("torch") else references_of(value)
    is_followed = isinstance(value, (tuple, frozenset, types.MethodType, functools.partial, np.ndarray))
    return references_of(value) if is_followed or tracked_storage(value) is not None else ()


@functools.cache
def _is_user_class(cls: Any) -> bool:
    """Whether a class is not one of Python, torch or numpy, and its instances have attributes."""
    if cls in (types.SimpleNamespace, argparse.Namespace):
        return True
    root = (cls.__module__ or "").partition(".")[0]
    if root in sys.stdlib_module_names and root not in ("__main__", "collections"):
        return False
    if root in ("torch", "numpy", "builtins") or issubclass(cls, (np.ndarray, BaseException, tuple, frozenset)):
        return False
    return bool(cls.__dictoffset__) or any("__slots__" in base.__dict__ for base in cls.__mro__[:-1])
