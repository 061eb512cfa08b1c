"""Acting on a plan: one structure into the parts of the replicas, and the exact inverse.

`apply_plan` and `undo_plan` are inverse: what one cuts the other joins, with types, order and gradients kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.dims import AUTO
from instep.structure.marks import Shards, Whole
from instep.structure.plan import Planner, SplitPlan
from instep.structure.roles import Column, Custom, Cut, Inside, Ready, Role
from instep.structure.tree import open_node


def apply_plan(plan: SplitPlan, values: Sequence[Any]) -> list[list[Any]]:
    """For each active replica, its part of every argument; tensors are views and differentiable."""
    columns = [cut(role, value, plan.sizes) for role, value in zip(plan.roles, values, strict=True)]
    return [[column[index] for column in columns] for index in range(plan.parts)]


def cut(role: Role, value: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """The parts of one value under its role."""
    if isinstance(role, Cut):
        if isinstance(value, Tensor):
            return value.split(list(sizes), role.dim)
        return np.split(value, list(accumulate(sizes))[:-1], role.dim)
    if isinstance(role, Inside):
        node = open_node(value)
        assert node is not None
        columns = [cut(below, child, sizes) for below, child in zip(role.roles, node.children, strict=True)]
        return [node.close([column[index] for column in columns]) for index in range(len(sizes))]
    if isinstance(role, Column):
        return _slices(value, sizes)
    if isinstance(role, Custom):
        return role.kind.split(value, sizes)
    if isinstance(role, Ready):
        return list(value.parts)
    return [value.value if isinstance(value, Whole) else value] * len(sizes)


def _slices(value: Any, sizes: Sequence[int]) -> list[Any]:
    ends = list(accumulate(sizes))
    node = open_node(value)
    assert node is not None
    plain = type(value) in (list, tuple)
    parts = [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return parts if plain else [_like(value, part) for part in parts]


def _like(value: Any, items: Any) -> Any:
    """A list or tuple of the class of `value` around other items."""
    if type(items) is type(value):
        return items
    node = open_node(value)
    assert node is not None
    return node.close(list(items))


def undo_plan(plan: SplitPlan, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The arguments that `apply_plan` cut into these parts."""
    return [uncut(role, column) for role, column in zip(plan.roles, zip(*parts, strict=True), strict=True)]


def uncut(role: Role, parts: Sequence[Any]) -> Any:
    """The inverse of `cut`."""
    if isinstance(role, Cut):
        if isinstance(parts[0], Tensor):
            return torch.cat(list(parts), role.dim) if len(parts) > 1 else parts[0]
        return np.concatenate(parts, role.dim)
    if isinstance(role, Inside):
        nodes = [open_node(part) for part in parts]
        if any(node is None or tuple(node.keys) != role.keys for node in nodes):
            raise MergeError("these parts do not have the structure that was split.")
        columns = zip(*[node.children for node in nodes if node is not None], strict=True)
        first = nodes[0]
        assert first is not None
        return first.close([uncut(below, column) for below, column in zip(role.roles, columns, strict=True)])
    if isinstance(role, Column):
        return join(parts)
    if isinstance(role, Custom):
        return role.kind.merge(parts)
    if isinstance(role, Ready):
        return Shards(parts)
    return parts[0]


def join(parts: Sequence[Any]) -> Any:
    """Lists or tuples end to end, in the class of the first."""
    first = parts[0]
    items = [item for part in parts for item in part]
    return items if type(first) is list else tuple(items) if type(first) is tuple else _like(first, items)


class Parts(list[Any]):
    """What `split` returns: a list with one part a replica, that `merge` puts together exactly as it was."""

    def __init__(self, items: Sequence[Any], plan: SplitPlan) -> None:
        super().__init__(items)
        self.plan = plan

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples in each part."""
        return self.plan.sizes


def split(value: Any, parts: int, dim: int = 0, *, in_dims: Any = AUTO, min_shard: int = 1) -> Parts:
    """Split any structure into at most `parts` parts along its batch.

    Tensors are cut along `dim`, lists with one entry a sample are sliced, everything else is shared. Sizes differ by
    at most one, order is kept, gradients flow. Where a leaf does not fit, `StructureError` names it.

    >>> parts = split({"x": torch.arange(5), "names": list("abcde"), "scale": 2.0}, 2)
    >>> parts[1]
    {'x': tensor([3, 4]), 'names': ['d', 'e'], 'scale': 2.0}
    >>> parts.sizes
    (3, 2)
    """
    nested = {"value": in_dims} if not _is_plain(in_dims) else in_dims
    plan = Planner(parts, dim, nested, min_shard).plan(("value",), (value,))
    return Parts([part[0] for part in apply_plan(plan, (value,))], plan)


def _is_plain(in_dims: Any) -> bool:
    return in_dims is None or isinstance(in_dims, (int, str))
