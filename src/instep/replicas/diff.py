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

AnyDict = dict[Any, Any]
Items = tuple[Any, ...]

_POINTER_SIZE = ctypes.sizeof(ctypes.c_void_p)
_LIST_FIELDS = ("refcount", "type", "size", "items", "allocated")
_ITEMS_OFFSET = _POINTER_SIZE * _LIST_FIELDS.index("items")
_pointer_at = ctypes.c_size_t.from_address


def _item_addresses(items: list[Any]) -> bytes:
    return ctypes.string_at(_pointer_at(id(items) + _ITEMS_OFFSET).value, _POINTER_SIZE * len(items)) if items else b""


def _has_expected_list_layout() -> bool:
    """Whether lists of this interpreter have the layout that `_item_addresses` reads."""
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
    """The values of dictionaries, by identity. Comparing the addresses at once is faster than one `is` per value."""

    def __init__(self, tables: Sequence[AnyDict]) -> None:
        self._tables = list(tables)
        self._sizes = [len(table) for table in tables]
        self._items = tuple(chain.from_iterable(map(dict.values, tables)))
        self._referents = gc.get_referents(*tables)
        self._addresses = _item_addresses(self._referents) if CAN_READ_ADDRESSES else b""

    def is_unchanged(self) -> bool:
        """Whether every dictionary still has the same values."""
        if CAN_READ_ADDRESSES:
            return _item_addresses(gc.get_referents(*self._tables)) == self._addresses
        sizes = [len(table) for table in self._tables]
        return sizes == self._sizes and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._items))


_get_requires_grad = attrgetter("requires_grad")


class AttributeChange(NamedTuple):
    """An attribute or buffer that was set."""

    module_index: int
    name: str
    old: Any
    new: Any
    is_buffer: bool = False


class ContainerChange(NamedTuple):
    """A container that was changed in place, with its contents before and after."""

    container: Any
    before: Contents
    after: Contents


MISSING = object()
"""The old value of an attribute that did not exist."""


@dataclass(frozen=True)
class Changes:
    """Attributes, buffers and containers that changed, or the fact that the structure changed."""

    is_structural: bool
    attributes: Sequence[AttributeChange] = ()
    containers: Sequence[ContainerChange] = ()

    def __bool__(self) -> bool:
        return self.is_structural or bool(self.attributes) or bool(self.containers)


NO_CHANGES = Changes(False)
STRUCTURE_CHANGED = Changes(True)


def is_registry_or_hooks(name: str, value: Any) -> bool:
    """Whether a module attribute is a registry or a table of hooks that run in a call."""
    return name in REGISTRIES_AND_HOOKS and isinstance(value, dict)


class DictSnapshot(NamedTuple):
    """The contents of a dictionary of a module. `name` is None for its `__dict__`."""

    module_index: int
    name: str | None
    table: AnyDict
    keys: Items
    values: Items


@dataclass
class ModuleDicts:
    """The dictionaries of one module."""

    filled: list[DictSnapshot] = field(default_factory=list)
    empty_registries: list[AnyDict] = field(default_factory=list)
    empty_hooks: list[AnyDict] = field(default_factory=list)

    @classmethod
    def from_module(cls, index: int, module: nn.Module) -> ModuleDicts:
        dicts = cls()
        attributes = module.__dict__
        for name, table in ((None, attributes), *((n, t) for n, t in attributes.items() if is_registry_or_hooks(n, t))):
            if table:
                dicts.filled.append(DictSnapshot(index, name, table, tuple(table), tuple(table.values())))
            elif name in MODULE_REGISTRIES:
                dicts.empty_registries.append(table)
            else:
                dicts.empty_hooks.append(table)
        return dicts


class ChangeTracker:
    """Finds changes of modules since it was created or last updated."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        containers: Sequence[tuple[Any, Contents]] = (),
        tensors: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            modules: The modules to track.
            containers: Containers to track, with their contents.
            tensors: Tensors whose `requires_grad` is part of the structure.
        """
        self._modules = list(modules)
        self._containers = list(containers)
        self._tensors = list(tensors)
        self._requires_grad = list(map(_get_requires_grad, tensors))
        self._module_dicts = [ModuleDicts.from_module(index, module) for index, module in enumerate(self._modules)]
        self._rebuild_index()

    def _rebuild_index(self) -> None:
        self._empty_registries = [table for dicts in self._module_dicts for table in dicts.empty_registries]
        self._empty_hooks = [table for dicts in self._module_dicts for table in dicts.empty_hooks]
        self._types = list(map(type, self._modules))
        self._identities = IdentitySnapshot([one.table for dicts in self._module_dicts for one in dicts.filled])

    def diff(self) -> Changes:
        """The changes since the last update.

        Attributes and buffers that were set, and containers with other contents, are listed. Other changes are changes
        of structure: modules, parameters, hooks, deleted attributes, `requires_grad`.
        """
        if list(map(_get_requires_grad, self._tensors)) != self._requires_grad:
            return STRUCTURE_CHANGED
        containers = [
            ContainerChange(container, before, read_contents(container))
            for container, before in self._containers
            if not is_unchanged(container, before)
        ]
        if any(map(_is_structural, containers)):
            return STRUCTURE_CHANGED
        if any(self._empty_registries) or any(self._empty_hooks) or list(map(type, self._modules)) != self._types:
            return STRUCTURE_CHANGED
        if self._identities.is_unchanged():
            return Changes(False, (), containers) if containers else NO_CHANGES
        return self._diff_in_detail(containers)

    def _diff_in_detail(self, containers: Sequence[ContainerChange]) -> Changes:
        found: list[AttributeChange] = []
        for snapshot in (snapshot for dicts in self._module_dicts for snapshot in dicts.filled):
            if len(snapshot.table) == len(snapshot.keys) and all(map(is_, snapshot.table.values(), snapshot.values)):
                continue
            changes = _attribute_changes(snapshot) if snapshot.name is None else _buffer_changes(snapshot)
            if changes is None:
                return STRUCTURE_CHANGED
            found += changes
        return Changes(False, found, containers)

    def accept(self, changes: Changes) -> None:
        """Update the tracker: these changes are known."""
        indices = {change.module_index for change in changes.attributes}
        for index in indices:
            self._module_dicts[index] = ModuleDicts.from_module(index, self._modules[index])
        if indices:
            self._rebuild_index()
        if changes.containers:
            self._containers = [(container, read_contents(container)) for container, _ in self._containers]

    def retarget(
        self, changes: Changes, containers: Sequence[tuple[Any, Contents]] = (), tensors: Sequence[Tensor] = ()
    ) -> None:
        """Update the tracker, and track these containers and tensors from now on."""
        self.accept(Changes(False, changes.attributes))
        self._containers, self._tensors = list(containers), list(tensors)
        self._requires_grad = list(map(_get_requires_grad, tensors))


def _is_structural(change: ContainerChange) -> bool:
    """Whether a module or a trainable parameter was added or removed."""
    before, after = ({id(item): item for item in contents.items} for contents in (change.before, change.after))
    return any(reaches_structure({**before, **after}[key]) for key in before.keys() ^ after.keys())


def _attribute_changes(snapshot: DictSnapshot) -> list[AttributeChange] | None:
    """Attributes that were set or added; None for any other change."""
    before = dict(zip(snapshot.keys, snapshot.values, strict=True))
    if any(name not in snapshot.table for name in before):
        return None
    found = []
    for name, value in snapshot.table.items():
        old = before.get(name, MISSING)
        if value is old:
            continue
        if is_registry_or_hooks(name, value) and (value or old is not MISSING):
            return None
        found.append(AttributeChange(snapshot.module_index, name, old, value))
    return found


def _buffer_changes(snapshot: DictSnapshot) -> list[AttributeChange] | None:
    """Buffers that were set; None for any other change, or in another registry."""
    if snapshot.name != "_buffers" or tuple(snapshot.table) != snapshot.keys:
        return None
    found = []
    for name, old in zip(snapshot.keys, snapshot.values, strict=True):
        new = snapshot.table[name]
        if new is old:
            continue
        if any(tensor is not None and tensor.requires_grad for tensor in (old, new)):
            return None
        found.append(AttributeChange(snapshot.module_index, name, old, new, is_buffer=True))
    return found
