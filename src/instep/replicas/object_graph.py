"""Graphs of Python objects: walking them, and reading, comparing and writing the contents of one object."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.replicas.caller_only import CallerOnly
from instep.structure.tree import SCALARS, Path, attributes_of, flatten_one_level, has_slots

MAX_OBJECTS = 100_000
"""The number of objects after which a walk ends."""
_ATOMIC_TYPES = (type, types.ModuleType, types.CodeType, torch.dtype, torch.device, torch.Size)
_WALK_LEAVES = (Tensor, nn.Module, types.BuiltinFunctionType, CallerOnly)


def is_atomic(value: Any) -> bool:
    """Whether a value is immutable and references no other objects.

    An instance of a subclass of a scalar type may have attributes (`class Level(int)`); it is not atomic then.
    """
    cls: Any = type(value)
    return _is_atomic_class(cls)


@functools.cache
def _is_atomic_class(cls: Any) -> bool:
    return issubclass(cls, _ATOMIC_TYPES) or (issubclass(cls, SCALARS) and not (cls.__dictoffset__ or has_slots(cls)))


class Visit(NamedTuple):
    """An object that a walk has reached, and the reference by which it was reached."""

    value: Any
    key: Any
    """The dictionary key, index or attribute name in the parent; for a root, the key that the caller gave."""
    parent: Visit | None = None

    @property
    def path(self) -> Path:
        """The keys from the root to the object."""
        keys, visit = [self.key], self.parent
        while visit is not None:
            keys.append(visit.key)
            visit = visit.parent
        return tuple(reversed(keys))


References = Iterable[tuple[Any, Any]]
"""(key, object) pairs."""


def walk(
    roots: References,
    references: Callable[[Any], References] | None = None,
    skip: Callable[[Any], bool] = is_atomic,
    limit: int = MAX_OBJECTS,
) -> Iterator[Visit]:
    """Visit every object that can be reached from the roots once, breadth first.

    Args:
        roots: The objects to begin with, each with a key.
        references: The objects to go on to from an object; by default `references_of`. Called after the object was
            yielded.
        skip: Whether to leave out an object, and what can be reached through it only.
        limit: The number of objects after which the walk ends.
    """
    references = references or references_of
    pending = deque(Visit(value, key) for key, value in roots if not skip(value))
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
    while pending and len(seen) < limit:
        visit = pending.popleft()
        if id(visit.value) in seen:
            continue
        seen[id(visit.value)] = visit.value
        yield visit
        for key, child in references(visit.value):
            if id(child) not in seen and not skip(child):
                pending.append(Visit(child, key, visit))


def references_of(value: Any) -> References:
    """The objects that a value references, with their keys. Tensors, modules and builtin functions have none.

    The attributes of a function, and those of a container beside its items, are one reference: to its `__dict__`.
    """
    if isinstance(value, _WALK_LEAVES):
        return ()
    if isinstance(value, types.FunctionType):
        return _function_references(value)
    if isinstance(value, types.MethodType):
        return (("__func__", value.__func__), ("__self__", value.__self__))
    if isinstance(value, functools.partial):
        return (("func", value.func), *enumerate(value.args), *value.keywords.items())
    if isinstance(value, weakref.ref):
        return (("()", value()),)
    if not isinstance(value, _COLLECTIONS):
        return attributes_of(value).items()
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        found += [*dict.items(value), *_named_hashables(dict.keys(value))]
    elif isinstance(value, (set, frozenset)):
        found += _named_hashables(value)
    elif not isinstance(value, np.ndarray):
        found += enumerate(value)
    attributes = extra_attributes(value)
    if attributes is not None:
        found.append(("__dict__", attributes))
    return found


def _function_references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        content = cell_contents(cell)
        if content is not EMPTY_CELL:
            yield name, content
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    yield "__dict__", function.__dict__


def _named_hashables(items: Iterable[Any]) -> list[tuple[str, Any]]:
    """Keys of a dictionary or elements of a set that have attributes, each with a name for its path."""
    found = [item for item in items if not is_atomic(item)]
    return [(str(item) if isinstance(item, SCALARS) else type(item).__name__, item) for item in found]


EMPTY_CELL = object()


def cell_contents(cell: types.CellType) -> Any:
    """The object in a closure cell, or `EMPTY_CELL`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY_CELL


_COLLECTIONS = (dict, list, tuple, deque, set, frozenset, np.ndarray)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, weakref.ref)


class Contents(NamedTuple):
    """The items of a container or the attributes of an object, with their keys if they have any."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def by_key(self) -> dict[Any, Any]:
        """The items of a dictionary or an object."""
        return dict(zip(self.keys, self.items, strict=True))


def is_numeric_array(value: Any) -> bool:
    """Whether a value is a numpy array of numbers, which can be written in place like a container."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def mutable_storage(value: Any) -> Any:
    """The object that is changed when a value is changed in place, or None.

    It is the value itself for a container, an array of numbers and an object with slots, and the `__dict__` of any
    other object, such as a tuple of a user's class.
    """
    if isinstance(value, (dict, list, deque, set)) or is_numeric_array(value):
        return value
    if isinstance(value, (tuple, frozenset)):
        return extra_attributes(value)
    if isinstance(value, (Tensor, nn.Module, torch.Generator, *_COLLECTIONS, *_FUNCTIONS)):
        return None
    return attribute_storage(value)


def attribute_storage(value: Any) -> Any:
    """The object that holds the attributes of a value: its `__dict__`, itself if it has slots, or None."""
    cls: type = type(value)
    if has_slots(cls):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def extra_attributes(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of a user's function, or of a container or array of a user's class."""
    if isinstance(value, types.FunctionType):
        return None if (value.__module__ or "").startswith("torch") else value.__dict__
    if not isinstance(value, _COLLECTIONS) or type(value).__module__ in ("builtins", "collections"):
        return None
    attributes = getattr(value, "__dict__", None)  # not a plain dict if the items themselves are the attributes
    return attributes if type(attributes) is dict else None


def _dict_class(container: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The builtin class whose methods read and write a dictionary without calling code of the user's class."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def read_contents(container: Any) -> Contents:
    """The current contents of a container."""
    if isinstance(container, dict):
        table = _dict_class(container)
        return Contents(tuple(table.keys(container)), tuple(table.values(container)))
    if isinstance(container, (list, deque, set)):
        return Contents((), tuple(container))
    if is_numeric_array(container):
        return Contents((), (container.copy(),))
    slots = attributes_of(container)
    return Contents(tuple(slots), tuple(slots.values()))


def is_unchanged(container: Any, contents: Contents) -> bool:
    """Whether a container holds the same objects, by identity. Arrays are compared by value."""
    if isinstance(container, dict):
        table = _dict_class(container)
        same = len(container) == len(contents.items) and all(map(is_, table.values(container), contents.items))
        return same and all(map(is_, table.keys(container), contents.keys))
    if isinstance(container, (list, deque)):
        return len(container) == len(contents.items) and all(map(is_, container, contents.items))
    if isinstance(container, set):
        return len(container) == len(contents.items) and set(map(id, container)) == set(map(id, contents.items))
    if is_numeric_array(container):
        return np.array_equal(container, contents.items[0], equal_nan=container.dtype.kind in "fc")
    now = read_contents(container)
    return now.keys == contents.keys and all(map(is_, now.items, contents.items))


def write_contents(container: Any, contents: Contents) -> None:
    """Replace the contents of a container."""
    keys, items = contents
    if isinstance(container, dict):
        table = _dict_class(container)
        table.clear(container)
        for key, item in zip(keys, items, strict=True):
            table.__setitem__(container, key, item)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    elif isinstance(container, (deque, set)):
        container.clear()
        container.extend(items) if isinstance(container, deque) else container.update(items)
    elif is_numeric_array(container):
        if container.shape != items[0].shape:
            container.resize(items[0].shape, refcheck=False)
        np.copyto(container, items[0], casting="unsafe")
    else:
        for name in attributes_of(container):
            if name not in keys:
                object.__delattr__(container, name)
        for name, item in zip(keys, items, strict=True):
            object.__setattr__(container, name, item)


def tensors_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors on one device have the same layout, shape, dtype and values. NaN equals NaN."""
    if left.is_nested != right.is_nested or left.layout != right.layout:
        return False
    if left.is_nested:
        one, two = left.detach().unbind(), right.detach().unbind()
        return len(one) == len(two) and all(map(tensors_equal, one, two))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.layout is torch.sparse_coo:
        left, right = left.detach().coalesce(), right.detach().coalesce()
        return torch.equal(left.indices(), right.indices()) and tensors_equal(left.values(), right.values())
    if left.layout is not torch.strided:
        return tensors_equal(left.detach().to_dense(), right.detach().to_dense())
    if torch.equal(left, right):
        return True
    if torch.equal(left, left):  # no NaN
        return False
    left, right = left.detach(), right.detach()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


_MAX_DEPTH = 20


def values_equal(left: Any, right: Any, depth: int = 0) -> bool:
    """Whether values of two replicas are equal. A tensor that requires a gradient equals only itself."""
    if left is right:
        return True
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return not (left.requires_grad or right.requires_grad) and tensors_equal(left, right.to(left.device))
    if type(left) is not type(right):
        return False
    one, two = flatten_one_level(left), flatten_one_level(right)
    if one is not None and two is not None:
        same = list(one.keys) == list(two.keys) and all(map(values_equal, one.children, two.children))
        return same and values_equal(extra_attributes(left), extra_attributes(right), depth + 1)
    if isinstance(left, (int, float, complex, str, bytes, bool)):
        same = bool(left == right or left != left != right)
        return same and (is_atomic(left) or values_equal(attributes_of(left), attributes_of(right), depth + 1))
    if isinstance(left, weakref.ref):
        return left() is right()
    if isinstance(left, deque):
        return len(left) == len(right) and all(map(values_equal, left, right))
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    comparison: Any = type(left).__eq__
    if comparison is not object.__eq__:
        try:
            return (left == right) is True
        except Exception:  # values that cannot be compared count as different
            return False
    if depth > _MAX_DEPTH:
        return False
    mine, theirs = attributes_of(left), attributes_of(right)
    pairs = zip(mine.values(), theirs.values(), strict=False)
    return bool(mine) and list(mine) == list(theirs) and all(values_equal(one, two, depth + 1) for one, two in pairs)
