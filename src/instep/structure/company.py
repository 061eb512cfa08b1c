"""Integers and booleans that differ between parts and whole: rounding, or other samples?

Rounding depends on how many samples a kernel is given, and turns over few of them (the larger of two scores that are as
good as equal). It does not depend on who the other samples are. So where a few differ, the same samples are given
other company, as many as before: then nothing at all may change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.structure.roles import Cut, Inside, Role
from instep.structure.tree import Path, open_node
from instep.structure.verdicts import Joined, Reading, Verdict


def flips(entries: int, tolerance: float) -> float:
    """How many integers rounding may turn over, by the precision of what they are computed from.

    In float64 none, in float32 one in two hundred, which is none of a few; in less, one in ten.

    >>> [flips(entries, 3e-4) < 1 for entries in (30, 300)]
    [True, False]
    """
    if tolerance <= 1e-6:
        return 0.0
    return entries / 200 if tolerance <= 1e-3 else max(entries / 10, 1.0)


def companies(sizes: Sequence[int], most: int = 5) -> Iterator[tuple[list[int], list[int], float]]:
    """Samples of both parts in other company: who is in each run, by place, and the places that keep their sample.

    Everywhere else is one and the same sample; in some runs its numbers are nothing, or larger than they were.
    """
    a, n = sizes[0], sum(sizes)
    for kept in (list(range(a)), list(range(a, n))):
        for other in range(min(n, most)):
            yield [place if place in kept else other for place in range(n)], kept, 1.0
        for factor in (0.0, 3.0):
            yield [place if place in kept else 0 for place in range(n)], kept, factor


def scaled(role: Role, value: Any, factor: float) -> Any:
    """A sample whose fractions are that many times as large."""
    if isinstance(role, Cut):
        return value * factor if isinstance(value, Tensor) and value.is_floating_point() else value
    node = open_node(value) if isinstance(role, Inside) else None
    if node is None or not isinstance(role, Inside):
        return value
    return node.close([scaled(below, child, factor) for below, child in zip(role.roles, node.children, strict=True)])


def changed(
    found: Mapping[Path, Verdict], paths: set[Path], usual: Any, other: Any, kept: Sequence[int]
) -> Path | None:
    """The first of the paths at which samples that kept their places have other integers in one run than in another."""
    for path in paths:
        verdict = found.get(path)
        if isinstance(verdict, Joined):
            one, two = [_rows(_at(path, output), verdict.dim, kept) for output in (usual, other)]
            if one is None or two is None or not torch.equal(one, two):
                return path
    return None


def out_of_order(path: Path, verdict: Verdict | None, usual: Any, other: Any) -> bool:
    """Whether samples in reverse order gave something else than before in reverse, or than before if it is one value.

    Up to rounding.
    """
    one, two = _at(path, usual), _at(path, other)
    if isinstance(verdict, Reading):
        return len(one) != len(two) or not all(map(_is_alike, list(one)[::-1], two))
    one, two = [torch.as_tensor(value) for value in (one, two)]
    if isinstance(verdict, Joined) and one.ndim > verdict.dim:
        one = one.flip(verdict.dim)
    if one.shape != two.shape:
        return True
    exact = one.dtype is torch.bool or not (one.is_floating_point() or one.is_complex())
    if exact:
        return not torch.equal(one, two)
    room = float(torch.finfo(one.dtype).eps ** 0.5) * _largest(one)
    return not torch.allclose(one, two, rtol=0.0, atol=room, equal_nan=True)


def _is_alike(one: Any, two: Any) -> bool:
    return math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-6) if isinstance(one, float) else bool(one == two)


def _largest(value: Tensor) -> float:
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _rows(value: Any, dim: int, kept: Sequence[int]) -> Tensor | None:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(tensor, Tensor) or tensor.ndim <= dim or tensor.shape[dim] <= max(kept):
        return None
    return tensor.index_select(dim, torch.tensor(list(kept), device=tensor.device))


def _at(path: Path, value: Any) -> Any:
    for key in path:
        node = open_node(value)
        if node is None:
            return None
        value = dict(zip(node.keys, node.children, strict=True)).get(key)
    return value
