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

Reducer = Callable[[Any], Any]
"""Returns what `__reduce__` returns, or `NotImplemented` to leave the object to pickle and cloudpickle."""

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
_HEAPTYPE_FLAG = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was defined in Python."""
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
    """Whether a value is a number, a string, bytes or None, and has no attributes."""
    return isinstance(value, _PLAIN_TYPES) and is_atomic(value)


def has_strided_data(tensor: Tensor) -> bool:
    """Whether a tensor can be rebuilt from its strided memory. Other tensors are pickled in their own way."""
    cls = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    if cls is Tensor or cls is nn.Parameter:
        return True
    is_wrapper = hasattr(cls, "__tensor_flatten__") or cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return not is_wrapper and cls.__reduce_ex__ in (Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)


def is_immutable_function(function: types.FunctionType) -> bool:
    """Whether a function has no closure, no attributes and no mutable defaults. Globals are not considered."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not function.__closure__ and not function.__dict__ and all(map(is_plain, defaults))


def set_attributes(thing: Any, attributes: dict[str, Any]) -> None:
    """Set attributes without calling `__setattr__`."""
    thing.__dict__.update(attributes)


@functools.lru_cache(maxsize=10_000)
def reducer_for(cls: Any) -> Reducer | None:
    """The reducer for instances of a class, if they need one."""
    if cls in _REDUCERS:
        return _REDUCERS[cls]
    if _is_process_bound_type(cls):
        return _reduce_process_bound
    if issubclass(cls, BaseException):
        return _reduce_exception
    if issubclass(cls, dict) and cls is not dict:
        return _reduce_dict_subclass
    if issubclass(cls, nn.Module):
        return _reduce_parametrized_module
    return _reduce_with_attributes if _loses_attributes(cls) else None


@functools.lru_cache(maxsize=10_000)
def _loses_attributes(cls: Any) -> bool:
    """Whether pickle loses attributes of instances: a subclass of `Fraction`, `datetime`, `Counter` or an array.

    The `__reduce__` that such a class inherits from the standard library or NumPy knows nothing of them.
    """
    definers = (base for base in cls.__mro__ if vars(base).keys() & {"__reduce__", "__reduce_ex__"})
    definer: type = next(definers, object)
    package = (definer.__module__ or "").partition(".")[0]
    is_inherited = cls is not definer and definer is not object and bool(cls.__dictoffset__)
    return is_inherited and (package in sys.stdlib_module_names or package == "numpy") and package != "__main__"


def _reduce_with_attributes(thing: Any) -> Any:
    attributes = vars(thing)
    reduced = thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if attributes else None
    if not isinstance(reduced, tuple):
        return NotImplemented
    make, args, state, items, pairs, *_ = (*reduced, None, None, None)
    if state is not None and not isinstance(thing, np.ndarray):  # the state includes the attributes
        return NotImplemented
    return make, args, (state, dict(attributes)), items, pairs, set_state_and_attributes


def set_state_and_attributes(thing: Any, state_and_attributes: tuple[Any, dict[str, Any]]) -> None:
    """Restore the state that `__reduce__` gave, and then the attributes."""
    state, attributes = state_and_attributes
    if state is not None:
        thing.__setstate__(state)
    set_attributes(thing, attributes)


def _reduce_dict_subclass(thing: Any) -> Any:
    attributes: Any = getattr(thing, "__dict__", None)
    if attributes is thing:  # the items are the attributes (`self.__dict__ = self`); pickle would make two dictionaries
        return _make_attribute_dict, (type(thing),), None, None, iter(dict.items(attributes))
    cls: Any = type(thing)
    return _reduce_with_attributes(thing) if _loses_attributes(cls) else NotImplemented


def _make_attribute_dict(cls: Any) -> Any:
    new = cls.__new__(cls)
    new.__dict__ = new
    return new


def is_process_bound(thing: Any) -> bool:
    """Whether an object only works in its own process: a file, a thread, a stream, an event."""
    return _is_process_bound_type(type(thing))


def _is_process_bound_type(cls: type) -> bool:
    return issubclass(cls, _PROCESS_BOUND_TYPES) and cls not in (io.StringIO, io.BytesIO)


def _reduce_process_bound(thing: Any) -> Any:
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        if thing is getattr(sys, name):
            return getattr, (sys, name)
    raise pickle.PicklingError(f"a {type(thing).__name__} belongs to the process that created it")


def _reduce_generator(generator: torch.Generator) -> Any:
    if generator is torch.default_generator:
        return getattr, (torch, "default_generator")
    return make_generator, (str(generator.device), generator.get_state())


def make_generator(device: str, state: Tensor) -> torch.Generator:
    """Create a generator in a given state."""
    generator = torch.Generator(device)
    generator.set_state(state.cpu())
    return generator


def _reduce_cached_function(function: Any) -> Any:
    if is_by_reference(function.__wrapped__) or is_importable(function.__module__):
        return NotImplemented
    return make_cached_function, (function.__wrapped__, function.cache_parameters())


def make_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Apply `functools.lru_cache`. The cache is empty."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(thing: functools.cached_property[Any]) -> Any:
    return make_cached_property, (thing.func, thing.attrname)


def make_cached_property(function: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """Create a cached property. Up to Python 3.11 it has a lock, which cannot be pickled."""
    new = functools.cached_property(function)
    new.attrname = name
    return new


def _reduce_weakref(reference: weakref.ref[Any]) -> Any:
    return make_weakref, (reference(),)


def make_weakref(target: Any) -> weakref.ref[Any]:
    """Create a weak reference; a dead one if the target is None."""
    return weakref.ref(_DeadReferent() if target is None else target)


class _DeadReferent:
    """The target of dead weak references."""


def _reduce_weak_dict(thing: Any) -> Any:
    return type(thing), (dict(thing),)


def _reduce_typevar(variable: Any) -> Any:
    if is_importable(variable.__module__):
        return NotImplemented
    parts = (variable.__name__, variable.__constraints__, variable.__bound__)
    return make_typevar, (*parts, variable.__covariant__, variable.__contravariant__)


def make_typevar(name: str, constraints: tuple[Any, ...], bound: Any, covariant: bool, contravariant: bool) -> Any:
    """Create a type variable."""
    make: Any = typing.TypeVar
    return make(name, *constraints, bound=bound, covariant=covariant, contravariant=contravariant)


def _reduce_typing_form(thing: Any) -> Any:
    """Type aliases and the like are pickled by name, which a worker cannot import if the script defines them."""
    if is_importable(thing.__module__):
        return NotImplemented
    cls = type(thing)
    if cls is typing.NewType:
        return cls, (thing.__name__, thing.__supertype__)
    if hasattr(thing, "__value__"):
        return cls, (thing.__name__, thing.__value__)
    return cls, (thing.__name__,)


def _reduce_exception(error: BaseException) -> Any:
    user_classes = (cls for cls in type(error).__mro__ if cls.__flags__ & _HEAPTYPE_FLAG)
    if any(_PICKLE_METHODS & vars(cls).keys() for cls in user_classes):
        return NotImplemented
    return make_exception, (type(error), error.args, exception_slots(error)), error.__dict__, None, None, set_attributes


def exception_slots(error: BaseException) -> dict[str, Any]:
    """Attributes of builtin exceptions that are not in `__dict__`: the file name of an `OSError` and the like."""
    values = {}
    for cls in type(error).__mro__:
        for name, descriptor in vars(cls).items():
            is_slot = isinstance(descriptor, (types.MemberDescriptorType, types.GetSetDescriptorType))
            if is_slot and name not in _SKIPPED_SLOTS and getattr(error, name, None) is not None:
                values[name] = getattr(error, name)
    return values


def make_exception(cls: type[BaseException], args: tuple[Any, ...], slots: dict[str, Any]) -> BaseException:
    """Create an exception without calling `__init__`, which may have any signature."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAPTYPE_FLAG)
    try:
        error: BaseException = base.__new__(cls, *args)  # the exceptions of a group are arguments of `__new__`
    except TypeError:
        error = base.__new__(cls)
    error.args = args
    for name, value in slots.items():
        try:
            setattr(error, name, value)
        except (AttributeError, TypeError):  # read-only: `__new__` has set it
            continue
    return error


def _reduce_parametrized_module(module: nn.Module) -> Any:
    """Parametrized modules refuse to be pickled, because torch creates their classes at run time."""
    if not parametrize.is_parametrized(module):
        return NotImplemented
    return make_empty, (type(module),), dict(module.__dict__), None, None, set_attributes


def make_empty(cls: type) -> Any:
    """Create an object without calling its class."""
    new: Any = object.__new__(cls)
    return new


_REDUCERS: dict[type, Reducer] = {
    torch.Generator: _reduce_generator,
    type(functools.lru_cache(len)): _reduce_cached_function,
    functools.cached_property: _reduce_cached_property,
    weakref.ref: _reduce_weakref,
    weakref.WeakKeyDictionary: _reduce_weak_dict,
    weakref.WeakValueDictionary: _reduce_weak_dict,
    typing.TypeVar: _reduce_typevar,
    **{kind: _reduce_typing_form for kind in _TYPING_FORMS if isinstance(kind, type)},
}
