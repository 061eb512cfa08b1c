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
    """Split the arguments. Returns one list of arguments per active replica; tensors are differentiable views."""
    if not plan.split_fns:
        plan.split_fns.extend(
            [
                _make_split_fn(placement, list(plan.sizes), (name,))
                for placement, name in zip(plan.placements, plan.names, strict=True)
            ]
        )
    columns = [split_fn(value) for split_fn, value in zip(plan.split_fns, values, strict=True)]
    return [list(part) for part in zip(*columns, strict=True)] or [[] for _ in plan.sizes]


def _make_split_fn(placement: Placement, sizes: list[int], path: Path) -> SplitFn:
    """A function that splits a value with this placement into parts of these sizes."""
    if isinstance(placement, Shard):
        return _dense_split_fn(sizes, placement.dim)
    if isinstance(placement, Replicate):
        return lambda value: [value.value if type(value) is Whole else value] * len(sizes)
    if isinstance(placement, Nested):
        entries = zip(placement.placements, placement.keys, strict=True)
        return _nested_split_fn([_make_split_fn(child, sizes, (*path, key)) for child, key in entries], sizes)
    if isinstance(placement, PerSample):
        return lambda value: _slice_sequence(value, sizes)
    if isinstance(placement, CustomSplit):
        return _custom_split_fn(placement.handler, sizes, path)
    return lambda value: list(value.parts)


def _dense_split_fn(sizes: list[int], dim: int) -> SplitFn:
    bounds = list(accumulate(sizes))[:-1]

    def split_value(value: Any) -> Sequence[Any]:
        parts: Sequence[Any]
        parts = value.split_with_sizes(sizes, dim) if isinstance(value, Tensor) else np.split(value, bounds, dim)
        return parts

    return split_value


def _nested_split_fn(child_fns: list[SplitFn], sizes: list[int]) -> SplitFn:
    def split_value(value: Any) -> Sequence[Any]:
        cls = type(value)
        if cls is dict and child_fns:
            lists = [split_fn(child) for split_fn, child in zip(child_fns, value.values())]
            return [dict(zip(value, part)) for part in zip(*lists)]
        if (cls is list or cls is tuple) and child_fns:
            columns = [split_fn(child) for split_fn, child in zip(child_fns, value)]
            return [cls(part) for part in zip(*columns)]
        node = flatten_one_level(value)
        assert node is not None
        columns = [split_fn(child) for split_fn, child in zip(child_fns, node.children)]
        return [node.unflatten(part) for part in zip(*columns)] or [node.unflatten(()) for _ in sizes]

    return split_value


def _custom_split_fn(handler: TypeHandler, sizes: list[int], path: Path) -> SplitFn:
    def split_value(value: Any) -> Sequence[Any]:
        try:
            parts = handler.split(value, sizes)
        except StructureError as error:  # handlers do not know the path
            raise cannot_split(path, value, str(error)) from error
        if len(parts) != len(sizes):
            raise StructureError(
                f"the split function of {type(value).__name__} returned {len(parts)} part(s) for the sizes {sizes}. "
                f"Return one part for each size."
            )
        return parts

    return split_value


def _slice_sequence(value: Any, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes[:-1], initial=0)
    parts = [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return parts if type(value) in (list, tuple) else [_rebuild_like(value, part) for part in parts]


def _rebuild_like(value: Any, items: Any) -> Any:
    """A list or tuple of the class of `value` with other items."""
    node = flatten_one_level(value)
    assert node is not None
    return node.unflatten(list(items))


def batch_first(placement: Placement, value: Any) -> Any:
    """A value with the batch of its tensors moved to dim 0."""
    if isinstance(placement, Shard):
        if not placement.dim:
            return value
        return value.movedim(placement.dim, 0) if isinstance(value, Tensor) else np.moveaxis(value, placement.dim, 0)
    node = flatten_one_level(value) if isinstance(placement, Nested) else None
    if node is None or not isinstance(placement, Nested):
        return value
    children = [batch_first(*pair) for pair in zip(placement.placements, node.children, strict=True)]
    moved = any(new is not old for new, old in zip(children, node.children, strict=True))
    return node.unflatten(children) if moved else value


def undo_plan(plan: SplitPlan, parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The inverse of `apply_plan`."""
    columns = zip(*parts, strict=True)
    triples = zip(plan.placements, columns, plan.names, strict=True)
    return [unsplit(placement, column, (name,)) for placement, column, name in triples]


def unsplit(placement: Placement, parts: Sequence[Any], path: Path = ()) -> Any:
    """Merge the parts of one value according to its placement."""
    if isinstance(placement, Shard):
        if isinstance(parts[0], Tensor):
            return torch.cat(list(parts), placement.dim) if len(parts) > 1 else parts[0]
        return np.concatenate(parts, placement.dim)
    if isinstance(placement, Nested):
        nodes = [
            node for node in map(flatten_one_level, parts) if node is not None and tuple(node.keys) == placement.keys
        ]
        if len(nodes) < len(parts):
            where = format_path(path)
            raise MergeError(
                f"cannot merge the parts: {repr(where) if where else 'a part'} does not have the structure that was "
                f"split.\nTo merge parts of another structure: merge(list(parts))."
            )
        columns = zip(*[node.children for node in nodes], strict=True)
        triples = zip(placement.placements, columns, placement.keys, strict=True)
        return nodes[0].unflatten([unsplit(child, column, (*path, key)) for child, column, key in triples])
    if isinstance(placement, PerSample):
        return concat_sequences(parts)
    if isinstance(placement, CustomSplit):
        try:
            return merge_by_handler(placement.handler, parts)
        except InstepError as error:  # handlers do not know the path
            sizes = [placement.handler.size(part) or 0 for part in parts]
            raise cannot_merge(path, parts, str(error), sizes) from error
    if isinstance(placement, PreSplit):
        return Shards(parts)
    return parts[0]


def concat_sequences(parts: Sequence[Any]) -> Any:
    """Concatenate lists or tuples. The result has the type of the first."""
    first = parts[0]
    items = [item for part in parts for item in part]
    return items if type(first) is list else tuple(items) if type(first) is tuple else _rebuild_like(first, items)


class Parts(list[Any]):
    """The result of `split`: a list with one part per replica, which `merge` restores exactly."""

    def __init__(self, items: Sequence[Any], plan: SplitPlan) -> None:
        super().__init__(items)
        self.plan = plan

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples in each part."""
        return self.plan.sizes


def split(value: Any, parts: int, dim: int = 0, *, in_dims: Any = AUTO, min_shard: int = 1) -> Parts:
    """Split a structure into at most `parts` parts along its batch dimension.

    Tensors are split along `dim`, lists with one entry per sample are sliced, and other values are shared by all parts.
    Sizes differ by at most one. The order of samples is kept and the result is differentiable. If a leaf does not match
    the batch size, `StructureError` names it.

    >>> parts = split({"x": torch.arange(5), "names": list("abcde"), "scale": 2.0}, 2)
    >>> parts[1]
    {'x': tensor([3, 4]), 'names': ['d', 'e'], 'scale': 2.0}
    >>> parts.sizes
    (3, 2)
    """
    if parts < 1:
        raise StructureError(f"cannot split into {parts} parts: `parts` must be at least 1.")
    plan = plan_value(value, parts, dim, in_dims=in_dims, min_shard=min_shard)
    return Parts([part[0] for part in apply_plan(plan, (value,))], plan)


def plan_value(value: Any, parts: int, dim: int = 0, *, in_dims: Any = AUTO, min_shard: int = 1) -> SplitPlan:
    """Plan the split of one unnamed structure. `in_dims` describes its contents."""
    spec = (in_dims,) if isinstance(in_dims, (list, tuple)) else in_dims
    return Planner(parts, dim, spec, min_shard).plan(("",), (value,))


MERGE_EXCEPTIONS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""Exceptions that handlers raise for parts that do not match."""

DEVICE_EXCEPTIONS = tuple(
    getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name)
)
"""Device errors, which are not caused by the parts."""

MAX_SHAPES_SHOWN = 6


def merge_by_handler(handler: TypeHandler, parts: Sequence[Any]) -> Any:
    """Merge parts by their type handler. If it fails, raise `MergeError` with the shapes of each part."""
    try:
        return handler.merge(parts)
    except (InstepError, *DEVICE_EXCEPTIONS):
        raise
    except MERGE_EXCEPTIONS as error:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        first = message.strip().partition("\n")[0].rstrip(".")
        names = list(dict.fromkeys(type(part).__name__ for part in parts))
        raise MergeError(
            f"the parts of a {' or '.join(names)} do not match: {describe_tensors(parts)} "
            f"({type(error).__name__}: {first})"
        ) from error


def describe_tensors(parts: Sequence[Any]) -> str:
    """Shapes of the tensors in each part; only those that differ if the parts have equally many tensors."""
    tensors = [list(tensors_in(part)) for part in parts]
    if len({len(found) for found in tensors}) == 1:
        columns = list(zip(*tensors, strict=True))
        differing = [column for column in columns if not _same_trailing_shape(column)] or columns
        tensors = [list(row) for row in zip(*differing, strict=True)] if differing else tensors
    return " and ".join(_format_shapes(found) for found in tensors)


def _same_trailing_shape(column: Sequence[Tensor]) -> bool:
    """Whether tensors differ at most in dim 0."""
    shapes = [shape_of(tensor) for tensor in column]
    layouts = {tensor.layout for tensor in column}
    return len(layouts) == 1 and all(shape[1:] == shapes[0][1:] for shape in shapes)


def _format_shapes(tensors: Sequence[Tensor]) -> str:
    shown = ", ".join(str(shape_of(tensor)) for tensor in tensors[:MAX_SHAPES_SHOWN])
    more = f" and {len(tensors) - MAX_SHAPES_SHOWN} more" if len(tensors) > MAX_SHAPES_SHOWN else ""
    return f"tensors of shapes {shown}{more}" if tensors else "no tensors"


def infer_part_sizes(parts: Sequence[Any], dim: int) -> list[int]:
    """The number of samples in each part, from tensors outside lists or else from lists."""
    sizes = [count_samples(part, dim, count_lists=False) for part in parts]
    if all(size is None for size in sizes):
        lists = [_first_list(part) for part in parts]
        sizes = [None if items is None else len(items) for items in lists]
        inner = [{size_along(item, dim) for item in items or () if isinstance(item, Tensor)} for items in lists]
        differ = any(found != {sizes[0]} for found in inner)
        if differ and len(set(sizes)) == 1 and all(len(found) == 1 for found in inner):
            raise ambiguous_part_sizes(sizes[0], inner)
    return [0 if size is None else size for size in sizes]


def _first_list(part: Any) -> list[Any] | None:
    if isinstance(part, list):
        return part
    node = flatten_one_level(part)
    found = map(_first_list, node.children if node is not None else ())
    return next((items for items in found if items is not None), None)
