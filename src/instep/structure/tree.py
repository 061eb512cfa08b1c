"""Flatten containers one level at a time and rebuild them with the same type."""

from __future__ import annotations

import copy
import dataclasses
import sys
from argparse import Namespace
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from instep.structure.types import TensorFn, handler_for_type

Path = tuple[Any, ...]
"""Keys from the root to a leaf: names, dictionary keys and positions."""

SCALARS = (int, float, complex, bool, str, bytes, type(None))
NUMBER_TYPES = (int, float, complex, np.generic)

T = TypeVar("T")


def format_path(path: Path) -> str:
    """Format a path with dots. An unnamed root is omitted.

    >>> format_path(("batch", "ids", 0))
    'batch.ids.0'
    """
    return ".".join([str(key) for key in (path[1:] if path and path[0] == "" else path)])


def order_patterns(patterns: Iterable[tuple[Any, T]]) -> dict[str, T]:
    """Return the patterns in matching order: as given, with the catch-all `"*"` last."""
    by_name = {str(pattern): value for pattern, value in patterns}
    return {**{pattern: by_name[pattern] for pattern in by_name if pattern != "*"}, **by_name}


class Node(NamedTuple):
    """A container flattened one level: keys, children, and a function that rebuilds it from new children."""

    keys: Sequence[Any]
    children: Sequence[Any]
    unflatten: Callable[[Sequence[Any]], Any]


FlattenFn = Callable[[Any], Node]


def _flatten_list(value: Any) -> Node:
    if type(value) is list:
        return Node(range(len(value)), value, list)

    def unflatten(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        new[:] = children
        return new

    return Node(range(len(value)), list(value), unflatten)


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

    def unflatten(children: Sequence[Any]) -> Any:
        new = make(children)
        new.__dict__.update(attributes)
        return new

    return Node(keys, value, unflatten)


def _flatten_structseq(value: Any) -> Node:
    """Flatten a struct sequence, such as the result of `torch.max` or `torch.topk`."""
    cls = type(value)
    named = len(cls.__match_args__) == len(value)
    return Node(cls.__match_args__ if named else range(len(value)), tuple(value), cls)


def is_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple without named entries. Only these can have one entry per sample."""
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

    def unflatten(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        for key, child in zip(keys, children, strict=True):
            dict.__setitem__(new, key, child)
            # Some dictionaries expose their items as attributes (`d.x`); update both.
            if isinstance(key, str) and key in getattr(new, "__dict__", ()):
                new.__dict__[key] = child
        return new

    return Node(keys, tuple([dict.__getitem__(value, key) for key in keys]), unflatten)


def _flatten_mapping(value: Any) -> Node:
    keys = tuple(value)

    def unflatten(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children, strict=True))
        if isinstance(value, MutableMapping) and hasattr(value, "__dict__"):
            new = _copy_with_containers(value)
            for key, child in items.items():
                new[key] = child
            return new
        cls: Any = type(value)
        return cls(items)

    return Node(keys, tuple(value[key] for key in keys), unflatten)


def _flatten_user_dict(value: Any) -> Node:
    """Flatten a `UserDict`. In a Hugging Face `BatchEncoding`, `_encodings` has one entry per sample too."""
    keys, children = tuple(value.data), tuple(value.data.values())
    encodings = getattr(value, "_encodings", None)

    def unflatten(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        new.data = dict(zip(keys, children, strict=False))
        if encodings is not None:
            new._encodings = children[-1]
        return new

    return (
        Node(keys, children, unflatten)
        if encodings is None
        else Node((*keys, "_encodings"), (*children, encodings), unflatten)
    )


def _copy_with_containers(value: Any) -> Any:
    """Copy an object and its list and dict attributes, so that writing items does not change the original."""
    new = copy.copy(value)
    for name, item in vars(new).items():
        if isinstance(item, (dict, list)) and vars(value).get(name) is item:
            vars(new)[name] = copy.copy(item)
    return new


def _flatten_fields(value: Any, names: Sequence[str]) -> Node:
    """Flatten a dataclass or attrs instance. It is rebuilt without `__init__`, so frozen and derived fields are kept.

    Other attributes are children too, because they may hold tensors. Cached properties are dropped.
    """
    cls = type(value)
    present = [name for name in names if hasattr(value, name)]
    cached = []
    for name in getattr(value, "__dict__", ()):
        if isinstance(getattr(cls, name, None), cached_property):
            cached.append(name)
        elif name not in present:
            present.append(name)

    def unflatten(children: Sequence[Any]) -> Any:
        new = shallow_copy(value)
        for name, child in zip(present, children, strict=True):
            object.__setattr__(new, name, child)
        for name in cached:
            del new.__dict__[name]
        return new

    return Node(tuple(present), tuple([getattr(value, name) for name in present]), unflatten)


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes of an object from `__dict__` and `__slots__`. Private slot names are mangled."""
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
    """Whether a class or one of its bases defines slots."""
    bases = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    names = {name for slots in bases for name in ((slots,) if isinstance(slots, str) else slots)}
    return bool(names - {"__dict__", "__weakref__"})


def shallow_copy(value: Any) -> Any:
    """Copy an object without calling `__init__`, `__copy__` or `__setattr__` of its class."""
    new = _new_like(value)
    own = getattr(new, "__dict__", None)
    for name, item in attributes_of(value).items():
        if own is not None and name in value.__dict__:
            own[name] = item
        else:
            object.__setattr__(new, name, item)
    return new


def _new_like(value: Any) -> Any:
    """Create an instance of the same class without attributes. Subclasses of scalars keep their value."""
    base: Any = next((cls for cls in SCALARS if isinstance(value, cls)), object)
    return object.__new__(type(value)) if base is object else base.__new__(type(value), *base.__getnewargs__(value))


def _flatten_dataclass(value: Any) -> Node:
    return _flatten_fields(value, tuple(field.name for field in dataclasses.fields(value)))


def _flatten_namespace(value: Any) -> Node:
    names = tuple(vars(value))

    def unflatten(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        vars(new).update(zip(names, children, strict=True))
        return new

    return Node(names, tuple(vars(value).values()), unflatten)


def _flatten_attrs(value: Any) -> Node:
    return _flatten_fields(value, tuple(field.name for field in type(value).__attrs_attrs__))


def _flatten_model_output(value: Any) -> Node:
    """Flatten a Hugging Face `ModelOutput`, an ordered dictionary whose items are also fields."""
    keys = tuple(value.keys())
    cls = type(value)
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()

    def unflatten(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children, strict=True))
        new = cls(**{key: child for key, child in items.items() if key in fields})
        for key, child in items.items():
            if key not in fields:
                new[key] = child
        return new

    return Node(keys, tuple(value.values()), unflatten)


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
    for parent, flatten_fn in (
        (list, _flatten_list),
        (tuple, _flatten_tuple),
        (dict, _flatten_dict),
        (UserDict, _flatten_user_dict),
        (Mapping, _flatten_mapping),
    ):
        if issubclass(cls, parent):
            return flatten_fn
    if dataclasses.is_dataclass(cls):
        return _flatten_dataclass
    if issubclass(cls, (SimpleNamespace, Namespace)):
        return _flatten_namespace
    if hasattr(cls, "__attrs_attrs__"):
        return _flatten_attrs
    return None


def flatten_one_level(value: Any) -> Node | None:
    """Flatten a container one level. Returns None for leaves; types with a `TypeHandler` are leaves."""
    cls = type(value)
    try:
        flatten_fn = _flatten_fns[cls]
    except KeyError:
        flatten_fn = _flatten_fns[cls] = _flatten_fn_for(cls)
    return None if flatten_fn is None else flatten_fn(value)


def get_by_path(path: Path, value: Any) -> Any:
    """The value at a path inside a structure; None if there is none."""
    for key in path:
        if type(value) is dict:
            value = value.get(key)
            continue
        node = flatten_one_level(value)
        if node is None:
            return None
        value = dict(zip(node.keys, node.children, strict=True)).get(key)
    return value


_BUILTIN_TYPES = frozenset((*SCALARS, Tensor, list, tuple, dict, OrderedDict, defaultdict))


def extra_attributes(value: Any) -> dict[str, Any]:
    """Instance attributes of a subclass of list, tuple, dict or a scalar type, without the items of a dict."""
    cls = type(value)
    if cls in _BUILTIN_TYPES:
        return {}
    if not isinstance(value, SCALARS):
        flatten_one_level(value)
        if _flatten_fns[cls] not in (_flatten_list, _flatten_tuple, _flatten_dict):
            return {}
    items = value.keys() if isinstance(value, dict) else ()
    return {name: item for name, item in attributes_of(value).items() if name not in items}


def clear_type_cache() -> None:
    """Reset the cache of flatten functions. Called when a type is registered."""
    _flatten_fns.clear()
    _flatten_fns.update({list: _flatten_list, tuple: _flatten_tuple, dict: _flatten_dict})


def map_tensors(fn: TensorFn, value: Any) -> Any:
    """Apply `fn` to every tensor of a structure, in a fixed order. Other leaves are kept."""
    if isinstance(value, Tensor):
        return fn(value)
    handler = handler_for_type(type(value))
    if handler is not None:
        return handler.map(fn, value)
    node = flatten_one_level(value)
    if node is None:
        return value
    return node.unflatten([map_tensors(fn, child) for child in node.children])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a structure in the order of `map_tensors`."""
    found: list[Tensor] = []
    _collect_tensors(value, found)
    return iter(found)


def _collect_tensors(value: Any, found: list[Tensor]) -> None:
    """Append the tensors of a structure to `found`."""
    cls = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif cls in (dict, list, tuple) and handler_for_type(cls) is None:
        for item in value.values() if cls is dict else value:
            _collect_tensors(item, found)
    elif cls not in SCALARS:

        def record(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        map_tensors(record, value)


def structure_key(value: Any) -> Any:
    """A hashable key of types, container keys and tensor ranks. The length of a list is ignored."""
    if isinstance(value, Tensor):
        return (Tensor, value.ndim, value.is_floating_point())
    node = None if handler_for_type(type(value)) is not None else flatten_one_level(value)
    if node is None:
        return type(value)
    child_keys = [structure_key(child) for child in node.children]
    if is_sequence(value):
        return (type(value), tuple(dict.fromkeys(child_keys)))
    return (type(value), tuple(map(str, node.keys)), tuple(child_keys))
