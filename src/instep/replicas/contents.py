"""What a container holds: read as a whole, compared by identity, and put back in place.

Containers are lists, deques, sets, dictionaries, objects with slots, and numpy arrays. The attributes of an ordinary
object are the dictionary that it keeps them in; so are those that a list or dictionary of a class of its own has.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from instep.structure.tree import attributes_of, has_slots


class Contents(NamedTuple):
    """What was in a container: its items, and their keys where it has any."""

    keys: tuple[Any, ...]
    items: tuple[Any, ...]

    def by_key(self) -> dict[Any, Any]:
        """The items of a dictionary or an object."""
        return dict(zip(self.keys, self.items, strict=True))


def is_array(value: Any) -> bool:
    """Whether a value is a numpy array of numbers, which is changed in place like a container."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject


def holder_of(value: Any) -> Any:
    """What an object keeps its attributes in: its dictionary, itself where it has slots, or None."""
    cls: type = type(value)
    if has_slots(cls):
        return value
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def beside(value: Any) -> dict[str, Any] | None:
    """The attributes that a list, tuple, set or dictionary of the user's own class has beside its items."""
    if not isinstance(value, (dict, list, tuple, deque, set)) or type(value).__module__ in ("builtins", "collections"):
        return None
    attributes = getattr(value, "__dict__", None)  # of another type where the items themselves are the attributes
    return attributes if type(attributes) is dict else None


def _table(container: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class whose methods read and write a dictionary past code of the user's; an ordered one has a second list."""
    return OrderedDict if isinstance(container, OrderedDict) else dict


def contents_of(container: Any) -> Contents:
    """What is in a container now."""
    if isinstance(container, dict):
        table = _table(container)
        return Contents(tuple(table.keys(container)), tuple(table.values(container)))
    if isinstance(container, (list, deque, set)):
        return Contents((), tuple(container))
    if is_array(container):
        return Contents((), (container.copy(),))
    slots = attributes_of(container)
    return Contents(tuple(slots), tuple(slots.values()))


def holds_still(container: Any, contents: Contents) -> bool:
    """Whether a container holds the very same objects; an array, the same numbers."""
    if isinstance(container, dict):
        table = _table(container)
        same = len(container) == len(contents.items) and all(map(is_, table.values(container), contents.items))
        return same and all(map(is_, table.keys(container), contents.keys))
    if isinstance(container, (list, deque)):
        return len(container) == len(contents.items) and all(map(is_, container, contents.items))
    if isinstance(container, set):
        return len(container) == len(contents.items) and set(map(id, container)) == set(map(id, contents.items))
    if is_array(container):
        (then,) = contents.items
        return bool(container.shape == then.shape) and np.array_equal(
            container, then, equal_nan=container.dtype.kind in "fc"
        )
    now = contents_of(container)
    return now.keys == contents.keys and all(map(is_, now.items, contents.items))


def put(container: Any, contents: Contents) -> None:
    """Make a container hold this and nothing else."""
    keys, items = contents
    if isinstance(container, dict):
        table = _table(container)
        table.clear(container)
        for key, item in zip(keys, items, strict=True):
            table.__setitem__(container, key, item)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    elif isinstance(container, (deque, set)):
        container.clear()
        container.extend(items) if isinstance(container, deque) else container.update(items)
    elif is_array(container):
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
