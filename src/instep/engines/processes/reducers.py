"""How single kinds of objects are written, where neither they nor cloudpickle know how."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from instep.engines.processes.by_value import by_name, importable
from instep.replicas.opaque import is_opaque

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MADE_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_OWN_WAYS = {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__"}
_NOT_SET = {"args", "obj", "__dict__", "__cause__", "__context__", "__traceback__", "__suppress_context__"}
_events = (getattr(torch, "Event", None), torch.cuda.Event)
_NOT_CARRIED = (
    io.IOBase,
    threading.Thread,
    torch.Stream,
    *(kind for kind in _events if isinstance(kind, type)),
)


_NAMED = [getattr(typing, name, None) for name in ("NewType", "ParamSpec", "TypeVarTuple", "TypeAliasType")]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or None, and has no attributes."""
    return isinstance(value, _PLAIN) and is_opaque(value)


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether a tensor is what its strided memory holds; the others have their own way of being taken apart."""
    kind = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    if kind is Tensor or kind is nn.Parameter:
        return True
    own = hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not own and kind.__reduce_ex__ in (Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)


def settled(function: types.FunctionType) -> bool:
    """Whether a function holds nothing that could change after it was sent; its globals are looked after elsewhere."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not function.__closure__ and not function.__dict__ and all(map(is_plain, defaults))


def contents(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of a closure holds: one thing, or nothing yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Give an object the attributes it had, by none of its own ways."""
    thing.__dict__.update(attributes)


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """What writes objects of a class, where they do not do that themselves; it may still leave one to itself."""
    if kind not in _found:
        if len(_found) > _KINDS_AT_MOST:
            _found.clear()
        _found[kind] = _find_reducer(kind)
    return _found[kind]


def _find_reducer(kind: type) -> Callable[[Any], Any] | None:
    if kind in _REDUCERS:
        return _REDUCERS[kind]
    if _stays_home(kind):
        return _outside
    if issubclass(kind, BaseException):
        return _error
    if issubclass(kind, dict) and kind is not dict:
        return _shown
    return _nn_module if issubclass(kind, nn.Module) else None


def _shown(thing: Any) -> Any:
    """A dictionary whose items are its attributes, which a pickle would tell apart."""
    attributes: Any = getattr(thing, "__dict__", None)
    if attributes is not thing:
        return NotImplemented
    return _empty_shown, (type(thing),), None, None, iter(dict.items(attributes))


def _empty_shown(cls: Any) -> Any:
    made = cls.__new__(cls)
    made.__dict__ = made
    return made


def stays_home(thing: Any) -> bool:
    """Whether a thing is tied to its process by what it is, whatever it holds."""
    return _stays_home(type(thing))


def _stays_home(kind: type) -> bool:
    return issubclass(kind, _NOT_CARRIED) and kind not in (io.StringIO, io.BytesIO)


def _outside(thing: Any) -> Any:
    """Something that is tied to its process."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        if thing is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"a {type(thing).__name__} belongs to the process that made it")


def _generator(generator: torch.Generator) -> Any:
    if generator is torch.default_generator:
        return getattr, (torch, "default_generator")
    return make_generator, (str(generator.device), generator.get_state())


def make_generator(device: str, state: Tensor) -> torch.Generator:
    """A generator in a given state."""
    generator = torch.Generator(device)
    generator.set_state(state.cpu())
    return generator


def _cached_function(function: Any) -> Any:
    if by_name(function.__wrapped__) or importable(function.__module__):
        return NotImplemented
    return make_cached_function, (function.__wrapped__, function.cache_parameters())


def make_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function under `functools.lru_cache`, with nothing in the cache."""
    return functools.lru_cache(**parameters)(function)


def _cached_property(thing: functools.cached_property[Any]) -> Any:
    return make_cached_property, (thing.func, thing.attrname)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """A cached property of a class; up to Python 3.11 it holds a lock, which is new."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _weak(reference: weakref.ref[Any]) -> Any:
    return make_weak, (reference(),)


def make_weak(target: Any) -> weakref.ref[Any]:
    """A weak reference; to nothing, if that is what it was to."""
    return weakref.ref(_Gone() if target is None else target)


class _Gone:
    """What a weak reference is made to that refers to nothing any more."""


def _weak_dictionary(thing: Any) -> Any:
    return type(thing), (dict(thing),)


def _typevar(variable: Any) -> Any:
    if importable(variable.__module__):
        return NotImplemented
    parts = (variable.__name__, variable.__constraints__, variable.__bound__)
    return make_typevar, (*parts, variable.__covariant__, variable.__contravariant__)


def _by_its_name(thing: Any) -> Any:
    """Type aliases and the like say that they are found by name; those of a script are not."""
    if importable(thing.__module__):
        return NotImplemented
    kind = type(thing)
    if kind is typing.NewType:
        return kind, (thing.__name__, thing.__supertype__)
    if hasattr(thing, "__value__"):
        return kind, (thing.__name__, thing.__value__)
    return kind, (thing.__name__,)


def make_typevar(name: str, constraints: tuple[Any, ...], bound: Any, covariant: bool, contravariant: bool) -> Any:
    """A type variable."""
    make: Any = typing.TypeVar
    return make(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)


def _error(error: BaseException) -> Any:
    own_way = any(_OWN_WAYS & vars(cls).keys() for cls in type(error).__mro__ if cls.__flags__ & _MADE_IN_PYTHON)
    if own_way:
        return NotImplemented
    return make_error, (type(error), error.args, error_slots(error)), error.__dict__, None, None, set_attributes


def error_slots(error: BaseException) -> dict[str, Any]:
    """What Python's own exceptions hold beside their arguments: a file's name, the line of a syntax error."""
    held = {}
    for cls in type(error).__mro__:
        for name, descriptor in vars(cls).items():
            slot = isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType))
            if slot and name not in _NOT_SET and getattr(error, name, None) is not None:
                held[name] = getattr(error, name)
    return held


def make_error(cls: type[BaseException], args: tuple[Any, ...], slots: dict[str, Any]) -> BaseException:
    """An exception of a class, whatever that class's own `__init__` asks for."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _MADE_IN_PYTHON)
    try:
        made: BaseException = base.__new__(cls, *args)
    except TypeError:  # exceptions in a group are given to `__new__`; other arguments it may not like
        made = base.__new__(cls)
    made.args = args
    for name, value in slots.items():
        try:
            setattr(made, name, value)
        except (AttributeError, TypeError):  # it can be read only, and came with the arguments
            continue
    return made


def _nn_module(module: nn.Module) -> Any:
    """Parametrized modules refuse to be pickled, as their classes are made at run time; those cross by value here."""
    if not parametrize.is_parametrized(module):
        return NotImplemented
    return make_empty, (type(module),), dict(module.__dict__), None, None, set_attributes


def make_empty(cls: type) -> Any:
    """An object of a class, with nothing in it yet."""
    made: Any = object.__new__(cls)
    return made


_KINDS_AT_MOST = 10_000
_found: dict[type, Callable[[Any], Any] | None] = {}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: _generator,
    type(functools.lru_cache(len)): _cached_function,
    functools.cached_property: _cached_property,
    weakref.ref: _weak,
    weakref.WeakKeyDictionary: _weak_dictionary,
    weakref.WeakValueDictionary: _weak_dictionary,
    typing.TypeVar: _typevar,
    **{kind: _by_its_name for kind in _NAMED if isinstance(kind, type)},
}
