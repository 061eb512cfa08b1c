"""A fingerprint of the source module's configuration: modes, layers and plain attributes."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from instep.replicas.clone import WEAK_PROXIES
from instep.replicas.object_graph import is_atomic
from instep.structure.tree import SCALARS

_MAX_FINGERPRINTS = 256
_BASE_ATTRIBUTES = frozenset(nn.Module().__dict__) - {"training"}


class ConfigFingerprint:
    """Assigns an id to each configuration that the source module has had."""

    def __init__(self) -> None:
        self.current = 0
        """The id of the current configuration."""
        self._ids: dict[Any, tuple[int, list[Any]]] = {}
        """Configuration to its id and the objects compared by identity, kept alive so that ids stay unique."""
        self._serials: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._count = itertools.count()
        self._state_attributes: set[tuple[int, str]] = set()
        self._edit_count = 0

    def update(self, modules: Iterable[nn.Module], edited: bool = False) -> None:
        """Recompute `current` after a change. `edited` marks a change inside an object that the source holds."""
        self._edit_count += edited
        key, objects = self._key(modules)
        if key not in self._ids and len(self._ids) >= _MAX_FINGERPRINTS:
            self._ids.clear()
        if key not in self._ids:
            self._ids[key] = next(self._count), objects
        self.current = self._ids[key][0]

    def _key(self, modules: Iterable[nn.Module]) -> tuple[Any, list[Any]]:
        objects: list[Any] = []
        return (self._edit_count, *[self._describe(module, objects) for module in modules]), objects

    def exclude_state(self, attributes: Iterable[tuple[nn.Module, str]], modules: Iterable[nn.Module]) -> None:
        """Exclude attributes that `forward` sets: they are state, not configuration."""
        new = {(self._serial(module), name) for module, name in attributes} - self._state_attributes
        if new:
            self._state_attributes |= new
            key, objects = self._key(modules)
            self._ids[key] = self.current, objects

    def _serial(self, module: nn.Module) -> int:
        if module not in self._serials:
            self._serials[module] = next(self._count)
        return self._serials[module]

    def _describe(self, module: nn.Module, objects: list[Any]) -> tuple[Any, ...]:
        serial = self._serial(module)
        found: list[Any] = [serial, type(module)]
        for name, value in module.__dict__.items():
            if name in _BASE_ATTRIBUTES or (serial, name) in self._state_attributes or isinstance(value, Tensor):
                continue
            atomic = is_atomic(value)
            if atomic and isinstance(value, float):
                continue
            if (atomic and isinstance(value, SCALARS)) or isinstance(value, enum.Enum):
                found.append((name, type(value), value))
            elif isinstance(value, nn.Module) and type(value) not in WEAK_PROXIES:
                found.append((name, self._serial(value)))
            else:
                objects.append(value)
                found.append((name, id(value)))
        return tuple(found)
