"""Copying of the source module for a replica. Objects that lead to no tensor or module are shared."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from instep.replicas.caller_only import CallerOnly, is_caller_only
from instep.replicas.object_graph import (
    EMPTY_CELL,
    Contents,
    attribute_storage,
    cell_contents,
    extra_attributes,
    is_atomic,
    is_numeric_array,
    read_contents,
    walk,
    write_contents,
)
from instep.structure.tree import attributes_of, shallow_copy

TensorMaker = Callable[[Tensor], Tensor]
GeneratorMaker = Callable[[torch.Generator], torch.Generator]

WEAK_PROXIES: tuple[Any, ...] = (weakref.ProxyType, weakref.CallableProxyType)


class ModuleWrapper(ABC):
    """A wrapper around a module. Replicas have a copy of the module in its place."""

    module: nn.Module

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the wrapper."""


@dataclass
class CloneScope:
    """The copies made for one value. They are forgotten together."""

    memo: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """By id of the original: the original, which keeps the id valid, and its copy."""
    containers: list[tuple[Any, Contents, Any]] = field(default_factory=list)
    """Containers that were copied: the original, its contents then, and the copy."""
    generators: list[tuple[torch.Generator, torch.Generator]] = field(default_factory=list)
    """(original, copy) of each generator."""


class Cloner:
    """Copies objects of one source module for one replica. Each object is copied once."""

    def __init__(
        self,
        clone_tensor: TensorMaker,
        clone_generator: GeneratorMaker,
        *,
        private_containers: Mapping[int, Any] | None = None,
        device_pair: tuple[torch.device, torch.device] | None = None,
        caller_only_accesses: list[Any] | None = None,
    ) -> None:
        """
        Args:
            clone_tensor: Creates the replica's tensor for a tensor of the source.
            clone_generator: Creates the replica's generator for a generator of the source.
            private_containers: By id, containers that are copied although they hold no tensors, because `forward`
                changes them.
            device_pair: The source's device and the replica's. Attributes that are the first become the second.
            caller_only_accesses: Receives the objects that a replica used and only the caller may use.
        """
        self._clone_tensor = clone_tensor
        self._clone_generator = clone_generator
        self._private_containers = private_containers or {}
        self._device_pair = device_pair
        self._caller_only_accesses = [] if caller_only_accesses is None else caller_only_accesses
        self._root_scope = self._scope = CloneScope()
        self._scopes: dict[Any, CloneScope] = {}
        self._shareable: dict[int, Any] = {}
        self._depth = 0
        self.shares_generator = False
        """Whether replicas share a generator because the object that holds it cannot be copied."""
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        """(original, copy) of each module, registered or not."""

    @property
    def containers(self) -> list[tuple[Any, Contents, Any]]:
        """The containers that were copied: the original, its contents then, and the copy."""
        return [entry for scope in self._all_scopes() for entry in scope.containers]

    @property
    def generators(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """(original, copy) of each generator."""
        if not self._scopes:  # the common case
            return self._root_scope.generators.copy()
        return [entry for scope in self._all_scopes() for entry in scope.generators]

    def _all_scopes(self) -> list[CloneScope]:
        return [self._root_scope, *self._scopes.values()]

    def clone(self, value: Any) -> Any:
        """The replica's copy of a value, or the value itself if it can be shared."""
        entry = self._lookup(value)
        if entry is not None:
            return entry[1]
        if is_atomic(value):
            return value
        if type(value) in WEAK_PROXIES:  # its `__class__` is that of the referent
            return self._remember(value, weakref.proxy(self.clone(value.__init__.__self__)))
        self._depth += 1
        try:
            return self._clone_new(value)
        finally:
            self._depth -= 1
            if not self._depth:
                self._shareable.clear()

    def _lookup(self, value: Any) -> tuple[Any, Any] | None:
        entry = self._root_scope.memo.get(id(value)) or self._scope.memo.get(id(value))
        if entry is None and self._scopes:
            entry = next((scope.memo[id(value)] for scope in self._scopes.values() if id(value) in scope.memo), None)
        return entry

    def reclone_attribute(self, key: Any, name: str, value: Any) -> tuple[Any, list[Any]]:
        """Copy an attribute that was set after the module was copied; `key` identifies the attribute.

        Also returns the copies that were made for its previous value.
        """
        before = self._scopes.pop(key, CloneScope())
        self._scope = CloneScope()
        try:
            copy = self.clone_attribute(name, value)
            if self._scope.memo:
                self._scopes[key] = self._scope
        finally:
            self._scope = self._root_scope
        return copy, [old for _, old in before.memo.values()]

    def has_clone(self, value: Any) -> bool:
        """Whether a value was copied, not shared."""
        entry = self._lookup(value)
        return entry is not None and entry[1] is not value

    def sources_by_clone_id(self) -> dict[int, Any]:
        """The original of each copy, by the id of the copy."""
        return {id(copy): source for scope in self._all_scopes() for source, copy in scope.memo.values()}

    def update_container(self, source: Any, copy: Any) -> list[Any]:
        """Update the copy of a container to the contents of the original. Returns the copies that are not used now."""
        key = ("container", id(source))
        before, contents = self._scopes.pop(key, CloneScope()), read_contents(source)
        kept = {id(item) for item in contents.items if isinstance(item, Tensor)}
        self._scope = CloneScope({number: pair for number, pair in before.memo.items() if number in kept})
        try:
            keys = tuple(map(self.clone, contents.keys))
            write_contents(copy, Contents(keys, tuple(map(self.clone, contents.items))))
            self._scope.containers.append((source, contents, copy))
            self._scopes[key] = self._scope
        finally:
            self._scope = self._root_scope
        for scope in self._all_scopes():
            scope.containers = [e for e in scope.containers if e[2] is not copy or e[1] is contents]
        return [old for number, (_, old) in before.memo.items() if number not in kept]

    def _clone_new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._remember(value, self._clone_tensor(value))
        if isinstance(value, torch.Generator):
            generator = self._remember(value, self._clone_generator(value))
            self._scope.generators.append((value, generator))
            return generator
        if isinstance(value, ModuleWrapper):
            return self._remember(value, self.clone(value.module))
        if isinstance(value, nn.Module):
            return self._clone_module(value)
        if is_caller_only(value):
            return self._remember(value, CallerOnly(value, self._caller_only_accesses))
        return self._rebuild(value) if self._reaches_source(value) else value

    def _remember(self, source: Any, copy: Any) -> Any:
        self._scope.memo[id(source)] = (source, copy)
        return copy

    def _clone_module(self, source: nn.Module) -> nn.Module:
        module: nn.Module = self._remember(source, source.__class__.__new__(source.__class__))
        self.modules.append((source, module))
        for name, value in source.__dict__.items():
            module.__dict__[name] = self.clone_attribute(name, value)
        return module

    def clone_attribute(self, name: str, value: Any) -> Any:
        """Copy one entry of a module's `__dict__`. Registries and hook tables are always copied."""
        if self._device_pair is not None and type(value) is torch.device and value == self._device_pair[0]:
            return self._device_pair[1]
        if name in REGISTRIES_AND_HOOKS and isinstance(value, dict):
            return _rebuild_dict(value, [(key, self.clone(item)) for key, item in value.items()])
        return self.clone(value)

    def _rebuild(self, value: Any) -> Any:
        method = _CLONE_METHODS.get(type(value))
        if method is not None:
            return method(self, value)
        if is_numeric_array(value):
            return self._clone_array(value)
        if isinstance(value, (dict, list, set, deque)):
            return self._clone_container(value)
        if isinstance(value, (tuple, frozenset)):
            return self._clone_tuple(value)
        return self._clone_object(value)

    def _clone_container(self, value: Any) -> Any:
        """Copy a list, deque, set or dictionary, and the attributes of a subclass."""
        copy = self._remember(value, _empty_like(value))
        contents = read_contents(value)
        self._scope.containers.append((value, contents, copy))
        write_contents(copy, Contents(tuple(map(self.clone, contents.keys)), tuple(map(self.clone, contents.items))))
        self._clone_extra_attributes(value, copy)
        return copy

    def _clone_tuple(self, value: Any) -> Any:
        items = [self.clone(item) for item in value]
        cls = type(value)
        copy = self._remember(value, cls._make(items) if hasattr(cls, "_make") else cls(items))
        self._clone_extra_attributes(value, copy)
        return copy

    def _clone_extra_attributes(self, value: Any, copy: Any) -> None:
        """Copy the attributes of a function, or those of a container beside its items."""
        attributes = extra_attributes(value)
        if attributes is not None:
            self._remember(attributes, copy.__dict__)
            copy.__dict__.update({name: self.clone(item) for name, item in attributes.items()})
            self._scope.containers.append((attributes, read_contents(attributes), copy.__dict__))

    def _clone_function(self, value: types.FunctionType) -> Any:
        """Copy a function with copies of its closure, defaults and attributes."""
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        copy = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._remember(value, copy)
        for cell, source_cell in zip(cells, value.__closure__ or (), strict=True):
            content = cell_contents(source_cell)
            if content is not EMPTY_CELL:
                cell.cell_contents = self.clone(content)
        copy.__defaults__ = self.clone(value.__defaults__)
        copy.__kwdefaults__ = self.clone(value.__kwdefaults__)
        if extra_attributes(value) is None:  # a function of torch
            copy.__dict__.update({name: self.clone(item) for name, item in value.__dict__.items()})
        self._clone_extra_attributes(value, copy)
        copy.__qualname__, copy.__doc__, copy.__module__ = value.__qualname__, value.__doc__, value.__module__
        return copy

    def _clone_method(self, value: types.MethodType) -> Any:
        return self._remember(value, types.MethodType(self.clone(value.__func__), self.clone(value.__self__)))

    def _clone_partial(self, value: functools.partial[Any]) -> Any:
        args = [self.clone(item) for item in value.args]
        keywords = {name: self.clone(item) for name, item in value.keywords.items()}
        return self._remember(value, functools.partial(self.clone(value.func), *args, **keywords))

    def _clone_weakref(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return self._remember(value, value if target is None else weakref.ref(self.clone(target)))

    def _clone_object(self, value: Any) -> Any:
        """Copy an object with attributes. One that cannot be copied is shared."""
        try:
            if isinstance(value, enum.Enum):
                raise TypeError("there is one object for each member of an enum")
            copy = types.SimpleNamespace() if type(value) is types.SimpleNamespace else shallow_copy(value)
        except TypeError:
            self.shares_generator = self.shares_generator or any(
                isinstance(i, torch.Generator) for i in attributes_of(value).values()
            )
            return self._remember(value, value)
        self._remember(value, copy)
        for name, item in attributes_of(value).items():
            if name in getattr(value, "__dict__", ()):
                copy.__dict__[name] = self.clone(item)
            else:
                object.__setattr__(copy, name, self.clone(item))
        storage = attribute_storage(value)
        if storage is None or storage is value:
            self._scope.containers.append((value, read_contents(value), copy))
        else:
            self._scope.containers.append((storage, read_contents(storage), copy.__dict__))
        return copy

    def _clone_array(self, value: Any) -> Any:
        copy = self._remember(value, value.copy())
        self._scope.containers.append((value, read_contents(value), copy))
        self._clone_extra_attributes(value, copy)
        return copy

    def _reaches_source(self, value: Any) -> bool:
        """Whether a value has to be copied (see `reaches_source`)."""
        if reaches_source(value, self._private_containers, self._shareable):
            return True
        self._shareable[id(value)] = value
        return False


def reaches_source(
    value: Any, private: Mapping[int, Any] | None = None, shareable: Mapping[int, Any] | None = None
) -> bool:
    """Whether a value leads to something that each replica has for itself.

    That is a tensor, a module, a generator, an object that only the caller may use, or one of the `private` containers.
    Objects that are `shareable` are known not to. Both are keyed by id.
    """
    private, shareable = private or {}, shareable or {}

    def is_replicated(item: Any) -> bool:
        if isinstance(item, (Tensor, nn.Module, torch.Generator)) or is_caller_only(item):
            return True
        return id(item) in private or id(getattr(item, "__dict__", private)) in private

    visits = walk([("", value)], skip=lambda item: is_atomic(item) or id(item) in shareable)
    return any(is_replicated(visit.value) for visit in visits)


def reaches_structure(value: Any) -> bool:
    """Whether a value leads to a module or a trainable parameter."""
    return any(
        isinstance(visit.value, nn.Module) or (isinstance(visit.value, nn.Parameter) and visit.value.requires_grad)
        for visit in walk([("", value)])
    )


MODULE_REGISTRIES = ("_parameters", "_buffers", "_modules")
# The dictionaries of `nn.Module` on which a call depends.
REGISTRIES_AND_HOOKS = frozenset(
    (*MODULE_REGISTRIES, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)

_CLONE_METHODS: dict[type, Callable[[Cloner, Any], Any]] = {
    list: Cloner._clone_container,
    deque: Cloner._clone_container,
    set: Cloner._clone_container,
    dict: Cloner._clone_container,
    OrderedDict: Cloner._clone_container,
    defaultdict: Cloner._clone_container,
    types.FunctionType: Cloner._clone_function,
    types.MethodType: Cloner._clone_method,
    functools.partial: Cloner._clone_partial,
    weakref.ref: Cloner._clone_weakref,
}


def _empty_like(value: Any) -> Any:
    cls: Any = type(value)
    empty = cls.__new__(cls)
    if isinstance(value, defaultdict):
        empty.default_factory = value.default_factory
    if isinstance(value, deque):
        deque.__init__(empty, (), value.maxlen)
    if getattr(value, "__dict__", None) is value:  # its items are its attributes
        empty.__dict__ = empty
    return empty


def _rebuild_dict(registry: Any, items: list[tuple[Any, Any]]) -> Any:
    return OrderedDict(items) if isinstance(registry, OrderedDict) else dict(items)
