"""Tests whether a sample's outputs depend on the other samples of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.probe.judge import Findings
from instep.probe.sandbox import TrialFailed
from instep.structure.merge_messages import depends_on_other_samples
from instep.structure.placements import Nested, PerSample, Placement, Shard
from instep.structure.tree import Path, flatten_one_level, get_by_path
from instep.structure.verdicts import Verdict


def check_independence(
    findings: Findings, sizes: tuple[int, int], run: Callable[[Sequence[int], Sequence[int], float], Any]
) -> None:
    """Run the samples in another order and with other samples. Outputs of independent samples do not change.

    `run` gets the sample index at each position, the positions that keep their samples, and a factor for the floats of
    the others.
    """
    every = range(sum(sizes))
    with suppress(TrialFailed):  # forward does not accept a batch assembled from single samples
        expected = run(every, every, 1.0)
        if findings.needs_reordering:
            with suppress(TrialFailed):
                _compare_reversed(findings, sizes, expected, run(every[::-1], every, 1.0))
        if findings.mismatched_integers and not findings.errors:
            _compare_substituted(findings, sizes, expected, run)


def _compare_reversed(findings: Findings, sizes: tuple[int, int], expected: Any, actual: Any) -> None:
    """Compare with a run on the samples in reverse order. Rows that reverse with the samples are proven."""
    for path in findings.needs_reordering:
        verdict = findings.outputs.get(path)
        if is_order_dependent(path, verdict, expected, actual):
            why = "its entries depend on other samples of the batch: they change with the order of the samples"
            findings.errors[path] = depends_on_other_samples(path, why, sizes)
        elif verdict is not None and isinstance(verdict.placement, Shard):
            findings.outputs[path] = replace(verdict, proven=True)
            findings.unresolved.discard(path)


def _compare_substituted(
    findings: Findings, sizes: tuple[int, int], expected: Any, run: Callable[[Sequence[int], Sequence[int], float], Any]
) -> None:
    """Compare with runs in which the samples of one part are replaced, until one shows a dependence."""
    for indices, kept, factor in substituted_batches(sizes):
        with suppress(TrialFailed):  # forward may not accept this batch
            actual = run(indices, kept, factor)
            path = find_changed_path(findings.outputs, findings.mismatched_integers, expected, actual, kept)
            if path is not None:
                why = "its entries depend on other samples of the batch: they change when the other samples change"
                findings.errors[path] = depends_on_other_samples(path, why, sizes)
                return


def substituted_batches(sizes: Sequence[int], max_substitutes: int = 5) -> Iterator[tuple[list[int], list[int], float]]:
    """Batches in which one part keeps its samples and all other positions hold one substitute sample.

    Yields the sample index at each position, the positions that keep their samples, and a factor for the floats of
    the substitute.
    """
    first_size, num_samples = sizes[0], sum(sizes)
    for kept in (list(range(first_size)), list(range(first_size, num_samples))):
        for substitute in range(min(num_samples, max_substitutes)):
            yield [position if position in kept else substitute for position in range(num_samples)], kept, 1.0
        for factor in (0.0, 3.0):
            yield [position if position in kept else 0 for position in range(num_samples)], kept, factor


def scale_floats(placement: Placement, value: Any, factor: float) -> Any:
    """A sample with its batched floating-point tensors multiplied by `factor`."""
    if isinstance(placement, Shard):
        return value * factor if isinstance(value, Tensor) and value.is_floating_point() else value
    node = flatten_one_level(value) if isinstance(placement, Nested) else None
    if node is None or not isinstance(placement, Nested):
        return value
    return node.unflatten(
        [
            scale_floats(child_placement, child, factor)
            for child_placement, child in zip(placement.placements, node.children, strict=True)
        ]
    )


def find_changed_path(
    verdicts: Mapping[Path, Verdict], paths: set[Path], expected: Any, actual: Any, kept: Sequence[int]
) -> Path | None:
    """The first path at which the kept samples have different values in two runs."""
    for path in paths:
        verdict = verdicts.get(path)
        if verdict is not None and isinstance(verdict.placement, Shard):
            dim = verdict.placement.dim
            expected_samples, actual_samples = [
                _select_samples(get_by_path(path, output), dim, kept) for output in (expected, actual)
            ]
            if expected_samples is None or actual_samples is None or not torch.equal(expected_samples, actual_samples):
                return path
    return None


def is_order_dependent(path: Path, verdict: Verdict | None, output: Any, reversed_output: Any) -> bool:
    """Whether reversing the samples does more than reverse the output, up to rounding.

    An output without a batch dim must not change.
    """
    expected, actual = get_by_path(path, output), get_by_path(path, reversed_output)
    placement = None if verdict is None else verdict.placement
    if isinstance(placement, (PerSample, Nested)):
        return len(expected) != len(actual) or not all(map(_values_close, list(expected)[::-1], actual))
    expected, actual = [torch.as_tensor(value) for value in (expected, actual)]
    if isinstance(placement, Shard) and expected.ndim > placement.dim:
        expected = expected.flip(placement.dim)
    if expected.shape != actual.shape:
        return True
    exact = expected.dtype is torch.bool or not (expected.is_floating_point() or expected.is_complex())
    if exact:
        return not torch.equal(expected, actual)
    atol = float(torch.finfo(expected.dtype).eps ** 0.5) * _max_abs(expected)
    return not torch.allclose(expected, actual, rtol=0.0, atol=atol, equal_nan=True)


def _values_close(left: Any, right: Any) -> bool:
    return math.isclose(left, right, rel_tol=1e-3, abs_tol=1e-6) if isinstance(left, float) else bool(left == right)


def _max_abs(value: Tensor) -> float:
    return float(value.abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0


def _select_samples(value: Any, dim: int, kept: Sequence[int]) -> Tensor | None:
    tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if not isinstance(tensor, Tensor) or tensor.ndim <= dim or tensor.shape[dim] <= max(kept):
        return None
    return tensor.index_select(dim, torch.tensor(list(kept), device=tensor.device))
