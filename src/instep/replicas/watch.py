"""Seeing what changed on a module since it was last looked at.

A look costs about a microsecond a module: it compares identities, never values. Values of parameters and buffers are
followed elsewhere, because neither identity nor `_version` proves that they are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.replicas.clone import REGISTRIES

Items = tuple[Any, ...]


@dataclass(slots=True)
class _Seen:
    """One module as it was: its attributes, and the content of its registries and hook tables."""

    module: nn.Module
    names: Items
    values: Items
    tables: list[tuple[dict[Any, Any], Items, Items]]

    @classmethod
    def of(cls, module: nn.Module) -> _Seen:
        attributes = module.__dict__
        tables = [
            (table, tuple(table), tuple(table.values()))
            for name, table in attributes.items()
            if is_table(name, table) and (table or name in REGISTRIES)
        ]
        return cls(module, tuple(attributes), tuple(attributes.values()), tables)


def is_table(name: str, value: Any) -> bool:
    """Whether a module attribute is one of the dictionaries that `nn.Module` keeps for itself."""
    return isinstance(value, dict) and (name in REGISTRIES or (name.startswith("_") and name.endswith("_hooks")))


class Set(NamedTuple):
    """An attribute or buffer that was set: the index of its module, its name, and both values."""

    module: int
    name: str
    old: Any
    new: Any
    buffer: bool = False


MISSING = object()
"""The old value of an attribute that was not there."""


@dataclass(frozen=True)
class Changes:
    """What a look found: what was set, or that the structure is another."""

    structure: bool
    attributes: Sequence[Set] = ()

    def __bool__(self) -> bool:
        return self.structure or bool(self.attributes)


NOTHING = Changes(False)
STRUCTURE = Changes(True)


class Watch:
    """A module tree as it was when the watch was made or last brought up to date."""

    def __init__(self, root: nn.Module, containers: Sequence[tuple[Any, Items]] = ()) -> None:
        self.modules = list(root.modules())
        self._seen = [_Seen.of(module) for module in self.modules]
        self._containers = list(containers)
        self._parameters: list[Tensor] = list(root.parameters())
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def look(self) -> Changes:
        """What changed. Attributes that were only set anew are listed; anything else means another structure."""
        found: list[Set] = []
        for index, seen in enumerate(self._seen):
            attributes = seen.module.__dict__
            same = len(attributes) == len(seen.names) and all(map(is_, attributes.values(), seen.values))
            if not same and not self._set_anew(index, seen, attributes, found):
                return STRUCTURE
            for table, keys, values in seen.tables:
                same = len(table) == len(keys) and all(map(is_, table.values(), values))
                if not same and not self._set_buffers(index, seen, table, keys, values, found):
                    return STRUCTURE
        if [parameter.requires_grad for parameter in self._parameters] != self._trainable:
            return STRUCTURE
        for container, items in self._containers:
            now = container.values() if isinstance(container, dict) else container
            if len(container) != len(items) or not all(map(is_, now, items)):
                return STRUCTURE
        return Changes(False, found) if found else NOTHING

    def _set_anew(self, index: int, seen: _Seen, attributes: dict[str, Any], found: list[Any]) -> bool:
        """Note plain attributes that were set or added; False where something else happened."""
        before = dict(zip(seen.names, seen.values, strict=True))
        if any(name not in attributes for name in before):
            return False
        for name, value in attributes.items():
            old = before.get(name, MISSING)
            if value is old:
                continue
            if is_table(name, value) and (value or old is not MISSING):
                return False
            found.append(Set(index, name, old, value))
        return True

    def _set_buffers(
        self, index: int, seen: _Seen, table: dict[Any, Any], keys: Items, values: Items, found: list[Any]
    ) -> bool:
        """Note buffers that are another tensor now; False for any other change of a registry."""
        if table is not seen.module._buffers or tuple(table) != keys:
            return False
        for name, old in zip(keys, values, strict=True):
            new = table[name]
            if new is not old:
                if old is None or new is None or old.requires_grad or new.requires_grad:
                    return False
                found.append(Set(index, name, old, new, buffer=True))
        return True

    def update(self, changes: Changes) -> None:
        """Take what a look found as seen."""
        for index in {change.module for change in changes.attributes}:
            self._seen[index] = _Seen.of(self.modules[index])
