"""What of a structure stays the same from batch to batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from instep.structure.tree import is_sequence, open_node
from instep.structure.types import kind_of


def outline(value: Any) -> Any:
    """The types, keys and ranks of a structure, hashable; a list counts by the kinds of its entries."""
    if isinstance(value, Tensor):
        return (Tensor, value.ndim, value.is_floating_point())
    node = None if kind_of(type(value)) is not None else open_node(value)
    if node is None:
        return type(value)
    below = [outline(child) for child in node.children]
    if is_sequence(value):
        return (type(value), tuple(dict.fromkeys(below)))
    return (type(value), tuple(map(str, node.keys)), tuple(below))
