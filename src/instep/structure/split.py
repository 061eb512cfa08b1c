"""Split arguments into shards according to a plan, and the inverse."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import InstepError, MergeError, StructureError
from instep.structure.infer import count_samples, size_along
from instep.structure.merge_messages import ambiguous_part_sizes, cannot_merge
from instep.structure.placements import CustomSplit, Nested, PerSample, Placement, PreSplit, Replicate, Shard
from instep.structure.plan import Planner, SplitFn, SplitPlan
from instep.structure.shapes import shape_of
from instep.structure.spec import AUTO, Shards, Whole
from instep.structure.split_messages import cannot_split
from instep.structure.tree import Path, flatten_one_level, format_path, tensors_in
from instep.structure.types import TypeHandler


def apply_plan(plan: SplitPlan, values: Sequence[Any]) -> list[list[Any]]:
    """For each active replica, its part of every argument; tensors are views and differentiable."""
    if not plan.split_fns:
        plan.split_fns.extend(
            [
                _make_split_fn(role, list(plan.sizes), (name,))
                for role, name in zip(plan.placements, plan.names, strict=True)
            ]
        )
    columns = [cut(value) for cut, value in zip(plan.split_fns, values, strict=True)]
    return [list(part) for part in zip(*columns, strict=True)] or [[] for _ in plan.sizes]


def _make_split_fn(role: Placement, sizes: list[int], path: Path) -> SplitFn:
    """What cuts a value that has this role into parts of these sizes."""
    if isinstance(role, Shard):
        return _dense_split_fn(sizes, role.dim)
    if isinstance(role, Replicate):
        return lambda value: [value.value if type(value) is Whole else value] * len(sizes)
    if isinstance(role, Nested):
        entries = zip(role.placements, role.keys, strict=True)
        return _nested_split_fn([_make_split_fn(below, sizes, (*path, key)) for below, key in entries], sizes)
    if isinstance(role, PerSample):
        return lambda value: _slice_sequence(value, sizes)
    if isinstance(role, CustomSplit):
        return _custom_split_fn(role.handler, sizes, path)
    return lambda value: list(value.parts)


def _dense_split_fn(sizes: list[int], dim: int) -> SplitFn:
    bounds = list(accumulate(sizes))[:-1]

    def cut(value: Any) -> Sequence[Any]:
        parts: Sequence[Any]
        parts = value.split_with_sizes(sizes, dim) if isinstance(value, Tensor) else np.split(value, bounds, dim)
        return parts

    return cut


def _nested_split_fn(below: list[SplitFn], sizes: list[int]) -> SplitFn:
    def cut(value: Any) -> Sequence[Any]:
        cls = type(value)
        if cls is dict and below:
            lists = [cut(child) for cut, child in zip(below, value.values())]
            return [dict(zip(value, part)) for part in zip(*lists)]
        if (cls is list or cls is tuple) and below:
            columns = [cut(child) for cut, child in zip(below, value)]
            return [cls(part) for part in zip(*columns)]
        node = flatten_one_level(value)
        assert node is not None
        columns = [cut(child) for cut, child in zip(below, node.children)]
        return [node.unflatten(part) for part in zip(*columns)] or [node.unflatten(()) for _ in sizes]

    return cut


def _custom_split_fn(kind: TypeHandler, sizes: list[int], path: Path) -> SplitFn:
    def cut(value: Any) -> Sequence[Any]:
        try:
            parts = kind.split(value, sizes)
        except StructureError as error:  # it does not know where its value stands
            raise cannot_split(path, value, str(error)) from error
        if len(parts) != len(sizes):
            raise StructureError(f"the split of {type(value).__name__} gave {len(parts)} parts for sizes {sizes}.")
        return parts

    return cut


def _slice_sequence(value: Any, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes[:-1], initial=0)
    parts = [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return parts if type(value) in (list, tuple) else [_rebuild_like(value, part) for part in parts]


def _rebuild_like(value: Any, items: Any) -> Any:
    """A list or tuple of the class of `value` around other items."""
    node = flatten_one_level(value)
    assert node is not None
    return node.unflatten(list(items))


def undo_plan(plan: SplitPlan, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The arguments that `apply_plan` cut into these parts."""
    columns = zip(*parts, strict=True)
    triples = zip(plan.placements, columns, plan.names, strict=True)
    return [unsplit(role, column, (name,)) for role, column, name in triples]


def unsplit(role: Placement, parts: Sequence[Any], path: Path = ()) -> Any:
    """The inverse of `cut`."""
    if isinstance(role, Shard):
        if isinstance(parts[0], Tensor):
            return torch.cat(list(parts), role.dim) if len(parts) > 1 else parts[0]
        return np.concatenate(parts, role.dim)
    if isinstance(role, Nested):
        nodes = [node for node in map(flatten_one_level, parts) if node is not None and tuple(node.keys) == role.keys]
        if len(nodes) < len(parts):
            where = format_path(path)
            raise MergeError(f"{repr(where) if where else 'a part'} does not have the structure that was split.")
        columns = zip(*[node.children for node in nodes], strict=True)
        triples = zip(role.placements, columns, role.keys, strict=True)
        return nodes[0].unflatten([unsplit(below, column, (*path, key)) for below, column, key in triples])
    if isinstance(role, PerSample):
        return concat_sequences(parts)
    if isinstance(role, CustomSplit):
        try:
            return merge_by_handler(role.handler, parts)
        except InstepError as error:  # it does not know where its value stood
            sizes = [role.handler.size(part) or 0 for part in parts]
            raise cannot_merge(path, parts, str(error), sizes) from error
    if isinstance(role, PreSplit):
        return Shards(parts)
    return parts[0]


def concat_sequences(parts: Sequence[Any]) -> Any:
    """Lists or tuples end to end, in the class of the first."""
    first = parts[0]
    items = [item for part in parts for item in part]
    return items if type(first) is list else tuple(items) if type(first) is tuple else _rebuild_like(first, items)


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


MERGE_EXCEPTIONS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What torch and the packages raise for values that are not alike."""

DEVICE_EXCEPTIONS = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
"""Errors of torch that say nothing of what was to be joined."""

MAX_SHAPES_SHOWN = 6


def merge_by_handler(kind: TypeHandler, parts: Sequence[Any]) -> Any:
    """The parts joined by their type's rule; `MergeError` with what each part holds where the rule fails on them."""
    try:
        return kind.merge(parts)
    except (InstepError, *DEVICE_EXCEPTIONS):
        raise
    except MERGE_EXCEPTIONS as error:
        said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        first = said.strip().partition("\n")[0].rstrip(".")
        names = list(dict.fromkeys(type(part).__name__ for part in parts))
        raise MergeError(
            f"the parts of a {' or '.join(names)} do not go together: {describe_tensors(parts)} ({type(error).__name__}: {first})"
        ) from error


def describe_tensors(parts: Sequence[Any]) -> str:
    """The shapes of the tensors that each part holds; only of those that differ, where they can be told."""
    tensors = [list(tensors_in(part)) for part in parts]
    if len({len(found) for found in tensors}) == 1:
        columns = list(zip(*tensors, strict=True))
        differing = [column for column in columns if not _same_trailing_shape(column)] or columns
        tensors = [list(row) for row in zip(*differing, strict=True)] if differing else tensors
    return " and ".join(_format_shapes(found) for found in tensors)


def _same_trailing_shape(column: Sequence[Tensor]) -> bool:
    """Whether tensors differ in their first dim at most."""
    shapes = [shape_of(tensor) for tensor in column]
    layouts = {tensor.layout for tensor in column}
    return len(layouts) == 1 and all(shape[1:] == shapes[0][1:] for shape in shapes)


def _format_shapes(tensors: Sequence[Tensor]) -> str:
    shown = ", ".join(str(shape_of(tensor)) for tensor in tensors[:MAX_SHAPES_SHOWN])
    more = f" and {len(tensors) - MAX_SHAPES_SHOWN} more" if len(tensors) > MAX_SHAPES_SHOWN else ""
    return f"tensors of shapes {shown}{more}" if tensors else "no tensors"


def infer_part_sizes(parts: Sequence[Any], dim: int) -> list[int]:
    """The number of samples of each part: by its tensors outside lists, else by its lists."""
    sizes = [count_samples(part, dim, count_lists=False) for part in parts]
    if all(size is None for size in sizes):
        lists = [_first_list(part) for part in parts]
        sizes = [None if items is None else len(items) for items in lists]
        inner = [{size_along(item, dim) for item in items or () if isinstance(item, Tensor)} for items in lists]
        if len(set(sizes)) == 1 and all(len(found) == 1 for found in inner):
            raise ambiguous_part_sizes(sizes[0], inner)
    return [0 if size is None else size for size in sizes]


def _first_list(part: Any) -> list[Any] | None:
    if isinstance(part, list):
        return part
    node = flatten_one_level(part)
    found = map(_first_list, node.children if node is not None else ())
    return next((items for items in found if items is not None), None)
