"""Seeing what changed on a module since it was last looked at.

A look costs well under a microsecond a module: one pass over the identities of everything that the modules hold. Values
of parameters and buffers are followed elsewhere, because neither identity nor `_version` proves them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.replicas.clone import REGISTRIES
from instep.replicas.identity import Holdings

Items = tuple[Any, ...]
Table = dict[Any, Any]


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


def is_table(name: str, value: Any) -> bool:
    """Whether a module attribute is one of the dictionaries that `nn.Module` keeps for itself."""
    return isinstance(value, dict) and (name in REGISTRIES or (name.startswith("_") and name.endswith("_hooks")))


class Watch:
    """Modules as they were when the watch was made or last brought up to date."""

    def __init__(self, modules: Sequence[nn.Module], containers: Sequence[tuple[Any, Items]] = ()) -> None:
        self.modules = list(modules)
        self._containers = list(containers)
        self._parameters: list[Tensor] = [
            parameter for module in modules for parameter in module._parameters.values() if parameter is not None
        ]
        self._take_stock()

    def _take_stock(self) -> None:
        """Note every dictionary of every module, and what it holds."""
        self._tables: list[Table] = []
        self._owners: list[tuple[int, str | None]] = []  # a table's module, and its name if it is not the `__dict__`
        self._empty: list[Table] = []
        for index, module in enumerate(self.modules):
            attributes = module.__dict__
            self._note(attributes, index, None)
            for name, table in attributes.items():
                if is_table(name, table):
                    if table:
                        self._note(table, index, name)
                    else:
                        self._empty.append(table)
        self._held: list[Items] = [tuple(table.values()) for table in self._tables]
        self._names: list[Items] = [tuple(table) for table in self._tables]
        self._holdings = Holdings(self._tables)
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _note(self, table: Table, index: int, name: str | None) -> None:
        self._tables.append(table)
        self._owners.append((index, name))

    def look(self) -> Changes:
        """What changed. Attributes and buffers that were only set anew are listed; anything else is a new structure."""
        if [parameter.requires_grad for parameter in self._parameters] != self._trainable:
            return STRUCTURE
        for container, items in self._containers:
            now = container.values() if isinstance(container, dict) else container
            if len(container) != len(items) or not all(map(is_, now, items)):
                return STRUCTURE
        if any(self._empty):
            return STRUCTURE
        return NOTHING if self._holdings.same() else self._look_closely()

    def _look_closely(self) -> Changes:
        found: list[Set] = []
        for (index, name), table, names, values in zip(
            self._owners, self._tables, self._names, self._held, strict=True
        ):
            if len(table) == len(names) and all(map(is_, table.values(), values)):
                continue
            before = dict(zip(names, values, strict=True))
            if name is None:
                changes = _attributes_set(index, table, before)
            else:
                changes = _buffers_set(index, table, before) if name == "_buffers" else None
            if changes is None:
                return STRUCTURE
            found += changes
        return Changes(False, found)

    def update(self, changes: Changes) -> None:
        """Take what a look found as seen."""
        if changes:
            self._take_stock()


def _attributes_set(index: int, attributes: Table, before: Table) -> list[Set] | None:
    """Plain attributes that were set or added; None where something else happened."""
    if any(name not in attributes for name in before):
        return None
    found = []
    for name, value in attributes.items():
        old = before.get(name, MISSING)
        if value is old:
            continue
        if is_table(name, value) and (value or old is not MISSING):
            return None
        found.append(Set(index, name, old, value))
    return found


def _buffers_set(index: int, table: Table, before: Table) -> list[Set] | None:
    """Buffers that are another tensor now; None for any other change of the registry."""
    if list(table) != list(before):
        return None
    found = []
    for name, old in before.items():
        new = table[name]
        if new is old:
            continue
        if old is None or new is None or old.requires_grad or new.requires_grad:
            return None
        found.append(Set(index, name, old, new, buffer=True))
    return found
