"""Which module a source is at a call: the same objects with other settings compute something else.

What was learned about a module holds for its modes, layers and plain attributes as they were: another criterion,
`model.center = True` or `model.head.eval()` make it another one. Tensors, fractions (the weight of a term, which many
anneal at each step) and what `forward` itself sets do not.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from instep.replicas.clone import PROXIES
from instep.replicas.opaque import is_opaque
from instep.structure.tree import SCALARS

_MOST = 256
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}


class Kinds:
    """Numbers the kinds that one source module has been of."""

    def __init__(self) -> None:
        self.now = 0
        """The kind it is of."""
        self._numbers: dict[Any, tuple[int, list[Any]]] = {}
        """By what tells kinds apart: the number, and objects told by their address, which is then not used again."""
        self._serials: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._count = itertools.count()
        self._state: set[tuple[int, str]] = set()
        self._edits = 0

    def look(self, modules: Iterable[nn.Module], edited: bool = False) -> None:
        """Something has changed on the source, perhaps inside an object that it holds: see which kind it is of now."""
        self._edits += edited
        key, held = self._key(modules)
        if key not in self._numbers and len(self._numbers) >= _MOST:
            self._numbers.clear()
        if key not in self._numbers:
            self._numbers[key] = next(self._count), held
        self.now = self._numbers[key][0]

    def _key(self, modules: Iterable[nn.Module]) -> tuple[Any, list[Any]]:
        held: list[Any] = []
        return (self._edits, *[self._describe(module, held) for module in modules]), held

    def are_state(self, attributes: Iterable[tuple[nn.Module, str]], modules: Iterable[nn.Module]) -> None:
        """Attributes that are set by `forward`, and so no settings of the module's: without them it is the same."""
        new = {(self._serial(module), name) for module, name in attributes} - self._state
        if new:
            self._state |= new
            key, held = self._key(modules)
            self._numbers[key] = self.now, held

    def _serial(self, module: nn.Module) -> int:
        if module not in self._serials:
            self._serials[module] = next(self._count)
        return self._serials[module]

    def _describe(self, module: nn.Module, held: list[Any]) -> tuple[Any, ...]:
        serial = self._serial(module)
        found: list[Any] = [serial, type(module)]
        for name, value in module.__dict__.items():
            if name in _OF_EVERY_MODULE or (serial, name) in self._state or isinstance(value, Tensor):
                continue
            bare = is_opaque(value)
            if bare and isinstance(value, float):
                continue
            if (bare and isinstance(value, SCALARS)) or isinstance(value, enum.Enum):
                found.append((name, type(value), value))
            elif isinstance(value, nn.Module) and type(value) not in PROXIES:
                found.append((name, self._serial(value)))
            else:
                held.append(value)
                found.append((name, id(value)))
        return tuple(found)
