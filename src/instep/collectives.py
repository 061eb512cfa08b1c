"""What a replica can do together with the others in the middle of `forward`; outside of a parallel call, nothing.

>>> import torch
>>> all_reduce(torch.tensor([1.0, 2.0]))  # alone, the whole is this part
tensor([1., 2.])
>>> replica().count
1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.compiled import meets
from instep.errors import CollectiveError
from instep.meeting import OUTSIDE, Position, Seat, alone, seat, share
from instep.structure.shapes import is_dense
from instep.structure.tree import Path, map_tensors, open_node, show_path, tensors_in
from instep.structure.types import kind_of

OPS = ("sum", "mean", "max", "min")


@meets
def replica() -> Position:
    """Which replica this is: `index` of `count`, its `device`, its shard's `size` and `offset` in the batch."""
    place = seat()
    if place is None:
        alone()
        return OUTSIDE
    return place.position


@meets
def all_reduce(x: Any, op: str = "sum") -> Any:
    """The sum, mean, max or min over the replicas of every tensor and number in a structure, on every replica.

    `"mean"` counts every replica by the samples of its shard, so that the mean of the shards' means is the mean of the
    batch. With gradients; outside of a parallel call, or on one replica, `x` itself, without gradient under `no_grad`.
    """
    if op not in OPS:
        raise CollectiveError(f"all_reduce(op={op!r}): write one of {', '.join(OPS)}.")
    place = seat()
    if place is None:
        alone()
        return _as_it_is(x)
    _refuse_kinds(x, (), "all_reduce")
    _check_dtypes(x, op)
    others = _others(x, ())
    label = f"all_reduce(op={op!r}) of {_describe(x, None)}"
    rows, notes = share(place, label, list(tensors_in(x)), others)
    weights = _weights(place)
    tensors = iter([_reduce_tensors(list(column), op, weights) for column in zip(*rows, strict=True)])
    values = {path: _reduce_values(path, [note[path] for note in notes], op, weights) for path in others}
    return _refill(x, (), tensors, values)


@meets
def all_gather(x: Any, dim: int = 0) -> Any:
    """Every replica's `x`, joined in the order of the replicas, on every replica.

    Tensors and arrays are joined along `dim` and may differ in size there; tensors without dimensions are stacked. A
    list holds samples and is joined as a list, whatever its entries are. Tuples, dictionaries and dataclasses are
    structure. Anything else has to be equal on all replicas. With gradients; outside of a parallel call, or on one
    replica, `x` itself, without gradient under `no_grad`.
    """
    place = seat()
    if place is None:
        alone()
        return _as_it_is(x)
    _refuse_kinds(x, (), "all_gather")
    tensors = list(tensors_in(x))
    numbers = iter(range(len(tensors)))
    skeleton = map_tensors(lambda _: _Slot(next(numbers)), x)  # type: ignore[arg-type, return-value]
    rows, skeletons = share(place, f"all_gather(dim={dim}) of {_describe(x, dim)}", tensors, skeleton)
    return _Joiner(dim, rows).join(skeletons, ())


def _as_it_is(x: Any) -> Any:
    """What one replica is given: the same, and like the others nothing that leads to a gradient under `no_grad`."""
    if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(x)):
        return map_tensors(lambda tensor: tensor.detach() if tensor.requires_grad else tensor, x)
    return x


def _weights(place: Seat) -> list[float]:
    sizes = place.sizes if any(place.sizes) else [1] * place.position.count
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
    return _one_value(path, values, "all_reduce", "give numbers or tensors")


def _one_value(path: Path, values: Sequence[Any], verb: str, hint: str) -> Any:
    """A leaf that has to be the same on every replica."""
    first = values[0]
    for index, value in enumerate(values):
        if value is not first and (type(value) is not type(first) or value != first):
            raise CollectiveError(
                f"{verb}: {_at(path)} is {first!r:.60} on replica 0 and {value!r:.60} on replica {index}, and no rule "
                f"joins such values: {hint}."
            )
    return first


def _at(path: Path) -> str:
    return f"the leaf {show_path(path)!r}" if path else "the argument"


def _others(value: Any, path: Path) -> dict[Path, Any]:
    """The leaves of a structure that are no tensors, by their paths."""
    if isinstance(value, Tensor):
        return {}
    node = open_node(value)
    if node is None:
        return {path: value}
    found: dict[Path, Any] = {}
    for key, child in zip(node.keys, node.children, strict=True):
        found.update(_others(child, (*path, key)))
    return found


def _refill(value: Any, path: Path, tensors: Any, values: dict[Path, Any]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    node = open_node(value)
    if node is None:
        return values[path]
    return node.close([_refill(c, (*path, k), tensors, values) for k, c in zip(node.keys, node.children, strict=True)])


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a structure that is sent without its tensors."""

    number: int


@dataclass
class _Joiner:
    """Joins every replica's structure into one."""

    dim: int
    rows: list[list[Tensor]]

    def join(self, values: Sequence[Any], path: Path) -> Any:
        first = values[0]
        if any(type(value) is not type(first) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            raise CollectiveError(f"all_gather: {_at(path)} is of another type on each replica ({kinds}).")
        if isinstance(first, _Slot):
            parts = [row[value.number] for row, value in zip(self.rows, values, strict=True)]
            return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, self.dim)
        if isinstance(first, np.ndarray):
            return np.concatenate(values, self.dim) if first.ndim else np.stack(values)
        if isinstance(first, list):
            return [self._fill(item, index) for index, value in enumerate(values) for item in value]
        node = open_node(first)
        if node is None:
            return _one_value(path, values, "all_gather", "put what belongs to a sample into a list, which is joined")
        nodes = [open_node(value) for value in values]
        if any(other is None or list(other.keys) != list(node.keys) for other in nodes):
            raise CollectiveError(f"all_gather: {_at(path)} has other entries on each replica.")
        children = zip(*(other.children for other in nodes if other is not None), strict=True)
        return node.close([self.join(c, (*path, k)) for k, c in zip(node.keys, children, strict=True)])

    def _fill(self, item: Any, index: int) -> Any:
        """One replica's sample, with its tensors; they are copied, for replicas share them."""
        if isinstance(item, _Slot):
            return self.rows[index][item.number].clone()
        node = open_node(item)
        return item if node is None else node.close([self._fill(child, index) for child in node.children])


def _describe(value: Any, dim: int | None) -> str:
    """A structure in words; sizes along `dim` and the length of lists may differ between replicas and are left out."""
    if isinstance(value, Tensor):
        sizes = [str(size) for size in value.shape]
        if dim is not None and sizes and -len(sizes) <= dim < len(sizes):
            sizes[dim] = "*"
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if dim is not None and isinstance(value, list):
        return "a list"
    node = open_node(value)
    if node is None:
        return type(value).__name__
    children = zip(node.keys, node.children, strict=True)
    inner = ", ".join(f"{key}: {_describe(child, dim)}" for key, child in children)
    return f"{type(value).__name__}({inner})"


def _check_dtypes(value: Any, op: str) -> None:
    for tensor in tensors_in(value):
        if op == "sum" and tensor.dtype is torch.bool:
            raise CollectiveError("all_reduce: a sum of bools: write op='max' for any, 'min' for all, or x.long().")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise CollectiveError(f"all_reduce: a mean of {tensor.dtype}: write op='sum', or x.float().")


def _refuse_kinds(value: Any, path: Path, verb: str) -> None:
    """Packed, nested and sparse tensors, graphs and the like have rules for a batch, and none for this."""
    plain = not isinstance(value, Tensor) or is_dense(value)
    if not plain or (kind_of(type(value)) is not None and not isinstance(value, (Tensor, np.ndarray))):
        raise CollectiveError(
            f"{verb}: {_at(path)} is a {type(value).__name__} of a layout of its own; give the plain tensors in it."
        )
    node = open_node(value)
    for key, child in () if node is None else zip(node.keys, node.children, strict=True):
        _refuse_kinds(child, (*path, key), verb)
