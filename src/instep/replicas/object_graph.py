"""Reading, comparing and writing the contents of containers and objects."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.structure.tree import SCALARS, attributes_of, flatten_one_level, has_slots

_ATOMIC_TYPES = (type, types.ModuleType, types.CodeType, torch.dtype, torch.device, torch.Size)


def is_atomic(value: Any) -> bool:
    """Whether nothing can be reached from a value or be changed in it.

    A number or text of a class of its own may have attributes (`class Level(int)`), and then it is an object like
    others.
    """
    cls: Any = type(value)
    return _is_atomic_class(cls)


@functools.cache
def _is_atomic_class(cls: Any) -> bool:
    return issubclass(cls, _ATOMIC_TYPES) or (issubclass(cls, SCALARS) and not (cls.__dictoffset__ or has_slots(cls)))


_COLLECTIONS = (dict, list, tuple, deque, set, frozenset, np.ndarray)


class Contents(NamedTuple):
    """What was in a container: its items, and their keys where it has any."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def by_key(self) -> dict[Any, Any]:
        """The items of a dictionary or an object."""
        return dict(zip(self.keys, self.items, strict=True))


def is_numeric_array(value: Any) -> bool:
    """Whether a value is a numpy array of numbers, which is changed in place like a container."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def attribute_storage(value: Any) -> Any:
    """What an object keeps its attributes in: its dictionary, itself where it has slots, or None."""
    cls: type = type(value)
    if has_slots(cls):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def extra_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes that a container or array of the user's own class has beside its items; or those of a function."""
    if isinstance(value, types.FunctionType):
        return None if (value.__module__ or "").startswith("torch") else value.__dict__
    if not isinstance(value, _COLLECTIONS) or type(value).__module__ in ("builtins", "collections"):
        return None
    attributes = getattr(value, "__dict__", None)  # of another type where the items themselves are the attributes
    return attributes if type(attributes) is dict else None


def _dict_class(container: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class whose methods read and write a dictionary past code of the user's; an ordered one has a second list."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def read_contents(container: Any) -> Contents:
    """What is in a container now."""
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
    """Whether a container holds the very same objects; an array, the same numbers."""
    if isinstance(container, dict):
        table = _dict_class(container)
        same = len(container) == len(contents.items) and all(map(is_, table.values(container), contents.items))
        return same and all(map(is_, table.keys(container), contents.keys))
    if isinstance(container, (list, deque)):
        return len(container) == len(contents.items) and all(map(is_, container, contents.items))
    if isinstance(container, set):
        return len(container) == len(contents.items) and set(map(id, container)) == set(map(id, contents.items))
    if is_numeric_array(container):
        (then,) = contents.items
        return bool(container.shape == then.shape) and np.array_equal(
            container, then, equal_nan=container.dtype.kind in "fc"
        )
    now = read_contents(container)
    return now.keys == contents.keys and all(map(is_, now.items, contents.items))


def write_contents(container: Any, contents: Contents) -> None:
    """Make a container hold this and nothing else."""
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
        if container.shape == items[0].shape:
            np.copyto(container, items[0], casting="unsafe")
        else:
            container.resize(items[0].shape, refcheck=False)
            np.copyto(container, items[0], casting="unsafe")
    else:
        for name in attributes_of(container):
            if name not in keys:
                object.__delattr__(container, name)
        for name, item in zip(keys, items, strict=True):
            object.__setattr__(container, name, item)


def tensors_equal(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one device hold the same numbers; a NaN equals a NaN."""
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
    if torch.equal(left, left):  # there is no NaN in it
        return False
    left, right = left.detach(), right.detach()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


_MAX_DEPTH = 20


def values_equal(left: Any, right: Any, depth: int = 0) -> bool:
    """Whether two values that replicas hold are equal; a tensor that needs a gradient equals only itself."""
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
        except Exception:  # values that cannot even be compared are not known to be equal
            return False
    if depth > _MAX_DEPTH:
        return False
    mine, theirs = attributes_of(left), attributes_of(right)
    pairs = zip(mine.values(), theirs.values(), strict=False)
    return bool(mine) and list(mine) == list(theirs) and all(values_equal(one, two, depth + 1) for one, two in pairs)
