"""Teaching instep a type."""

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
    """Teach instep how many samples a value of `cls` holds, how to cut it into parts of given sizes, and to join them.

    `map(fn, value)` makes a new value with each tensor `t` replaced by `fn(t)`; left out, every attribute that holds
    tensors is mapped. It is how such a value moves between devices and how gradients pass through it.

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
    rules: dict[str, Any] = {"size": size, "split": split, "merge": merge}
    for name, rule in rules.items():
        if not callable(rule):
            raise StructureError(
                f"{name}={rule!r} is no function: write instep.register(MyBatch, size=lambda v: ..., "
                f"split=lambda v, sizes: [...], merge=lambda parts: ...)."
            )
    if cls in (*SCALARS, Tensor, list, tuple, dict):
        raise StructureError(f"{cls.__name__} is split and merged by rules of its own: register a class of yours.")
    add_handler(cls, TypeHandler(size=size, split=split, merge=merge, map=map or map_attribute_tensors))
    clear_type_cache()


def map_attribute_tensors(fn: TensorFn, value: Any) -> Any:
    """A copy of an object in which the tensors held by its attributes are mapped."""
    made = shallow_copy(value)
    for name, item in attributes_of(value).items():
        new = made if item is value else map_tensors(fn, item)
        if new is not item:
            object.__setattr__(made, name, new)
    return made
