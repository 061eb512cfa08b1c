"""Handlers for types that define their own batch size, split and merge, and `instep.register`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TensorFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TypeHandler:
    """How one type is measured (`size`), cut (`split`), joined (`merge`) and rebuilt around other tensors (`map`)."""

    size: Callable[[Any], int | None]
    """The number of samples, or None for a value that is not a batch at all."""
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    """The value cut into consecutive parts of the given sizes; differentiable, sharing memory where it can."""
    merge: Callable[[Sequence[Any]], Any]
    """The inverse of `split`."""
    map: Callable[[TensorFn, Any], Any]
    """A new value in which each tensor `t` is `fn(t)`; must visit the tensors in a fixed order."""
    to_device: Callable[[Any, Any], Any] | None = None
    """The value on another device, where mapping each tensor would not do."""
    is_single_sample: bool = False
    """Whether a value is never more than one sample: a list of them is a list of samples."""


_handlers_by_type: dict[type, TypeHandler] = {}
_handlers_by_name: dict[str, TypeHandler] = {}
_handlers_by_predicate: list[tuple[Callable[[type], bool], TypeHandler]] = []
_handler_cache: dict[type, TypeHandler | None] = {}


def add_handler(key: type | str, kind: TypeHandler) -> None:
    """Teach a type, given as a class or as `"module.QualName"` of a class that may never be imported."""
    if isinstance(key, str):
        _handlers_by_name[key] = kind
    else:
        _handlers_by_type[key] = kind
    _handler_cache.clear()


def add_handler_if(test: Callable[[type], bool], kind: TypeHandler) -> None:
    """Teach the classes that pass a test, where they have no parent in common; asked after every class and name."""
    if (test, kind) not in _handlers_by_predicate:
        _handlers_by_predicate.append((test, kind))
    _handler_cache.clear()


def handler_for_type(cls: type) -> TypeHandler | None:
    """The kind of a class or of the nearest of its parents that has one."""
    try:
        return _handler_cache[cls]
    except KeyError:
        pass
    found = None
    for parent in cls.__mro__:
        found = _handlers_by_type.get(parent) or _handlers_by_name.get(f"{parent.__module__}.{parent.__qualname__}")
        if found is not None:
            break
    else:
        found = next((kind for test, kind in _handlers_by_predicate if test(cls)), None)
    _handler_cache[cls] = found
    return found
