"""Collectives for use inside `forward`; on a single replica they return their argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.collectives.exchange import exchange_tensors
from instep.collectives.group import SINGLE_REPLICA, ReplicaContext, ReplicaInfo, current_context, exempt_collective
from instep.errors import CollectiveError
from instep.runtime.modes import disable_compile_for_collective
from instep.structure.shapes import is_dense
from instep.structure.tree import Path, flatten_one_level, format_path, map_tensors, tensors_in
from instep.structure.types import handler_for_type

REDUCE_OPS = ("sum", "mean", "max", "min")


@disable_compile_for_collective
def replica() -> ReplicaInfo:
    """Which replica this is: `index` of `count`, its `device`, its shard's `size` and `offset` in the batch."""
    context = current_context()
    if context is None:
        exempt_collective()
        return SINGLE_REPLICA
    return context.info


@disable_compile_for_collective
def all_reduce(x: Any, op: str = "sum") -> Any:
    """Reduce every tensor and number of a structure over all replicas; every replica gets the result.

    Differentiable. Outside a parallel call, or on one replica, it returns `x` (detached under `no_grad`).

    Args:
        x: A tensor, a number, or a structure of them.
        op: `"sum"`, `"mean"`, `"max"` or `"min"`. The mean weights each replica by the number of samples in its shard,
            so that the mean of the shards' means is the mean of the batch.
    """
    if op not in REDUCE_OPS:
        raise CollectiveError(f"all_reduce(op={op!r}): op must be one of {', '.join(REDUCE_OPS)}.")
    context = current_context()
    if context is None:
        exempt_collective()
        return _single_replica_value(x)
    _reject_special_layouts(x, (), "all_reduce")
    _check_dtypes(x, op)
    plain_leaves = _non_tensor_leaves(x, ())
    label = f"all_reduce(op={op!r}) of {_describe_structure(x, None)}"
    rows, all_metadata = exchange_tensors(context, label, list(tensors_in(x)), plain_leaves)
    weights = _weights(context)
    tensors = iter([_reduce_tensors(list(column), op, weights) for column in zip(*rows, strict=True)])
    values = {
        path: _reduce_values(path, [metadata[path] for metadata in all_metadata], op, weights) for path in plain_leaves
    }
    return _rebuild(x, (), tensors, values)


@disable_compile_for_collective
def all_gather(x: Any, dim: int = 0) -> Any:
    """Concatenate `x` of all replicas, in the order of the replicas; every replica gets the result.

    Differentiable. Outside a parallel call, or on one replica, it returns `x` (detached under `no_grad`).

    Args:
        x: A tensor or array, or a structure of them. Lists hold samples and are concatenated as lists. Tuples,
            dictionaries and dataclasses are structure. Other values have to be equal on all replicas.
        dim: The dimension along which tensors and arrays are concatenated; sizes may differ there. Tensors without
            dimensions are stacked.
    """
    context = current_context()
    if context is None:
        exempt_collective()
        return _single_replica_value(x)
    _reject_special_layouts(x, (), "all_gather")
    tensors = list(tensors_in(x))
    numbers = iter(range(len(tensors)))
    skeleton = map_tensors(lambda _: _TensorSlot(next(numbers)), x)  # type: ignore[arg-type, return-value]
    rows, skeletons = exchange_tensors(
        context, f"all_gather(dim={dim}) of {_describe_structure(x, dim)}", tensors, skeleton
    )
    return _Gatherer(dim, rows).gather(skeletons, ())


def _single_replica_value(x: Any) -> Any:
    """The result on a single replica: `x` itself, detached under `no_grad` as on several replicas."""
    if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(x)):
        return map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, x)
    return x


def _weights(context: ReplicaContext) -> list[float]:
    sizes = context.sizes if any(context.sizes) else [1] * context.info.count
    return [size / sum(sizes) for size in sizes]


def _reduce_tensors(parts: list[Tensor], op: str, weights: Sequence[float]) -> Tensor:
    if op == "max":
        return torch.stack(parts).amax(0)
    if op == "min":
        return torch.stack(parts).amin(0)
    if op == "mean":
        parts = [part * weight for part, weight in zip(parts, weights, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _reduce_values(path: Path, values: list[Any], op: str, weights: Sequence[float]) -> Any:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        if op == "mean":
            return sum(value * weight for value, weight in zip(values, weights, strict=True))
        return sum(values) if op == "sum" else max(values) if op == "max" else min(values)
    return _require_equal(path, values, "all_reduce", "Only numbers and tensors are reduced.")


def _require_equal(path: Path, values: Sequence[Any], verb: str, hint: str) -> Any:
    """Return the value of a leaf that has to be equal on every replica."""
    first = values[0]
    for index, value in enumerate(values):
        if value is not first and (type(value) is not type(first) or value != first):
            raise CollectiveError(
                f"{verb}: {_describe_path(path)} is {first!r:.60} on replica 0 and {value!r:.60} on replica {index}. "
                f"{hint}"
            )
    return first


def _describe_path(path: Path) -> str:
    return f"the leaf {format_path(path)!r}" if path else "the argument"


def _non_tensor_leaves(value: Any, path: Path) -> dict[Path, Any]:
    """The leaves of a structure that are not tensors, by path."""
    if isinstance(value, Tensor):
        return {}
    node = flatten_one_level(value)
    if node is None:
        return {path: value}
    found: dict[Path, Any] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        found.update(_non_tensor_leaves(child, (*path, key)))
    return found


def _rebuild(value: Any, path: Path, tensors: Any, values: dict[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    node = flatten_one_level(value)
    if node is None:
        return values[path]
    return node.unflatten(
        [_rebuild(c, (*path, k), tensors, values) for k, c in zip(node.keys, node.children, strict=True)]
    )


@dataclass(frozen=True)
class _TensorSlot:
    """Placeholder for a tensor in a structure that is sent without its tensors."""

    index: int


@dataclass
class _Gatherer:
    """Concatenates the replicas' structures."""

    dim: int
    rows: list[list[Tensor]]

    def gather(self, values: Sequence[Any], path: Path) -> Any:
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise CollectiveError(
                f"all_gather: {_describe_path(path)} has different types on the replicas ({kinds}). Pass the same type "
                f"on every replica."
            )
        if isinstance(first, _TensorSlot):
            parts = [row[value.index] for row, value in zip(self.rows, values, strict=True)]
            return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, self.dim)
        if isinstance(first, np.ndarray):
            return np.concatenate(values, self.dim) if first.ndim else np.stack(values)
        if isinstance(first, list):
            return [self._restore_tensors(item, index) for index, value in enumerate(values) for item in value]
        node = flatten_one_level(first)
        if node is None:
            return _require_equal(
                path, values, "all_gather", "Put values of single samples into a list: lists are concatenated."
            )
        nodes = [flatten_one_level(value) for value in values]
        if any(other is None or list(other.keys) != list(node.keys) for other in nodes):
            entries = " and ".join(str([] if other is None else list(other.keys)) for other in nodes)
            raise CollectiveError(
                f"all_gather: {_describe_path(path)} has different entries on the replicas: {entries}. Pass the same "
                f"entries on every replica."
            )
        children = zip(*(other.children for other in nodes if other is not None), strict=True)
        return node.unflatten([self.gather(c, (*path, k)) for k, c in zip(node.keys, children, strict=True)])

    def _restore_tensors(self, item: Any, index: int) -> Any:
        """Put the tensors back into one replica's sample. They are copied, because replicas share them."""
        if isinstance(item, _TensorSlot):
            return self.rows[index][item.index].clone()
        node = flatten_one_level(item)
        return (
            item if node is None else node.unflatten([self._restore_tensors(child, index) for child in node.children])
        )


def _describe_structure(value: Any, dim: int | None) -> str:
    """Describe a structure. Sizes along `dim` and lengths of lists may differ between replicas and are left out."""
    if isinstance(value, Tensor):
        sizes = [str(size) for size in value.shape]
        if dim is not None and sizes and -len(sizes) <= dim < len(sizes):
            sizes[dim] = "*"
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if dim is not None and isinstance(value, list):
        return "a list"
    node = flatten_one_level(value)
    if node is None:
        return type(value).__name__
    children = zip(node.keys, node.children, strict=True)
    inner = ", ".join(f"{key}: {_describe_structure(child, dim)}" for key, child in children)
    return f"{type(value).__name__}({inner})"


def _check_dtypes(value: Any, op: str) -> None:
    for tensor in tensors_in(value):
        if op == "sum" and tensor.dtype is torch.bool:
            raise CollectiveError(
                "all_reduce: op='sum' does not apply to bools. Write op='max' for any, op='min' for all, or x.long()."
            )
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise CollectiveError(
                f"all_reduce: op='mean' does not apply to {tensor.dtype}. Write op='sum', or x.float()."
            )


def _describe_kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of layout {value.layout}" if isinstance(value, Tensor) else kind


def _reject_special_layouts(value: Any, path: Path, verb: str) -> None:
    """Raise for packed, nested and sparse tensors and other types that only splitting and merging support."""
    plain = not isinstance(value, Tensor) or is_dense(value)
    if not plain or (handler_for_type(type(value)) is not None and not isinstance(value, (Tensor, np.ndarray))):
        raise CollectiveError(
            f"{verb}: {_describe_path(path)} is a {_describe_kind(value)}, which collectives do not support.\n"
            f"Pass dense tensors instead."
        )
    node = flatten_one_level(value)
    for key, child in () if node is None else zip(node.keys, node.children, strict=True):
        _reject_special_layouts(child, (*path, key), verb)
