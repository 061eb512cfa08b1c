"""Containers, opened into named children and closed again around other children, with their type kept.

`open_node` is the one place that knows what a container is. Everything else in the structure layer recurses
through it.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from instep.structure.types import TensorMap, kind_of

Path = tuple[Any, ...]
"""Keys from the root to a leaf: names, dictionary keys and positions."""

SCALARS = (int, float, complex, bool, str, bytes, type(None))


def show_path(path: Path) -> str:
    """A path as patterns see it: `("batch", "ids", 0)` is `batch.ids.0`.

    >>> show_path(("batch", "ids", 0))
    'batch.ids.0'
    """
    return ".".join(str(key) for key in path)


class Node(NamedTuple):
    """A container that was opened: its children by key, and the way to close it around others."""

    keys: Sequence[Any]
    children: Sequence[Any]
    close: Callable[[Sequence[Any]], Any]


Opener = Callable[[Any], Node]


def _open_list(value: Any) -> Node:
    if type(value) is list:
        return Node(range(len(value)), value, list)

    def close(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        new[:] = children
        return new

    return Node(range(len(value)), list(value), close)


def _open_tuple(value: Any) -> Node:
    cls = type(value)
    if cls is tuple:
        return Node(range(len(value)), value, tuple)
    names = getattr(cls, "_fields", None)
    if names is not None:
        return Node(names, value, cls._make)
    return Node(range(len(value)), value, cls)


def _open_dict(value: Any) -> Node:
    keys = tuple(value)
    cls = type(value)
    if cls is dict or cls is OrderedDict:
        return Node(keys, tuple(value.values()), lambda children: cls(zip(keys, children)))
    if cls is defaultdict:
        factory = value.default_factory
        return Node(keys, tuple(value.values()), lambda children: defaultdict(factory, zip(keys, children)))

    def close(children: Sequence[Any]) -> Any:
        new = copy.copy(value)
        for key, child in zip(keys, children):
            dict.__setitem__(new, key, child)
        # A dictionary that also shows its items as attributes (`d.x`) keeps both in agreement.
        for key, child in zip(keys, children):
            if isinstance(key, str) and key in getattr(new, "__dict__", ()):
                new.__dict__[key] = child
        return new

    return Node(keys, tuple(dict.values(value)), close)


def _open_mapping(value: Any) -> Node:
    keys = tuple(value)

    def close(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children))
        if isinstance(value, UserDict):
            new = copy.copy(value)
            new.data = items
            return new
        if isinstance(value, MutableMapping):
            new = copy.copy(value)
            if new is not value and _is_independent(new, value):
                for key, child in items.items():
                    new[key] = child
                return new
        return type(value)(items)  # type: ignore[call-arg]

    return Node(keys, tuple(value[key] for key in keys), close)


def _is_independent(new: Any, old: Any) -> bool:
    """Whether a shallow copy has storage of its own, so that writing items into it leaves the old one alone."""
    own = vars(new) if hasattr(new, "__dict__") else {}
    return not any(
        isinstance(item, (dict, list)) and vars(old).get(name) is item for name, item in own.items()
    ) and bool(own)


def _open_fields(value: Any, names: Sequence[str]) -> Node:
    """A dataclass or attrs instance: closed without running `__init__`, so frozen and derived fields are kept."""
    present = tuple(name for name in names if hasattr(value, name))

    def close(children: Sequence[Any]) -> Any:
        new = shallow_copy(value)
        for name, child in zip(present, children):
            object.__setattr__(new, name, child)
        return new

    return Node(present, tuple(getattr(value, name) for name in present), close)


def shallow_copy(value: Any) -> Any:
    """A new object of the same class with the same attributes, made without calling any of the class's own code."""
    new = object.__new__(type(value))
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    return new


def _open_dataclass(value: Any) -> Node:
    return _open_fields(value, tuple(field.name for field in dataclasses.fields(value)))


def _open_attrs(value: Any) -> Node:
    return _open_fields(value, tuple(field.name for field in type(value).__attrs_attrs__))


def _open_model_output(value: Any) -> Node:
    """Hugging Face's `ModelOutput`: an ordered dictionary whose items are also fields."""
    keys = tuple(value.keys())
    cls = type(value)
    return Node(keys, tuple(value.values()), lambda children: cls(**dict(zip(keys, children))))


def _open_torch_pytree(value: Any) -> Node:
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


_openers: dict[type, Opener | None] = {list: _open_list, tuple: _open_tuple, dict: _open_dict}


def _opener_of(cls: type) -> Opener | None:
    if issubclass(cls, (Tensor, *SCALARS)) or cls is torch.Size or kind_of(cls) is not None:
        return None
    if cls in torch_pytree.SUPPORTED_NODES and cls not in (OrderedDict, defaultdict):
        return _open_torch_pytree
    hugging_face = sys.modules.get("transformers.utils")
    if hugging_face is not None and issubclass(cls, hugging_face.ModelOutput):
        return _open_model_output
    for parent, opener in ((list, _open_list), (tuple, _open_tuple), (dict, _open_dict), (Mapping, _open_mapping)):
        if issubclass(cls, parent):
            return opener
    if dataclasses.is_dataclass(cls):
        return _open_dataclass
    if hasattr(cls, "__attrs_attrs__"):
        return _open_attrs
    return None


def open_node(value: Any) -> Node | None:
    """The container opened, or None for a leaf. Types with a `Kind` are leaves."""
    cls = type(value)
    try:
        opener = _openers[cls]
    except KeyError:
        opener = _openers[cls] = _opener_of(cls)
    return None if opener is None else opener(value)


def forget_types() -> None:
    """Look at every class afresh; called when a type is registered."""
    _openers.clear()
    _openers.update({list: _open_list, tuple: _open_tuple, dict: _open_dict})


def map_tensors(fn: TensorMap, value: Any) -> Any:
    """A new structure in which each tensor `t` is `fn(t)`, visited in a fixed order; other leaves are kept."""
    if isinstance(value, Tensor):
        return fn(value)
    kind = kind_of(type(value))
    if kind is not None:
        return kind.map(fn, value)
    node = open_node(value)
    if node is None:
        return value
    return node.close([map_tensors(fn, child) for child in node.children])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a structure, in the order of `map_tensors`."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, value)
    return iter(found)
