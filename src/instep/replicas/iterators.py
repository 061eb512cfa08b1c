"""Iterators that a module holds: a generator as a schedule, `itertools.count`, the batches of another loader.

An iterator cannot be had twice, and each replica that asked it would take away what the others were to get. So a
replica has something else in its place that gives nothing, and remembers that it was asked: then the call is one for
the module itself. So it is with a `threading.local`, in which the thread of a replica would see nothing of what the
caller's sees, nor the caller what replicas left there.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from instep.errors import StateError

_BOUND = (types.MethodWrapperType, types.BuiltinMethodType)
_NOT_THE_USERS = ("builtins", "numpy", "torch")


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own or of a library's, which nobody can look into, or a method of one
    (`itertools.count().__next__`). Files are none."""
    cls: Any = type(value.__self__ if isinstance(value, _BOUND) else value)
    return _is_iterator(cls)


@functools.cache
def _is_iterator(cls: Any) -> bool:
    if not issubclass(cls, Iterator) or hasattr(cls, "write"):
        return False
    root = (cls.__module__ or "").partition(".")[0]
    return root in _NOT_THE_USERS or (root in sys.stdlib_module_names and root != "__main__")


def is_local(value: Any) -> bool:
    """Whether a value holds something else for each thread."""
    return issubclass(type(value), threading.local)


class StandIn:
    """What a replica has in place of an iterator."""

    __slots__ = ("_asked", "_iterator")

    def __init__(self, iterator: Any, asked: list[Any]) -> None:
        self._iterator = iterator
        self._asked = asked
        """Every iterator that some replica has asked for something."""

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> NoReturn:
        self._refuse()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._asked.append(self._iterator)
        raise StateError(
            f"forward asks an iterator that the module holds ({type(self._iterator).__name__}): it can go on once for "
            f"each call, and not once for each replica.\n"
            f"Call next() outside, and give forward the value as an argument."
        )


class LocalStandIn:
    """What a replica has in place of a `threading.local`; it says that it is of the same class."""

    __slots__ = ("_asked", "_local")

    def __init__(self, local: Any, asked: list[Any]) -> None:
        object.__setattr__(self, "_local", local)
        object.__setattr__(self, "_asked", asked)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_local"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__" and not hasattr(self.__class__, name):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        local = object.__getattribute__(self, "_local")
        object.__getattribute__(self, "_asked").append(local)
        raise StateError(
            f"forward uses a {type(local).__name__} that the module holds, in which each thread has values of its own "
            f"(threading.local): replicas do not see the caller's.\n"
            f"Keep them as plain attributes of the module: each replica has its own there."
        )

    __setattr__ = __delattr__ = __call__ = __enter__ = __exit__ = __iter__ = __next__ = _refuse
    __len__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refuse


def stand_in(value: Any, asked: list[Any]) -> Any:
    """What a replica has in place of something that only the caller can ask."""
    return LocalStandIn(value, asked) if is_local(value) else StandIn(value, asked)


def is_the_callers(value: Any) -> bool:
    """Whether only the caller can ask a value: an iterator, or what each thread has its own of."""
    return is_local(value) or is_iterator(value)


def only_the_callers(value: Any, name: str) -> str:
    """Why calls run on one device that ask for such a value, and what to do."""
    if is_local(value):
        return (
            f"forward uses {name!r}, in which each thread has values of its own (threading.local): calls run on one "
            f"device, in the caller's thread.\nKeep them as plain attributes: each replica has its own."
        )
    return (
        f"forward may draw from the iterator {name!r}, of which there is one for all replicas: calls run on "
        f"one device.\nDraw from it outside, and set what it gave as an attribute."
    )
