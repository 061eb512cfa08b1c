"""Flatten containers one level at a time and rebuild them with the same type."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from instep.structure.types import TensorFn, handler_for_type

Path = tuple[Any, ...]
"""Keys from the root to a leaf: names, dictionary keys and positions."""

SCALARS = (int, float, complex, bool, str, bytes, type(None))

T = TypeVar("T")


def format_path(path: Path) -> str:
    """A path as patterns see it: `("batch", "ids", 0)` is `batch.ids.0`; a root without a name is not shown.

    >>> show_path(("batch", "ids", 0))
    'batch.ids.0'
    """
    return ".".join([str(key) for key in (path[1:] if path and path[0] == "" else path)])


def order_patterns(patterns: Iterable[tuple[Any, T]]) -> dict[str, T]:
    """Patterns in the order in which they are tried: as written, but `"*"`, which is meant for the rest, last."""
    found = {str(pattern): meaning for pattern, meaning in patterns}
    return {**{pattern: found[pattern] for pattern in found if pattern != "*"}, **found}


class Node(NamedTuple):
    """A container that was opened: its children by key, and the way to close it around others."""

    keys: Sequence[Any]
    children: Sequence[Any]
    unflatten: Callable[[Sequence[Any]], Any]


FlattenFn = Callable[[Any], Node]


def _flatten_list(value: Any) -> Node:
    if type(value) is list:
        return Node(range(len(value)), value, list)

    def close(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        new[:] = children
        return new

    return Node(range(len(value)), list(value), close)


def _flatten_tuple(value: Any) -> Node:
    cls = type(value)
    if cls is tuple:
        return Node(range(len(value)), value, tuple)
    names = getattr(cls, "_fields", None)
    make = cls if names is None else cls._make
    keys = range(len(value)) if names is None else names
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return Node(keys, value, make)

    def close(children: Sequence[Any]) -> Any:
        new = make(children)
        new.__dict__.update(attributes)
        return new

    return Node(keys, value, close)


def _flatten_structseq(value: Any) -> Node:
    """What torch returns from `max`, `topk` and others: a tuple whose entries also have names."""
    cls = type(value)
    named = len(cls.__match_args__) == len(value)
    return Node(cls.__match_args__ if named else range(len(value)), tuple(value), cls)


def is_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple without names for its entries: only these can hold one entry a sample."""
    cls = type(value)
    if cls is list or cls is tuple:
        return True
    return isinstance(value, (list, tuple)) and not (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields"))


def _flatten_dict(value: Any) -> Node:
    keys = tuple(value)
    cls = type(value)
    if cls is dict or cls is OrderedDict:
        return Node(keys, tuple(value.values()), lambda children: cls(zip(keys, children, strict=True)))
    if cls is defaultdict:
        factory = value.default_factory
        return Node(
            keys, tuple(value.values()), lambda children: defaultdict(factory, zip(keys, children, strict=True))
        )

    def close(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        for key, child in zip(keys, children, strict=True):
            dict.__setitem__(new, key, child)
            # A dictionary that also shows its items as attributes (`d.x`) keeps both in agreement.
            if isinstance(key, str) and key in getattr(new, "__dict__", ()):
                new.__dict__[key] = child
        return new

    return Node(keys, tuple([dict.__getitem__(value, key) for key in keys]), close)


def _flatten_mapping(value: Any) -> Node:
    keys = tuple(value)

    def close(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children, strict=True))
        if isinstance(value, UserDict):
            new = copy.copy(value)
            new.data = items
            return new
        if isinstance(value, MutableMapping) and hasattr(value, "__dict__"):
            new = _copy_with_containers(value)
            for key, child in items.items():
                new[key] = child
            return new
        remade: Any = type(value)
        return remade(items)

    return Node(keys, tuple(value[key] for key in keys), close)


def _copy_with_containers(value: Any) -> Any:
    """A copy whose dictionaries and lists are its own, so that writing items into it leaves the old one alone."""
    new = copy.copy(value)
    for name, item in vars(new).items():
        if isinstance(item, (dict, list)) and vars(value).get(name) is item:
            vars(new)[name] = copy.copy(item)
    return new


def _flatten_fields(value: Any, names: Sequence[str]) -> Node:
    """A dataclass or attrs instance: closed without running `__init__`, so frozen and derived fields are kept.

    Attributes beside the fields are children too, lest a tensor among them stay whole; cached properties are made anew.
    """
    cls = type(value)
    present = [name for name in names if hasattr(value, name)]
    cached = []
    for name in getattr(value, "__dict__", ()):
        if isinstance(getattr(cls, name, None), cached_property):
            cached.append(name)
        elif name not in present:
            present.append(name)

    def close(children: Sequence[Any]) -> Any:
        new = shallow_copy(value)
        for name, child in zip(present, children, strict=True):
            object.__setattr__(new, name, child)
        for name in cached:
            del new.__dict__[name]
        return new

    return Node(tuple(present), tuple([getattr(value, name) for name in present]), close)


def attributes_of(value: Any) -> dict[str, Any]:
    """Everything an object holds, in its dictionary and in its slots, by the name to set it with."""
    found = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


@cache
def has_slots(cls: type) -> bool:
    """Whether objects of a class keep attributes elsewhere than in their dictionary."""
    bases = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    names = {name for slots in bases for name in ((slots,) if isinstance(slots, str) else slots)}
    return bool(names - {"__dict__", "__weakref__"})


def shallow_copy(value: Any) -> Any:
    """A new object of the same class with the same attributes, made without calling any of the class's own code."""
    new = _new_like(value)
    own = getattr(new, "__dict__", None)
    for name, item in attributes_of(value).items():
        if own is not None and name in value.__dict__:
            own[name] = item
        else:
            object.__setattr__(new, name, item)
    return new


def _new_like(value: Any) -> Any:
    """An object of the same class without attributes; one that is a number or text is the same number or text."""
    base: Any = next((kind for kind in SCALARS if isinstance(value, kind)), object)
    return object.__new__(type(value)) if base is object else base.__new__(type(value), *base.__getnewargs__(value))


def _flatten_dataclass(value: Any) -> Node:
    return _flatten_fields(value, tuple(field.name for field in dataclasses.fields(value)))


def _flatten_attrs(value: Any) -> Node:
    return _flatten_fields(value, tuple(field.name for field in type(value).__attrs_attrs__))


def _flatten_model_output(value: Any) -> Node:
    """Hugging Face's `ModelOutput`: an ordered dictionary whose items are also fields."""
    keys = tuple(value.keys())
    cls = type(value)
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()

    def close(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children, strict=True))
        new = cls(**{key: child for key, child in items.items() if key in fields})
        for key, child in items.items():
            if key not in fields:
                new[key] = child
        return new

    return Node(keys, tuple(value.values()), close)


def _flatten_torch_pytree(value: Any) -> Node:
    cls = type(value)
    flatten = torch_pytree.SUPPORTED_NODES[cls]
    children, context = flatten.flatten_fn(value)
    keys: Sequence[Any] = range(len(children))
    with_keys = getattr(flatten, "flatten_with_keys_fn", None)
    if with_keys is not None:
        keys = tuple(_plain_key(key) for key, _ in with_keys(value)[0])
    return Node(keys, children, lambda new: flatten.unflatten_fn(list(new), context))


def _plain_key(key: Any) -> Any:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


_flatten_fns: dict[type, FlattenFn | None] = {list: _flatten_list, tuple: _flatten_tuple, dict: _flatten_dict}


def _flatten_fn_for(cls: type) -> FlattenFn | None:
    if issubclass(cls, (Tensor, nn.Module, *SCALARS)) or cls is torch.Size or handler_for_type(cls) is not None:
        return None
    hugging_face = sys.modules.get("transformers.utils")
    if hugging_face is not None and issubclass(cls, hugging_face.ModelOutput):
        return _flatten_model_output
    if issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields") and hasattr(cls, "__match_args__"):
        return _flatten_structseq
    if cls in torch_pytree.SUPPORTED_NODES and cls not in (OrderedDict, defaultdict):
        return _flatten_torch_pytree
    for parent, opener in (
        (list, _flatten_list),
        (tuple, _flatten_tuple),
        (dict, _flatten_dict),
        (Mapping, _flatten_mapping),
    ):
        if issubclass(cls, parent):
            return opener
    if dataclasses.is_dataclass(cls):
        return _flatten_dataclass
    if hasattr(cls, "__attrs_attrs__"):
        return _flatten_attrs
    return None


def flatten_one_level(value: Any) -> Node | None:
    """The container opened, or None for a leaf. Types with a `Kind` are leaves."""
    cls = type(value)
    try:
        opener = _flatten_fns[cls]
    except KeyError:
        opener = _flatten_fns[cls] = _flatten_fn_for(cls)
    return None if opener is None else opener(value)


_BUILTIN_TYPES = frozenset((*SCALARS, Tensor, list, tuple, dict, OrderedDict, defaultdict))


def extra_attributes(value: Any) -> dict[str, Any]:
    """What a list, tuple, dictionary, number or text of a class of its own has beside what it holds."""
    cls = type(value)
    if cls in _BUILTIN_TYPES:
        return {}
    if not isinstance(value, SCALARS):
        flatten_one_level(value)
        if _flatten_fns[cls] not in (_flatten_list, _flatten_tuple, _flatten_dict):
            return {}
    shown = value.keys() if isinstance(value, dict) else ()
    return {name: item for name, item in attributes_of(value).items() if name not in shown}


def clear_type_cache() -> None:
    """Look at every class afresh; called when a type is registered."""
    _flatten_fns.clear()
    _flatten_fns.update({list: _flatten_list, tuple: _flatten_tuple, dict: _flatten_dict})


def map_tensors(fn: TensorFn, value: Any) -> Any:
    """A new structure in which each tensor `t` is `fn(t)`, visited in a fixed order; other leaves are kept."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = handler_for_type(type(value))
    if kind is not None:
        return kind.map(fn, value)
    node = flatten_one_level(value)
    if node is None:
        return value
    return node.unflatten([map_tensors(fn, child) for child in node.children])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a structure, in the order of `map_tensors`."""
    if isinstance(value, Tensor):
        return iter((value,))
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return iter(found)


def structure_key(value: Any) -> Any:
    """The types, keys and ranks of a structure, hashable; a list counts by the kinds of its entries."""
    if isinstance(value, Tensor):
        return (Tensor, value.ndim, value.is_floating_point())
    node = None if handler_for_type(type(value)) is not None else flatten_one_level(value)
    if node is None:
        return type(value)
    below = [structure_key(child) for child in node.children]
    if is_sequence(value):
        return (type(value), tuple(dict.fromkeys(below)))
    return (type(value), tuple(map(str, node.keys)), tuple(below))
