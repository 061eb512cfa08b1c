"""Objects that only the caller may use: iterators, and `threading.local` objects.

An iterator advances once per call, not once per replica, and a `threading.local` has other values in the threads of the
replicas. Replicas have a placeholder instead. A call whose `forward` uses it runs on one device.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from instep.errors import StateError

_BOUND_METHODS = (types.MethodWrapperType, types.BuiltinMethodType)
_LIBRARY_ROOTS = ("builtins", "numpy", "torch")


def is_caller_only(value: Any) -> bool:
    """Whether only the caller may use a value."""
    return issubclass(type(value), threading.local) or is_library_iterator(value)


def is_library_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python or a library, or a method of one (`itertools.count().__next__`).

    The state of such an iterator cannot be copied. Files do not count.
    """
    cls: Any = type(value.__self__ if type(value) in _BOUND_METHODS else value)
    return _is_library_iterator_class(cls)


@functools.cache
def _is_library_iterator_class(cls: Any) -> bool:
    if not issubclass(cls, Iterator) or hasattr(cls, "write"):
        return False
    root = (cls.__module__ or "").partition(".")[0]
    return root in _LIBRARY_ROOTS or (root in sys.stdlib_module_names and root != "__main__")


class CallerOnlyAccess(StateError):
    """A replica used an object that only the caller may use. Internal: the call runs again on one device."""


class CallerOnly:
    """The placeholder for such an object on a replica. Every use is recorded and raises `CallerOnlyAccess`."""

    __slots__ = ("_accesses", "_value")

    def __init__(self, value: Any, accesses: list[Any]) -> None:
        """`accesses` receives `value` on each use: `forward` may catch the exception."""
        object.__setattr__(self, "_value", value)
        object.__setattr__(self, "_accesses", accesses)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the object, for `isinstance`."""
        return type(object.__getattribute__(self, "_value"))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name != "__dict__":
            raise AttributeError(name)
        self._raise()

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        value = object.__getattribute__(self, "_value")
        object.__getattribute__(self, "_accesses").append(value)
        raise CallerOnlyAccess(f"a replica used a {type(value).__name__} that only the caller may use.")

    __setattr__ = __delattr__ = __call__ = __enter__ = __exit__ = __iter__ = __next__ = _raise
    __len__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _raise
    __copy__ = __deepcopy__ = __reduce_ex__ = _raise
