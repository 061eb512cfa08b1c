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

from instep.errors import InstepError, MergeError, StructureError
from instep.structure.dims import AUTO
from instep.structure.joining import join_by_kind
from instep.structure.marks import Shards, Whole
from instep.structure.merge_messages import cannot_merge
from instep.structure.messages import cannot_cut
from instep.structure.plan import Cutter, Planner, SplitPlan
from instep.structure.roles import Column, Custom, Cut, Inside, Keep, Ready, Role
from instep.structure.tree import Path, open_node, show_path
from instep.structure.types import Kind


def apply_plan(plan: SplitPlan, values: Sequence[Any]) -> list[list[Any]]:
    """For each active replica, its part of every argument; tensors are views and differentiable."""
    if not plan.cutters:
        plan.cutters.extend(
            [_cutter(role, list(plan.sizes), (name,)) for role, name in zip(plan.roles, plan.names, strict=True)]
        )
    columns = [cut(value) for cut, value in zip(plan.cutters, values, strict=True)]
    return [list(part) for part in zip(*columns, strict=True)] or [[] for _ in plan.sizes]


def _cutter(role: Role, sizes: list[int], path: Path) -> Cutter:
    """What cuts a value that has this role into parts of these sizes."""
    if isinstance(role, Cut):
        return _dense(sizes, role.dim)
    if isinstance(role, Keep):
        return lambda value: [value.value if type(value) is Whole else value] * len(sizes)
    if isinstance(role, Inside):
        entries = zip(role.roles, role.keys, strict=True)
        return _inside([_cutter(below, sizes, (*path, key)) for below, key in entries], sizes)
    if isinstance(role, Column):
        return lambda value: _slices(value, sizes)
    if isinstance(role, Custom):
        return _by_kind(role.kind, sizes, path)
    return lambda value: list(value.parts)


def _dense(sizes: list[int], dim: int) -> Cutter:
    bounds = list(accumulate(sizes))[:-1]

    def cut(value: Any) -> Sequence[Any]:
        parts: Sequence[Any]
        parts = value.split_with_sizes(sizes, dim) if isinstance(value, Tensor) else np.split(value, bounds, dim)
        return parts

    return cut


def _inside(below: list[Cutter], sizes: list[int]) -> Cutter:
    def cut(value: Any) -> Sequence[Any]:
        cls = type(value)
        if cls is dict and below:
            lists = [cut(child) for cut, child in zip(below, value.values())]
            return [dict(zip(value, part)) for part in zip(*lists)]
        if (cls is list or cls is tuple) and below:
            columns = [cut(child) for cut, child in zip(below, value)]
            return [cls(part) for part in zip(*columns)]
        node = open_node(value)
        assert node is not None
        columns = [cut(child) for cut, child in zip(below, node.children)]
        return [node.close(part) for part in zip(*columns)] or [node.close(()) for _ in sizes]

    return cut


def _by_kind(kind: Kind, sizes: list[int], path: Path) -> Cutter:
    def cut(value: Any) -> Sequence[Any]:
        try:
            parts = kind.split(value, sizes)
        except StructureError as error:  # it does not know where its value stands
            raise cannot_cut(path, value, str(error)) from error
        if len(parts) != len(sizes):
            raise StructureError(f"the split of {type(value).__name__} gave {len(parts)} parts for sizes {sizes}.")
        return parts

    return cut


def _slices(value: Any, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes[:-1], initial=0)
    parts = [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return parts if type(value) in (list, tuple) else [_like(value, part) for part in parts]


def _like(value: Any, items: Any) -> Any:
    """A list or tuple of the class of `value` around other items."""
    node = open_node(value)
    assert node is not None
    return node.close(list(items))


def undo_plan(plan: SplitPlan, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The arguments that `apply_plan` cut into these parts."""
    columns = zip(*parts, strict=True)
    triples = zip(plan.roles, columns, plan.names, strict=True)
    return [uncut(role, column, (name,)) for role, column, name in triples]


def uncut(role: Role, parts: Sequence[Any], path: Path = ()) -> Any:
    """The inverse of `cut`."""
    if isinstance(role, Cut):
        if isinstance(parts[0], Tensor):
            return torch.cat(list(parts), role.dim) if len(parts) > 1 else parts[0]
        return np.concatenate(parts, role.dim)
    if isinstance(role, Inside):
        nodes = [node for node in map(open_node, parts) if node is not None and tuple(node.keys) == role.keys]
        if len(nodes) < len(parts):
            where = show_path(path)
            raise MergeError(f"{repr(where) if where else 'a part'} does not have the structure that was split.")
        columns = zip(*[node.children for node in nodes], strict=True)
        triples = zip(role.roles, columns, role.keys, strict=True)
        return nodes[0].close([uncut(below, column, (*path, key)) for below, column, key in triples])
    if isinstance(role, Column):
        return join(parts)
    if isinstance(role, Custom):
        try:
            return join_by_kind(role.kind, parts)
        except InstepError as error:  # it does not know where its value stood
            sizes = [role.kind.size(part) or 0 for part in parts]
            raise cannot_merge(path, parts, str(error), sizes) from error
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
    if parts < 1:
        raise StructureError(f"split into {parts} parts: there has to be at least one.")
    plan = plan_value(value, parts, dim, in_dims=in_dims, min_shard=min_shard)
    return Parts([part[0] for part in apply_plan(plan, (value,))], plan)


def plan_value(value: Any, parts: int, dim: int = 0, *, in_dims: Any = AUTO, min_shard: int = 1) -> SplitPlan:
    """A plan for one structure that has no name; `in_dims` speaks of what is inside it."""
    spec = (in_dims,) if isinstance(in_dims, (list, tuple)) else in_dims
    return Planner(parts, dim, spec, min_shard).plan(("",), (value,))
