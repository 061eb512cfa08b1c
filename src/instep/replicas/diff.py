"""Detection of attributes, buffers and containers of a module that changed."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.replicas.clone import MODULE_REGISTRIES, REGISTRIES_AND_HOOKS, reaches_structure
from instep.replicas.object_graph import Contents, is_unchanged, read_contents

_Dict = dict[Any, Any]

_POINTER_SIZE = ctypes.sizeof(ctypes.c_void_p)
_LIST_FIELDS = ("refcount", "type", "size", "items", "allocated")
_ITEMS_OFFSET = _POINTER_SIZE * _LIST_FIELDS.index("items")
_pointer_at = ctypes.c_size_t.from_address


def _item_addresses(items: list[Any]) -> bytes:
    return ctypes.string_at(_pointer_at(id(items) + _ITEMS_OFFSET).value, _POINTER_SIZE * len(items)) if items else b""


def _has_expected_list_layout() -> bool:
    """Whether this interpreter's lists are laid out as assumed; sizes are asked first, before any address is read."""
    if sys.implementation.name != "cpython" or list.__basicsize__ != _POINTER_SIZE * len(_LIST_FIELDS):
        return False
    sample: list[Any] = [object(), [], "text"]
    if _pointer_at(id(sample) + _POINTER_SIZE * _LIST_FIELDS.index("size")).value != len(sample):
        return False
    expected = b"".join(id(item).to_bytes(_POINTER_SIZE, sys.byteorder) for item in sample)
    table = dict(zip("abc", sample, strict=True))
    return _item_addresses(sample) == expected and list(map(id, gc.get_referents(table))) == list(map(id, sample))


CAN_READ_ADDRESSES = _has_expected_list_layout()


class IdentitySnapshot:
    """What some dictionaries held when this was made; holds on to it, so that no identity is used again."""

    def __init__(self, tables: Sequence[_Dict]) -> None:
        self._tables = list(tables)
        self._sizes = [len(table) for table in tables]
        self._items = tuple(chain.from_iterable(map(dict.values, tables)))
        self._referents = gc.get_referents(*tables)
        self._addresses = _item_addresses(self._referents) if CAN_READ_ADDRESSES else b""

    def is_unchanged(self) -> bool:
        """Whether every dictionary still holds the very same objects."""
        if CAN_READ_ADDRESSES:
            return _item_addresses(gc.get_referents(*self._tables)) == self._addresses
        sizes = [len(table) for table in self._tables]
        return sizes == self._sizes and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._items))


Items = tuple[Any, ...]
AnyDict = dict[Any, Any]

_get_requires_grad = attrgetter("requires_grad")


class AttributeChange(NamedTuple):
    """An attribute or buffer that was set: the index of its module, its name, and both values."""

    module_index: int
    name: str
    old: Any
    new: Any
    is_buffer: bool = False


class ContainerChange(NamedTuple):
    """A container that was changed in place, with what it held before and after."""

    container: Any
    before: Contents
    after: Contents


MISSING = object()
"""The old value of an attribute that was not there."""


@dataclass(frozen=True)
class Changes:
    """What a look found: what was set, or that the structure is another."""

    is_structural: bool
    attributes: Sequence[AttributeChange] = ()
    containers: Sequence[ContainerChange] = ()

    def __bool__(self) -> bool:
        return self.is_structural or bool(self.attributes) or bool(self.containers)


NO_CHANGES = Changes(False)
STRUCTURE_CHANGED = Changes(True)


def is_registry_or_hooks(name: str, value: Any) -> bool:
    """Whether a module attribute is a registry or holds hooks that run in a call."""
    return name in REGISTRIES_AND_HOOKS and isinstance(value, dict)


class DictSnapshot(NamedTuple):
    """A dictionary of a module as it was; `name` is None for the module's `__dict__`."""

    module_index: int
    name: str | None
    table: AnyDict
    keys: Items
    values: Items


@dataclass
class ModuleDicts:
    """The dictionaries of one module: those that hold something, and the empty ones, for hooks or not."""

    filled: list[DictSnapshot] = field(default_factory=list)
    empty_registries: list[AnyDict] = field(default_factory=list)
    empty_hooks: list[AnyDict] = field(default_factory=list)

    @classmethod
    def from_module(cls, index: int, module: nn.Module) -> ModuleDicts:
        stock = cls()
        attributes = module.__dict__
        for name, table in ((None, attributes), *((n, t) for n, t in attributes.items() if is_registry_or_hooks(n, t))):
            if table:
                stock.filled.append(DictSnapshot(index, name, table, tuple(table), tuple(table.values())))
            elif name in MODULE_REGISTRIES:
                stock.empty_registries.append(table)
            else:
                stock.empty_hooks.append(table)
        return stock


class ChangeTracker:
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
        self._requires_grad = list(map(_get_requires_grad, tensors))
        self._module_dicts = [ModuleDicts.from_module(index, module) for index, module in enumerate(self._modules)]
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        self._empty_registries = [table for stock in self._module_dicts for table in stock.empty_registries]
        self._empty_hooks = [table for stock in self._module_dicts for table in stock.empty_hooks]
        self._types = list(map(type, self._modules))
        self._identities = IdentitySnapshot([held.table for stock in self._module_dicts for held in stock.filled])

    def diff(self) -> Changes:
        """What changed. Attributes and buffers that were only set anew, and containers that only hold other values,
        are listed; anything else is a new structure."""
        if list(map(_get_requires_grad, self._tensors)) != self._requires_grad:
            return STRUCTURE_CHANGED
        inside = [
            ContainerChange(container, before, read_contents(container))
            for container, before in self._containers
            if not is_unchanged(container, before)
        ]
        if any(map(_is_structural, inside)):
            return STRUCTURE_CHANGED
        if any(self._empty_registries) or any(self._empty_hooks) or list(map(type, self._modules)) != self._types:
            return STRUCTURE_CHANGED
        if self._identities.is_unchanged():
            return Changes(False, (), inside) if inside else NO_CHANGES
        return self._diff_in_detail(inside)

    def _diff_in_detail(self, inside: Sequence[ContainerChange]) -> Changes:
        found: list[AttributeChange] = []
        for stock in self._module_dicts:
            for held in stock.filled:
                if len(held.table) == len(held.keys) and all(map(is_, held.table.values(), held.values)):
                    continue
                changes = _attribute_changes(held) if held.name is None else _buffer_changes(held)
                if changes is None:
                    return STRUCTURE_CHANGED
                found += changes
        return Changes(False, found, inside)

    def accept(self, changes: Changes) -> None:
        """Take what a look found as seen."""
        touched = {change.module_index for change in changes.attributes}
        for index in touched:
            self._module_dicts[index] = ModuleDicts.from_module(index, self._modules[index])
        if touched:
            self._rebuild_index()
        if changes.containers:
            self._containers = [(container, read_contents(container)) for container, _ in self._containers]

    def retarget(
        self, changes: Changes, containers: Sequence[tuple[Any, Contents]] = (), tensors: Sequence[Tensor] = ()
    ) -> None:
        """Take what was set as seen, and watch these containers and tensors from now on."""
        self.accept(Changes(False, changes.attributes))
        self._containers, self._tensors = list(containers), list(tensors)
        self._requires_grad = list(map(_get_requires_grad, tensors))


def _is_structural(change: ContainerChange) -> bool:
    """Whether a module or a trainable parameter came or went."""
    then, now = ({id(item): item for item in held.items} for held in (change.before, change.after))
    return any(
        reaches_structure(held[key]) for held in (then, now) for key in held if key not in then or key not in now
    )


def _attribute_changes(held: DictSnapshot) -> list[AttributeChange] | None:
    """Plain attributes that were set or added; None where something else happened."""
    before = dict(zip(held.keys, held.values, strict=True))
    if any(name not in held.table for name in before):
        return None
    found = []
    for name, value in held.table.items():
        old = before.get(name, MISSING)
        if value is old:
            continue
        if is_registry_or_hooks(name, value) and (value or old is not MISSING):
            return None
        found.append(AttributeChange(held.module_index, name, old, value))
    return found


def _buffer_changes(held: DictSnapshot) -> list[AttributeChange] | None:
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
        found.append(AttributeChange(held.module_index, name, old, new, is_buffer=True))
    return found
