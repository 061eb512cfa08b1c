"""Reducers for object types that neither pickle nor cloudpickle can serialize."""

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

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from instep.engines.processes.serialization.by_reference import is_by_reference, is_importable
from instep.replicas.object_graph import is_atomic

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_HEAPTYPE_FLAG = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_PICKLE_METHODS = {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__setstate__"}
_SKIPPED_SLOTS = {"args", "obj", "__dict__", "__cause__", "__context__", "__traceback__", "__suppress_context__"}
_event_types = (getattr(torch, "Event", None), torch.cuda.Event)
_PROCESS_BOUND_TYPES = (
    io.IOBase,
    threading.Thread,
    torch.Stream,
    *(kind for kind in _event_types if isinstance(kind, type)),
)


_TYPING_FORMS = [getattr(typing, name, None) for name in ("NewType", "ParamSpec", "TypeVarTuple", "TypeAliasType")]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or None, and has no attributes."""
    return isinstance(value, _PLAIN_TYPES) and is_atomic(value)


def has_strided_data(tensor: Tensor) -> bool:
    """Whether a tensor is what its strided memory holds; the others have their own way of being taken apart."""
    kind = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    if kind is Tensor or kind is nn.Parameter:
        return True
    own = hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not own and kind.__reduce_ex__ in (Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)


def is_immutable_function(function: types.FunctionType) -> bool:
    """Whether a function holds nothing that could change after it was sent; its globals are looked after elsewhere."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not function.__closure__ and not function.__dict__ and all(map(is_plain, defaults))


def cell_contents(cell: types.CellType) -> tuple[Any, ...]:
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
    if kind not in _reducer_cache:
        if len(_reducer_cache) > _MAX_CACHED_TYPES:
            _reducer_cache.clear()
        _reducer_cache[kind] = _find_reducer(kind)
    return _reducer_cache[kind]


def _find_reducer(kind: type) -> Callable[[Any], Any] | None:
    if kind in _REDUCERS:
        return _REDUCERS[kind]
    if _is_process_bound_type(kind):
        return _reduce_process_bound
    if issubclass(kind, BaseException):
        return _reduce_exception
    leaves = _loses_attributes(kind)
    if issubclass(kind, dict) and kind is not dict:
        return _reduce_dict_subclass if leaves else _reduce_attribute_dict
    if issubclass(kind, nn.Module):
        return _reduce_parametrized_module
    return _reduce_with_attributes if leaves else None


def _loses_attributes(kind: type) -> bool:
    """Whether objects of a class may have attributes, and are written by a way of Python's or numpy's own, which is
    made for objects without: `Fraction`, `datetime`, `Counter`, `Path`, an array."""
    ways = (cls for cls in kind.__mro__ if vars(cls).keys() & {"__reduce__", "__reduce_ex__"})
    way: type = next(ways, object)
    root = (way.__module__ or "").partition(".")[0]
    own = kind is not way and way is not object and bool(kind.__dictoffset__)
    return own and (root in sys.stdlib_module_names or root == "numpy") and root != "__main__"


def _reduce_with_attributes(thing: Any) -> Any:
    attributes = vars(thing)
    reduced = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if attributes else None
    if not isinstance(reduced, tuple):
        return NotImplemented
    make, args, state, items, pairs, *_ = (*reduced, None, None, None)
    if state is not None and not isinstance(thing, np.ndarray):  # they are in it
        return NotImplemented
    return make, args, (state, dict(attributes)), items, pairs, set_state_and_attributes


def set_state_and_attributes(thing: Any, both: tuple[Any, dict[str, Any]]) -> None:
    """Give an object what its own way wrote, and the attributes beside that."""
    state, attributes = both
    if state is not None:
        thing.__setstate__(state)
    set_attributes(thing, attributes)


def _reduce_attribute_dict(thing: Any) -> Any:
    """A dictionary whose items are its attributes, which a pickle would tell apart."""
    attributes: Any = getattr(thing, "__dict__", None)
    if attributes is not thing:
        return NotImplemented
    return _make_attribute_dict, (type(thing),), None, None, iter(dict.items(attributes))


def _reduce_dict_subclass(thing: Any) -> Any:
    reduced = _reduce_attribute_dict(thing)
    return _reduce_with_attributes(thing) if reduced is NotImplemented else reduced


def _make_attribute_dict(cls: Any) -> Any:
    made = cls.__new__(cls)
    made.__dict__ = made
    return made


def is_process_bound(thing: Any) -> bool:
    """Whether a thing is tied to its process by what it is, whatever it holds."""
    return _is_process_bound_type(type(thing))


def _is_process_bound_type(kind: type) -> bool:
    return issubclass(kind, _PROCESS_BOUND_TYPES) and kind not in (io.StringIO, io.BytesIO)


def _reduce_process_bound(thing: Any) -> Any:
    """Something that is tied to its process."""
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        if thing is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"a {type(thing).__name__} belongs to the process that made it")


def _reduce_generator(generator: torch.Generator) -> Any:
    if generator is torch.default_generator:
        return getattr, (torch, "default_generator")
    return make_generator, (str(generator.device), generator.get_state())


def make_generator(device: str, state: Tensor) -> torch.Generator:
    """A generator in a given state."""
    generator = torch.Generator(device)
    generator.set_state(state.cpu())
    return generator


def _reduce_cached_function(function: Any) -> Any:
    if is_by_reference(function.__wrapped__) or is_importable(function.__module__):
        return NotImplemented
    return make_cached_function, (function.__wrapped__, function.cache_parameters())


def make_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function under `functools.lru_cache`, with nothing in the cache."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(thing: functools.cached_property[Any]) -> Any:
    return make_cached_property, (thing.func, thing.attrname)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """A cached property of a class; up to Python 3.11 it holds a lock, which is new."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_weakref(reference: weakref.ref[Any]) -> Any:
    return make_weakref, (reference(),)


def make_weakref(target: Any) -> weakref.ref[Any]:
    """A weak reference; to nothing, if that is what it was to."""
    return weakref.ref(_DeadReferent() if target is None else target)


class _DeadReferent:
    """What a weak reference is made to that refers to nothing any more."""


def _reduce_weak_dict(thing: Any) -> Any:
    return type(thing), (dict(thing),)


def _reduce_typevar(variable: Any) -> Any:
    if is_importable(variable.__module__):
        return NotImplemented
    parts = (variable.__name__, variable.__constraints__, variable.__bound__)
    return make_typevar, (*parts, variable.__covariant__, variable.__contravariant__)


def _reduce_typing_form(thing: Any) -> Any:
    """Type aliases and the like say that they are found by name; those of a script are not."""
    if is_importable(thing.__module__):
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


def _reduce_exception(error: BaseException) -> Any:
    own_way = any(_PICKLE_METHODS & vars(cls).keys() for cls in type(error).__mro__ if cls.__flags__ & _HEAPTYPE_FLAG)
    if own_way:
        return NotImplemented
    return make_exception, (type(error), error.args, exception_slots(error)), error.__dict__, None, None, set_attributes


def exception_slots(error: BaseException) -> dict[str, Any]:
    """What Python's own exceptions hold beside their arguments: a file's name, the line of a syntax error."""
    held = {}
    for cls in type(error).__mro__:
        for name, descriptor in vars(cls).items():
            slot = isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType))
            if slot and name not in _SKIPPED_SLOTS and getattr(error, name, None) is not None:
                held[name] = getattr(error, name)
    return held


def make_exception(cls: type[BaseException], args: tuple[Any, ...], slots: dict[str, Any]) -> BaseException:
    """An exception of a class, whatever that class's own `__init__` asks for."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAPTYPE_FLAG)
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


def _reduce_parametrized_module(module: nn.Module) -> Any:
    """Parametrized modules refuse to be pickled, as their classes are made at run time; those cross by value here."""
    if not parametrize.is_parametrized(module):
        return NotImplemented
    return make_empty, (type(module),), dict(module.__dict__), None, None, set_attributes


def make_empty(cls: type) -> Any:
    """An object of a class, with nothing in it yet."""
    made: Any = object.__new__(cls)
    return made


_MAX_CACHED_TYPES = 10_000
_reducer_cache: dict[type, Callable[[Any], Any] | None] = {}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: _reduce_generator,
    type(functools.lru_cache(len)): _reduce_cached_function,
    functools.cached_property: _reduce_cached_property,
    weakref.ref: _reduce_weakref,
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    typing.TypeVar: _reduce_typevar,
    **{kind: _reduce_typing_form for kind in _TYPING_FORMS if isinstance(kind, type)},
}
