"""Seeing what changed on a module since it was last looked at.

A look costs about half a microsecond a module: one pass over the identities of everything that the modules hold. Values
of parameters and buffers are followed elsewhere, because neither identity nor `_version` proves them unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from instep.replicas.clone import REGISTRIES, TABLES, holds_structure
from instep.replicas.contents import Contents, contents_of, holds_still
from instep.replicas.identity import Holdings

Items = tuple[Any, ...]
Table = dict[Any, Any]

_needs_gradient = attrgetter("requires_grad")


class Set(NamedTuple):
    """An attribute or buffer that was set: the index of its module, its name, and both values."""

    module: int
    name: str
    old: Any
    new: Any
    buffer: bool = False


class Inside(NamedTuple):
    """A container that was changed in place, with what it held before and after."""

    container: Any
    before: Contents
    after: Contents


MISSING = object()
"""The old value of an attribute that was not there."""


@dataclass(frozen=True)
class Changes:
    """What a look found: what was set, or that the structure is another."""

    structure: bool
    attributes: Sequence[Set] = ()
    contents: Sequence[Inside] = ()

    def __bool__(self) -> bool:
        return self.structure or bool(self.attributes) or bool(self.contents)


NOTHING = Changes(False)
STRUCTURE = Changes(True)


def is_table(name: str, value: Any) -> bool:
    """Whether a module attribute is a registry or holds hooks that run in a call."""
    return name in TABLES and isinstance(value, dict)


class Held(NamedTuple):
    """A dictionary of a module as it was; `name` is None for the module's `__dict__`."""

    module: int
    name: str | None
    table: Table
    keys: Items
    values: Items


@dataclass
class Stock:
    """The dictionaries of one module: those that hold something, and the empty ones, for hooks or not."""

    held: list[Held] = field(default_factory=list)
    empty: list[Table] = field(default_factory=list)
    no_hooks: list[Table] = field(default_factory=list)

    @classmethod
    def of(cls, index: int, module: nn.Module) -> Stock:
        stock = cls()
        attributes = module.__dict__
        for name, table in ((None, attributes), *((n, t) for n, t in attributes.items() if is_table(n, t))):
            if table:
                stock.held.append(Held(index, name, table, tuple(table), tuple(table.values())))
            elif name in REGISTRIES:
                stock.empty.append(table)
            else:
                stock.no_hooks.append(table)
        return stock


class Watch:
    """Modules as they were when the watch was made or last brought up to date.

    `containers` are lists, dictionaries and the like, with what they held; `tensors` those whose `requires_grad`
    belongs to the structure.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        containers: Sequence[tuple[Any, Contents]] = (),
        tensors: Sequence[Tensor] = (),
    ) -> None:
        self._modules = list(modules)
        self._containers = list(containers)
        self._tensors = list(tensors)
        self._trainable = list(map(_needs_gradient, tensors))
        self._stocks = [Stock.of(index, module) for index, module in enumerate(self._modules)]
        self._add_up()

    def _add_up(self) -> None:
        self._empty = [table for stock in self._stocks for table in stock.empty]
        self._no_hooks = [table for stock in self._stocks for table in stock.no_hooks]
        self._hooks_made = RemovableHandle.next_id
        self._types = list(map(type, self._modules))
        self._holdings = Holdings([held.table for stock in self._stocks for held in stock.held])

    def look(self) -> Changes:
        """What changed. Attributes and buffers that were only set anew, and containers that only hold other values,
        are listed; anything else is a new structure."""
        if list(map(_needs_gradient, self._tensors)) != self._trainable:
            return STRUCTURE
        inside = [
            Inside(container, before, contents_of(container))
            for container, before in self._containers
            if not holds_still(container, before)
        ]
        if any(map(_is_structure, inside)):
            return STRUCTURE
        if any(self._empty) or list(map(type, self._modules)) != self._types:
            return STRUCTURE
        if RemovableHandle.next_id != self._hooks_made:  # torch counts every hook that is registered anywhere
            self._hooks_made = RemovableHandle.next_id
            if any(self._no_hooks):
                self._hooks_made = -1
                return STRUCTURE
        if self._holdings.same():
            return Changes(False, (), inside) if inside else NOTHING
        return self._look_closely(inside)

    def _look_closely(self, inside: Sequence[Inside]) -> Changes:
        found: list[Set] = []
        for stock in self._stocks:
            for held in stock.held:
                if len(held.table) == len(held.keys) and all(map(is_, held.table.values(), held.values)):
                    continue
                changes = _attributes_set(held) if held.name is None else _buffers_set(held)
                if changes is None:
                    return STRUCTURE
                found += changes
        return Changes(False, found, inside)

    def update(self, changes: Changes) -> None:
        """Take what a look found as seen."""
        touched = {change.module for change in changes.attributes}
        for index in touched:
            self._stocks[index] = Stock.of(index, self._modules[index])
        if touched:
            self._add_up()
        if changes.contents:
            self._containers = [(container, contents_of(container)) for container, _ in self._containers]

    def renew(
        self, changes: Changes, containers: Sequence[tuple[Any, Contents]] = (), tensors: Sequence[Tensor] = ()
    ) -> None:
        """Take what was set as seen, and watch these containers and tensors from now on."""
        self.update(Changes(False, changes.attributes))
        self._containers, self._tensors = list(containers), list(tensors)
        self._trainable = list(map(_needs_gradient, tensors))


def _is_structure(change: Inside) -> bool:
    """Whether a module or a trainable parameter came or went."""
    then, now = ({id(item): item for item in held.items} for held in (change.before, change.after))
    return any(holds_structure(held[key]) for held in (then, now) for key in held if key not in then or key not in now)


def _attributes_set(held: Held) -> list[Set] | None:
    """Plain attributes that were set or added; None where something else happened."""
    before = dict(zip(held.keys, held.values, strict=True))
    if any(name not in held.table for name in before):
        return None
    found = []
    for name, value in held.table.items():
        old = before.get(name, MISSING)
        if value is old:
            continue
        if is_table(name, value) and (value or old is not MISSING):
            return None
        found.append(Set(held.module, name, old, value))
    return found


def _buffers_set(held: Held) -> list[Set] | None:
    """Buffers that are another tensor now; None for any other change, or in another registry."""
    if held.name != "_buffers" or tuple(held.table) != held.keys:
        return None
    found = []
    for name, old in zip(held.keys, held.values, strict=True):
        new = held.table[name]
        if new is old:
            continue
        if any(tensor is not None and tensor.requires_grad for tensor in (old, new)):
            return None
        found.append(Set(held.module, name, old, new, buffer=True))
    return found
