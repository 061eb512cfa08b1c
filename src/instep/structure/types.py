"""Types that are measured, cut and joined by a rule of their own.

A `Kind` is everything the structure layer wants to know about such a type. Kinds of optional packages are kept by
the qualified name of their class, so that nothing is imported only to be recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TensorMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """How one type is measured (`size`), cut (`split`), joined (`merge`) and rebuilt around other tensors (`map`)."""

    size: Callable[[Any], int | None]
    """The number of samples, or None for a value that is not a batch at all."""
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    """The value cut into consecutive parts of the given sizes; differentiable, sharing memory where it can."""
    merge: Callable[[Sequence[Any]], Any]
    """The inverse of `split`."""
    map: Callable[[TensorMap, Any], Any]
    """A new value in which each tensor `t` is `fn(t)`; must visit the tensors in a fixed order."""
    move: Callable[[Any, Any], Any] | None = None
    """The value on another device, where mapping each tensor would not do."""
    one_sample: bool = False
    """Whether a value is never more than one sample: a list of them is a list of samples."""


_by_type: dict[type, Kind] = {}
_by_name: dict[str, Kind] = {}
_by_test: list[tuple[Callable[[type], bool], Kind]] = []
_found: dict[type, Kind | None] = {}


def add_kind(key: type | str, kind: Kind) -> None:
    """Teach a type, given as a class or as `"module.QualName"` of a class that may never be imported."""
    if isinstance(key, str):
        _by_name[key] = kind
    else:
        _by_type[key] = kind
    _found.clear()


def add_kind_of(test: Callable[[type], bool], kind: Kind) -> None:
    """Teach the classes that pass a test, where they have no parent in common; asked after every class and name."""
    if (test, kind) not in _by_test:
        _by_test.append((test, kind))
    _found.clear()


def kind_of(cls: type) -> Kind | None:
    """The kind of a class or of the nearest of its parents that has one."""
    try:
        return _found[cls]
    except KeyError:
        pass
    found = None
    for parent in cls.__mro__:
        found = _by_type.get(parent) or _by_name.get(f"{parent.__module__}.{parent.__qualname__}")
        if found is not None:
            break
    else:
        found = next((kind for test, kind in _by_test if test(cls)), None)
    _found[cls] = found
    return found
