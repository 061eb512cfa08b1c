"""Iterators that a module holds: a generator as a schedule, `itertools.count`, the batches of another loader.

An iterator cannot be had twice, and each replica that asked it would take away what the others were to get. So a
replica has something else in its place that gives nothing, and remembers that it was asked: then the call is one for
the module itself.
"""

from __future__ import annotations

import functools
import sys
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
