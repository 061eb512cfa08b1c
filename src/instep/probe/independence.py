"""Tests whether a sample's outputs depend on the other samples of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.structure.output_placements import ListKind, OutputShard, Verdict
from instep.structure.placements import Nested, Placement, Shard
from instep.structure.tree import Path, flatten_one_level


def max_rounding_mismatches(entries: int, tolerance: float) -> float:
    """How many integers rounding may turn over, by the precision of what they are computed from.

    In float64 none, in float32 one in two hundred, which is none of a few; in less, one in ten.

    >>> [flips(entries, 3e-4) < 1 for entries in (30, 300)]
    [True, False]
    """
    if tolerance <= 1e-6:
        return 0.0
    return entries / 200 if tolerance <= 1e-3 else max(entries / 10, 1.0)


def substituted_batches(sizes: Sequence[int], most: int = 5) -> Iterator[tuple[list[int], list[int], float]]:
    """Samples of both parts in other company: who is in each run, by place, and the places that keep their sample.

    Everywhere else is one and the same sample; in some runs its numbers are nothing, or larger than they were.
    """
    a, n = sizes[0], sum(sizes)
    for kept in (list(range(a)), list(range(a, n))):
        for other in range(min(n, most)):
            yield [place if place in kept else other for place in range(n)], kept, 1.0
        for factor in (0.0, 3.0):
            yield [place if place in kept else 0 for place in range(n)], kept, factor


def scale_floats(role: Placement, value: Any, factor: float) -> Any:
    """A sample whose fractions are that many times as large."""
    if isinstance(role, Shard):
        return value * factor if isinstance(value, Tensor) and value.is_floating_point() else value
    node = flatten_one_level(value) if isinstance(role, Nested) else None
    if node is None or not isinstance(role, Nested):
        return value
    return node.unflatten(
        [scale_floats(below, child, factor) for below, child in zip(role.placements, node.children, strict=True)]
    )


def find_changed_path(
    found: Mapping[Path, Verdict], paths: set[Path], usual: Any, other: Any, kept: Sequence[int]
) -> Path | None:
    """The first of the paths at which samples that kept their places have other integers in one run than in another."""
    for path in paths:
        verdict = found.get(path)
        if isinstance(verdict, OutputShard):
            one, two = [_select_samples(_get_by_path(path, output), verdict.dim, kept) for output in (usual, other)]
            if one is None or two is None or not torch.equal(one, two):
                return path
    return None


def is_order_dependent(path: Path, verdict: Verdict | None, usual: Any, other: Any) -> bool:
    """Whether samples in reverse order gave something else than before in reverse, or than before if it is one value.

    Up to rounding.
    """
    one, two = _get_by_path(path, usual), _get_by_path(path, other)
    if isinstance(verdict, ListKind):
        return len(one) != len(two) or not all(map(_values_close, list(one)[::-1], two))
    one, two = [torch.as_tensor(value) for value in (one, two)]
    if isinstance(verdict, OutputShard) and one.ndim > verdict.dim:
        one = one.flip(verdict.dim)
    if one.shape != two.shape:
        return True
    exact = one.dtype is torch.bool or not (one.is_floating_point() or one.is_complex())
    if exact:
        return not torch.equal(one, two)
    room = float(torch.finfo(one.dtype).eps ** 0.5) * _max_abs(one)
    return not torch.allclose(one, two, rtol=0.0, atol=room, equal_nan=True)


def _values_close(one: Any, two: Any) -> bool:
    return math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-6) if isinstance(one, float) else bool(one == two)


def _max_abs(value: Tensor) -> float:
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _select_samples(value: Any, dim: int, kept: Sequence[int]) -> Tensor | None:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(tensor, Tensor) or tensor.ndim <= dim or tensor.shape[dim] <= max(kept):
        return None
    return tensor.index_select(dim, torch.tensor(list(kept), device=tensor.device))


def _get_by_path(path: Path, value: Any) -> Any:
    for key in path:
        node = flatten_one_level(value)
        if node is None:
            return None
        value = dict(zip(node.keys, node.children, strict=True)).get(key)
    return value
