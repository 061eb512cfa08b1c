"""`instep.register`: add a custom batch type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from instep.errors import StructureError
from instep.structure.tree import SCALARS, attributes_of, clear_type_cache, map_tensors, shallow_copy
from instep.structure.types import TensorFn, TypeHandler, add_handler


def register(
    cls: type,
    *,
    size: Callable[[Any], int],
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    merge: Callable[[Sequence[Any]], Any],
    map: Callable[[TensorFn, Any], Any] | None = None,
) -> None:
    """Register a type that is split and merged by its own functions.

    Args:
        cls: The type. Subclasses use the same functions.
        size: Returns the number of samples of a value.
        split: Splits a value into consecutive parts of the given sizes.
        merge: Merges the parts. The inverse of `split`.
        map: `map(fn, value)` returns a new value with `fn` applied to each tensor. It is used to move values between
            devices and to pass gradients. By default it maps the tensors in every attribute.

    Example:
        >>> import torch, instep
        >>> class Points:
        ...     def __init__(self, xyz):
        ...         self.xyz = xyz
        >>> instep.register(
        ...     Points,
        ...     size=lambda p: len(p.xyz),
        ...     split=lambda p, sizes: [Points(x) for x in p.xyz.split(list(sizes))],
        ...     merge=lambda parts: Points(torch.cat([p.xyz for p in parts])),
        ... )
        >>> [len(part.xyz) for part in instep.split(Points(torch.zeros(5, 3)), 2)]
        [3, 2]
    """
    functions: dict[str, Any] = {"size": size, "split": split, "merge": merge}
    for name, function in functions.items():
        if not callable(function):
            raise StructureError(
                f"{name}={function!r} is not callable. Write instep.register(MyBatch, size=lambda v: ..., "
                f"split=lambda v, sizes: [...], merge=lambda parts: ...)."
            )
    if cls in (*SCALARS, Tensor, list, tuple, dict):
        raise StructureError(
            f"{cls.__name__} has built-in split and merge rules and cannot be registered. Register your own class."
        )
    add_handler(cls, TypeHandler(size=size, split=split, merge=merge, map=map or map_attribute_tensors))
    clear_type_cache()


def map_attribute_tensors(fn: TensorFn, value: Any) -> Any:
    """Copy an object with `fn` applied to the tensors in its attributes."""
    copied = shallow_copy(value)
    for name, item in attributes_of(value).items():
        new = copied if item is value else map_tensors(fn, item)
        if new is not item:
            object.__setattr__(copied, name, new)
    return copied
