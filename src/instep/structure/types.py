"""Handlers for types that define their own batch size, split and merge.

Handlers for optional packages are registered by qualified class name, so that the package is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TensorFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TypeHandler:
    """Functions that size, split, merge and map values of one type."""

    size: Callable[[Any], int | None]
    """Returns the number of samples, or None if the value is not batched."""
    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    """Splits a value into consecutive parts of the given sizes. Differentiable; returns views where possible."""
    merge: Callable[[Sequence[Any]], Any]
    """The inverse of `split`."""
    map: Callable[[TensorFn, Any], Any]
    """Returns a new value with `fn` applied to each tensor, in a fixed order."""
    to_device: Callable[[Any, Any], Any] | None = None
    """Moves a value to a device. Needed only if mapping `tensor.to(device)` is not enough."""
    is_single_sample: bool = False
    """Whether every value of the type is exactly one sample."""
    sample_sizes: Callable[[Any], Tensor | None] | None = None
    """Returns a number for each sample that may be its weight in a mean, such as the nodes of each graph."""


_handlers_by_type: dict[type, TypeHandler] = {}
_handlers_by_name: dict[str, TypeHandler] = {}
_handlers_by_predicate: list[tuple[Callable[[type], bool], TypeHandler]] = []
_handler_cache: dict[type, TypeHandler | None] = {}


def add_handler(key: type | str, handler: TypeHandler) -> None:
    """Register a handler for a class, given as a type or as `"module.QualName"`."""
    if isinstance(key, str):
        _handlers_by_name[key] = handler
    else:
        _handlers_by_type[key] = handler
    _handler_cache.clear()


def add_handler_if(predicate: Callable[[type], bool], handler: TypeHandler) -> None:
    """Register a handler for classes that satisfy a predicate. Types and names take precedence."""
    if (predicate, handler) not in _handlers_by_predicate:
        _handlers_by_predicate.append((predicate, handler))
    _handler_cache.clear()


def handler_for_type(cls: type) -> TypeHandler | None:
    """The handler of a class or of its nearest base class that has one."""
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
        found = next((handler for predicate, handler in _handlers_by_predicate if predicate(cls)), None)
    _handler_cache[cls] = found
    return found
