"""Making a replica: the module once more, around other tensors.

What is not a tensor or a module is shared by reference, so that an edit deep inside (`model.config.x = 1`) reaches
every replica. What holds a tensor or a module of the source (a list, a closure, a bound method, a helper object) is
rebuilt around the replica's own, so that nothing in a replica leads back to the source.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from instep.replicas.contents import Contents, beside, contents_of, holder_of, is_array, put
from instep.replicas.iterators import is_the_callers, stand_in
from instep.replicas.opaque import is_opaque
from instep.structure.tree import attributes_of, shallow_copy

TensorMaker = Callable[[Tensor], Tensor]
GeneratorMaker = Callable[[torch.Generator], torch.Generator]

PROXIES: tuple[Any, ...] = (weakref.ProxyType, weakref.CallableProxyType)
_MAX_VISITS = 200_000


class Wrapper(ABC):
    """A wrapper that stands where a module could; inside a replica there is only the module."""

    module: nn.Module

    @abstractmethod
    def close(self) -> None:
        """Give back what the wrapper holds beside the module."""


@dataclass
class Layer:
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
        tensor: TensorMaker,
        generator: GeneratorMaker,
        own: Mapping[int, Any] | None = None,
        moves: tuple[torch.device, torch.device] | None = None,
        asked: list[Any] | None = None,
    ) -> None:
        self._tensor = tensor
        self._generator = generator
        self._own = own or {}
        """By their ids, containers without tensors that each replica has for itself, because `forward` changes them."""
        self._moves = moves
        """The source's device and the replica's: a module that remembers the one remembers the other there."""
        self._asked = [] if asked is None else asked
        """Iterators of the source that some replica wanted something of."""
        self._base = self._layer = Layer()
        self._layers: dict[Any, Layer] = {}
        self._plain: dict[int, Any] = {}
        self._depth = 0
        self.draws = False
        """Whether replicas share a generator of the source, because what holds it does not let itself be copied."""
        self.modules: list[tuple[nn.Module, nn.Module]] = []
        """Every module of the source that was met, registered or not, with what was made of it."""

    @property
    def containers(self) -> list[tuple[Any, Contents, Any]]:
        """Every container of the source that was rebuilt, with what it held then and what was made of it."""
        return [entry for layer in (self._base, *self._layers.values()) for entry in layer.containers]

    @property
    def generators(self) -> list[tuple[torch.Generator, torch.Generator]]:
        """Every generator of the source that was met, with what was made of it."""
        return [entry for layer in (self._base, *self._layers.values()) for entry in layer.generators]

    def clone(self, value: Any) -> Any:
        """The replica's counterpart of a value of the source; the value itself where it holds nothing of the source."""
        known = self._known(value)
        if known is not None:
            return known[1]
        if is_opaque(value):
            return value
        if type(value) in PROXIES:  # it says that it is of the class of what it stands for
            return self._note(value, weakref.proxy(self.clone(value.__init__.__self__)))
        self._depth += 1
        try:
            return self._make(value)
        finally:
            self._depth -= 1
            if not self._depth:
                self._plain.clear()

    def _known(self, value: Any) -> tuple[Any, Any] | None:
        known = self._base.memo.get(id(value)) or self._layer.memo.get(id(value))
        if known is None and self._layers:
            known = next((layer.memo[id(value)] for layer in self._layers.values() if id(value) in layer.memo), None)
        return known

    def renew(self, key: Any, name: str, value: Any) -> tuple[Any, list[Any]]:
        """The counterpart of an attribute that was set after the clone was made, known by `key`.

        Also returns what had been made for the value it had before, which nothing needs any longer.
        """
        before = self._layers.pop(key, Layer())
        self._layer = Layer()
        try:
            made = self.attribute(name, value)
            if self._layer.memo:
                self._layers[key] = self._layer
        finally:
            self._layer = self._base
        return made, [old for _, old in before.memo.values()]

    def has_own(self, value: Any) -> bool:
        """Whether something else was made of a value."""
        known = self._known(value)
        return known is not None and known[1] is not value

    def origins(self) -> dict[int, Any]:
        """By the id of what was made: the object of the source that it stands for."""
        layers = (self._base, *self._layers.values())
        return {id(made): source for layer in layers for source, made in layer.memo.values()}

    def refill(self, source: Any, made: Any) -> list[Any]:
        """Bring what was made of a container up to the source's contents; returns what nothing needs any longer."""
        key = ("inside", id(source))
        before, contents = self._layers.pop(key, Layer()), contents_of(source)
        held = {id(item) for item in contents.items if isinstance(item, Tensor)}
        self._layer = Layer({name: pair for name, pair in before.memo.items() if name in held})
        try:
            keys = tuple(map(self.clone, contents.keys))
            put(made, Contents(keys, tuple(map(self.clone, contents.items))))
            self._layer.containers.append((source, contents, made))
            self._layers[key] = self._layer
        finally:
            self._layer = self._base
        for layer in (self._base, *self._layers.values()):
            layer.containers = [e for e in layer.containers if e[2] is not made or e[1] is contents]
        return [old for name, (_, old) in before.memo.items() if name not in held]

    def _make(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._note(value, self._tensor(value))
        if isinstance(value, torch.Generator):
            made = self._note(value, self._generator(value))
            self._layer.generators.append((value, made))
            return made
        if isinstance(value, Wrapper):
            return self._note(value, self.clone(value.module))
        if isinstance(value, nn.Module):
            return self._module(value)
        if is_the_callers(value):
            return self._note(value, stand_in(value, self._asked))
        return self._rebuild(value) if self._reaches(value) else value

    def _note(self, source: Any, made: Any) -> Any:
        self._layer.memo[id(source)] = (source, made)
        return made

    def _module(self, source: nn.Module) -> nn.Module:
        made = self._note(source, source.__class__.__new__(source.__class__))
        self.modules.append((source, made))
        for name, value in source.__dict__.items():
            made.__dict__[name] = self.attribute(name, value)
        return made  # type: ignore[no-any-return]

    def attribute(self, name: str, value: Any) -> Any:
        """The counterpart of one entry of a module's `__dict__`; its tables are the replica's own."""
        if self._moves is not None and type(value) is torch.device and value == self._moves[0]:
            return self._moves[1]
        if name in TABLES and isinstance(value, dict):
            return _refill(value, [(key, self.clone(item)) for key, item in value.items()])
        return self.clone(value)

    def _rebuild(self, value: Any) -> Any:
        maker = _MAKERS.get(type(value))
        if maker is not None:
            return maker(self, value)
        if is_array(value):
            return self._array(value)
        for base in (dict, list, set, deque):
            if isinstance(value, base):
                return self._container(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        return self._object(value)

    def _container(self, value: Any) -> Any:
        """A list, set or dictionary, with its attributes if it has any."""
        made = self._note(value, _empty_like(value))
        attributes = beside(value)
        pairs = [(value, made)] if attributes is None else [(value, made), (attributes, made.__dict__)]
        for source, copy in pairs:
            contents = contents_of(source)
            self._layer.containers.append((source, contents, copy))
            put(copy, Contents(tuple(map(self.clone, contents.keys)), tuple(map(self.clone, contents.items))))
        return made

    def _tuple(self, value: Any) -> Any:
        items = [self.clone(item) for item in value]
        cls = type(value)
        made = self._note(value, cls._make(items) if hasattr(cls, "_make") else cls(items))
        attributes = beside(value)
        if attributes is not None:
            made.__dict__.update({name: self.clone(item) for name, item in attributes.items()})
            self._layer.containers.append((attributes, contents_of(attributes), made.__dict__))
        return made

    def _function(self, value: types.FunctionType) -> Any:
        """A function whose cells or defaults hold something of the source, around the replica's own."""
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._note(value, made)
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            content = _content(old)
            if content is not _UNKNOWN:
                cell.cell_contents = self.clone(content)
        made.__defaults__ = self.clone(value.__defaults__)
        made.__kwdefaults__ = self.clone(value.__kwdefaults__)
        made.__dict__.update({name: self.clone(item) for name, item in value.__dict__.items()})
        made.__qualname__, made.__doc__, made.__module__ = value.__qualname__, value.__doc__, value.__module__
        return made

    def _method(self, value: types.MethodType) -> Any:
        return self._note(value, types.MethodType(self.clone(value.__func__), self.clone(value.__self__)))

    def _partial(self, value: functools.partial[Any]) -> Any:
        args = [self.clone(item) for item in value.args]
        keywords = {name: self.clone(item) for name, item in value.keywords.items()}
        return self._note(value, functools.partial(self.clone(value.func), *args, **keywords))

    def _weakref(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return self._note(value, value if target is None else weakref.ref(self.clone(target)))

    def _object(self, value: Any) -> Any:
        """Some object with attributes; one that does not let itself be copied is shared."""
        try:
            if isinstance(value, enum.Enum):
                raise TypeError("a member of an enumeration is one for the whole program")
            made = types.SimpleNamespace() if type(value) is types.SimpleNamespace else shallow_copy(value)
        except TypeError:
            self.draws = self.draws or any(isinstance(i, torch.Generator) for i in attributes_of(value).values())
            return self._note(value, value)
        self._note(value, made)
        for name, item in attributes_of(value).items():
            if name in getattr(value, "__dict__", ()):
                made.__dict__[name] = self.clone(item)
            else:
                object.__setattr__(made, name, self.clone(item))
        holder = holder_of(value)
        if holder is None or holder is value:
            self._layer.containers.append((value, contents_of(value), made))
        else:
            self._layer.containers.append((holder, contents_of(holder), made.__dict__))
        return made

    def _array(self, value: Any) -> Any:
        made = self._note(value, value.copy())
        self._layer.containers.append((value, contents_of(value), made))
        return made

    def _reaches(self, value: Any) -> bool:
        """Whether a tensor, module, generator or container that each replica has for itself can be reached."""
        if holds_source(value, self._own, self._plain):
            return True
        self._plain[id(value)] = value
        return False


def holds_source(value: Any, own: Mapping[int, Any] | None = None, plain: Mapping[int, Any] | None = None) -> bool:
    """Whether a tensor, a module, or one of `own` can be reached from a value, by another way than through `plain`."""
    own = own or {}

    def found(item: Any) -> bool:
        mine = id(item) in own or id(getattr(item, "__dict__", own)) in own
        return mine or isinstance(item, (Tensor, nn.Module, torch.Generator)) or is_the_callers(item)

    return _leads_to(value, found, plain or {})


def holds_structure(value: Any) -> bool:
    """Whether a module or a trainable parameter can be reached from a value."""

    def found(item: Any) -> bool:
        return isinstance(item, nn.Module) or (isinstance(item, nn.Parameter) and item.requires_grad)

    return not is_opaque(value) and _leads_to(value, found, {})


def _leads_to(value: Any, found: Callable[[Any], bool], plain: Mapping[int, Any]) -> bool:
    pending, seen = [value], {id(value)}
    while pending:
        item = pending.pop()
        if found(item):
            return True
        if isinstance(item, Tensor):
            continue
        if len(seen) > _MAX_VISITS:
            return False
        for child in _children(item):
            if id(child) not in seen and id(child) not in plain and not is_opaque(child):
                seen.add(id(child))
                pending.append(child)
    return False


_UNKNOWN = object()
REGISTRIES = ("_parameters", "_buffers", "_modules")
# What a call depends on, of the dictionaries that `nn.Module` keeps for itself.
TABLES = frozenset((*REGISTRIES, "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))

_MAKERS: dict[type, Callable[[Cloner, Any], Any]] = {
    list: Cloner._container,
    deque: Cloner._container,
    set: Cloner._container,
    dict: Cloner._container,
    OrderedDict: Cloner._container,
    defaultdict: Cloner._container,
    types.FunctionType: Cloner._function,
    types.MethodType: Cloner._method,
    functools.partial: Cloner._partial,
    weakref.ref: Cloner._weakref,
}


def _children(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return (*item.keys(), *item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return item
    if isinstance(item, types.FunctionType):
        cells = [_content(cell) for cell in item.__closure__ or ()]
        return (*cells, item.__defaults__, item.__kwdefaults__, item.__dict__)
    if isinstance(item, types.MethodType):
        return (item.__func__, item.__self__)
    if isinstance(item, functools.partial):
        return (item.func, *item.args, *item.keywords.values())
    if isinstance(item, weakref.ref):
        return (item(),)
    return () if isinstance(item, types.BuiltinFunctionType) else attributes_of(item).values()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _UNKNOWN


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


def _refill(registry: Any, items: list[tuple[Any, Any]]) -> Any:
    return OrderedDict(items) if isinstance(registry, OrderedDict) else dict(items)
