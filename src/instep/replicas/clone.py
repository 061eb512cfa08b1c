"""Cloning a module for a replica, around the replica's own tensors."""

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
    """A wrapper that stands where a module could; inside a replica there is only the module."""

    module: nn.Module

    @abstractmethod
    def close(self) -> None:
        """Give back what the wrapper holds beside the module."""


@dataclass
class CloneScope:
    """What was made for one value: it is forgotten together with it."""

    memo: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """By the id of the source: the source, held so that its id is not used again, and what was made of it."""
    containers: list[tuple[Any, Contents, Any]] = field(default_factory=list)
    """Containers of the source that were rebuilt, with what they held and what was made of them."""
    generators: list[tuple[torch.Generator, torch.Generator]] = field(default_factory=list)
    """Generators of the source, with what was made of them."""


class Cloner:
    """Rebuilds objects of one source module for one replica; the same object is always rebuilt as the same object."""

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
        """Whether replicas share a generator of the source, because what holds it does not let itself be copied."""
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        """Every module of the source that was met, registered or not, with what was made of it."""

    @property
    def containers(self) -> list[tuple[Any, Contents, Any]]:
        """Every container of the source that was rebuilt, with what it held then and what was made of it."""
        return [entry for layer in (self._root_scope, *self._scopes.values()) for entry in layer.containers]

    @property
    def generators(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """Every generator of the source that was met, with what was made of it."""
        return [entry for layer in (self._root_scope, *self._scopes.values()) for entry in layer.generators]

    def clone(self, value: Any) -> Any:
        """The replica's counterpart of a value of the source; the value itself where it holds nothing of the source."""
        known = self._lookup(value)
        if known is not None:
            return known[1]
        if is_atomic(value):
            return value
        if type(value) in WEAK_PROXIES:  # it says that it is of the class of what it stands for
            return self._remember(value, weakref.proxy(self.clone(value.__init__.__self__)))
        self._depth += 1
        try:
            return self._clone_new(value)
        finally:
            self._depth -= 1
            if not self._depth:
                self._shareable.clear()

    def _lookup(self, value: Any) -> tuple[Any, Any] | None:
        known = self._root_scope.memo.get(id(value)) or self._scope.memo.get(id(value))
        if known is None and self._scopes:
            known = next((layer.memo[id(value)] for layer in self._scopes.values() if id(value) in layer.memo), None)
        return known

    def reclone_attribute(self, key: Any, name: str, value: Any) -> tuple[Any, list[Any]]:
        """The counterpart of an attribute that was set after the clone was made, known by `key`.

        Also returns what had been made for the value it had before, which nothing needs any longer.
        """
        before = self._scopes.pop(key, CloneScope())
        self._scope = CloneScope()
        try:
            made = self.clone_attribute(name, value)
            if self._scope.memo:
                self._scopes[key] = self._scope
        finally:
            self._scope = self._root_scope
        return made, [old for _, old in before.memo.values()]

    def has_clone(self, value: Any) -> bool:
        """Whether something else was made of a value."""
        known = self._lookup(value)
        return known is not None and known[1] is not value

    def sources_by_clone_id(self) -> dict[int, Any]:
        """By the id of what was made: the object of the source that it stands for."""
        layers = (self._root_scope, *self._scopes.values())
        return {id(made): source for layer in layers for source, made in layer.memo.values()}

    def update_container(self, source: Any, made: Any) -> list[Any]:
        """Bring what was made of a container up to the source's contents; returns what nothing needs any longer."""
        key = ("inside", id(source))
        before, contents = self._scopes.pop(key, CloneScope()), read_contents(source)
        held = {id(item) for item in contents.items if isinstance(item, Tensor)}
        self._scope = CloneScope({name: pair for name, pair in before.memo.items() if name in held})
        try:
            keys = tuple(map(self.clone, contents.keys))
            write_contents(made, Contents(keys, tuple(map(self.clone, contents.items))))
            self._scope.containers.append((source, contents, made))
            self._scopes[key] = self._scope
        finally:
            self._scope = self._root_scope
        for layer in (self._root_scope, *self._scopes.values()):
            layer.containers = [e for e in layer.containers if e[2] is not made or e[1] is contents]
        return [old for name, (_, old) in before.memo.items() if name not in held]

    def _clone_new(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._remember(value, self._clone_tensor(value))
        if isinstance(value, torch.Generator):
            made = self._remember(value, self._clone_generator(value))
            self._scope.generators.append((value, made))
            return made
        if isinstance(value, ModuleWrapper):
            return self._remember(value, self.clone(value.module))
        if isinstance(value, nn.Module):
            return self._clone_module(value)
        if is_caller_only(value):
            return self._remember(value, CallerOnly(value, self._caller_only_accesses))
        return self._rebuild(value) if self._reaches_source(value) else value

    def _remember(self, source: Any, made: Any) -> Any:
        self._scope.memo[id(source)] = (source, made)
        return made

    def _clone_module(self, source: nn.Module) -> nn.Module:
        made = self._remember(source, source.__class__.__new__(source.__class__))
        self.modules.append((source, made))
        for name, value in source.__dict__.items():
            made.__dict__[name] = self.clone_attribute(name, value)
        return made  # type: ignore[no-any-return]

    def clone_attribute(self, name: str, value: Any) -> Any:
        """The counterpart of one entry of a module's `__dict__`; its tables are the replica's own."""
        if self._device_pair is not None and type(value) is torch.device and value == self._device_pair[0]:
            return self._device_pair[1]
        if name in REGISTRIES_AND_HOOKS and isinstance(value, dict):
            return _rebuild_dict(value, [(key, self.clone(item)) for key, item in value.items()])
        return self.clone(value)

    def _rebuild(self, value: Any) -> Any:
        maker = _CLONE_METHODS.get(type(value))
        if maker is not None:
            return maker(self, value)
        if is_numeric_array(value):
            return self._clone_array(value)
        for base in (dict, list, set, deque):
            if isinstance(value, base):
                return self._clone_container(value)
        if isinstance(value, (tuple, frozenset)):
            return self._clone_tuple(value)
        return self._clone_object(value)

    def _clone_container(self, value: Any) -> Any:
        """A list, set or dictionary, with its attributes if it has any."""
        made = _empty_like(value)
        attributes = extra_attributes(value)
        pairs = [(value, made)] if attributes is None else [(value, made), (attributes, made.__dict__)]
        for source, copy in pairs:
            self._remember(source, copy)
            contents = read_contents(source)
            self._scope.containers.append((source, contents, copy))
            write_contents(
                copy, Contents(tuple(map(self.clone, contents.keys)), tuple(map(self.clone, contents.items)))
            )
        return made

    def _clone_tuple(self, value: Any) -> Any:
        items = [self.clone(item) for item in value]
        cls = type(value)
        made = self._remember(value, cls._make(items) if hasattr(cls, "_make") else cls(items))
        self._clone_extra_attributes(value, made)
        return made

    def _clone_extra_attributes(self, value: Any, made: Any) -> None:
        """Give a copy the attributes that a value has beside its items."""
        attributes = extra_attributes(value)
        if attributes is not None:
            self._remember(attributes, made.__dict__)
            made.__dict__.update({name: self.clone(item) for name, item in attributes.items()})
            self._scope.containers.append((attributes, read_contents(attributes), made.__dict__))

    def _clone_function(self, value: types.FunctionType) -> Any:
        """A function whose cells or defaults hold something of the source, around the replica's own."""
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._remember(value, made)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            content = cell_contents(old)
            if content is not EMPTY_CELL:
                cell.cell_contents = self.clone(content)
        made.__defaults__ = self.clone(value.__defaults__)
        made.__kwdefaults__ = self.clone(value.__kwdefaults__)
        if extra_attributes(value) is None:  # torch's own
            made.__dict__.update({name: self.clone(item) for name, item in value.__dict__.items()})
        self._clone_extra_attributes(value, made)
        made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
        return made

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
        """Some object with attributes; one that does not let itself be copied is shared."""
        try:
            if isinstance(value, enum.Enum):
                raise TypeError("a member of an enumeration is one for the whole program")
            made = types.SimpleNamespace() if type(value) is types.SimpleNamespace else shallow_copy(value)
        except TypeError:
            self.shares_generator = self.shares_generator or any(
                isinstance(i, torch.Generator) for i in attributes_of(value).values()
            )
            return self._remember(value, value)
        self._remember(value, made)
        for name, item in attributes_of(value).items():
            if name in getattr(value, "__dict__", ()):
                made.__dict__[name] = self.clone(item)
            else:
                object.__setattr__(made, name, self.clone(item))
        holder = attribute_storage(value)
        if holder is None or holder is value:
            self._scope.containers.append((value, read_contents(value), made))
        else:
            self._scope.containers.append((holder, read_contents(holder), made.__dict__))
        return made

    def _clone_array(self, value: Any) -> Any:
        made = self._remember(value, value.copy())
        self._scope.containers.append((value, read_contents(value), made))
        self._clone_extra_attributes(value, made)
        return made

    def _reaches_source(self, value: Any) -> bool:
        """Whether a tensor, module, generator or container that each replica has for itself can be reached."""
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
# What a call depends on, of the dictionaries that `nn.Module` keeps for itself.
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
    made = cls.__new__(cls)
    if isinstance(value, defaultdict):
        made.default_factory = value.default_factory
    if isinstance(value, deque):
        deque.__init__(made, (), value.maxlen)
    if getattr(value, "__dict__", None) is value:  # its items are its attributes
        made.__dict__ = made
    return made


def _rebuild_dict(registry: Any, items: list[tuple[Any, Any]]) -> Any:
    return OrderedDict(items) if isinstance(registry, OrderedDict) else dict(items)
