"""How many samples parts hold that come from no call, and so have nobody who says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from instep.structure.fit import samples_in, size_along
from instep.structure.merge_messages import unknown_sizes
from instep.structure.tree import open_node


def sizes_seen(parts: Sequence[Any], dim: int) -> list[int]:
    """The number of samples of each part: by its tensors outside lists, else by its lists."""
    sizes = [samples_in(part, dim, lists=False) for part in parts]
    if all(size is None for size in sizes):
        lists = [_first_list(part) for part in parts]
        sizes = [None if items is None else len(items) for items in lists]
        inner = [{size_along(item, dim) for item in items or () if isinstance(item, Tensor)} for items in lists]
        if len(set(sizes)) == 1 and all(len(found) == 1 for found in inner):
            raise unknown_sizes(sizes[0], inner)
    return [0 if size is None else size for size in sizes]


def _first_list(part: Any) -> list[Any] | None:
    if isinstance(part, list):
        return part
    node = open_node(part)
    found = map(_first_list, node.children if node is not None else ())
    return next((items for items in found if items is not None), None)
