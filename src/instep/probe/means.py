"""Tests the verdicts on means with many parts. Two parts may have equal weights by chance; many rarely do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.probe.judge import Findings, unexplained_error
from instep.structure.merge_rules import MergeContext, apply_rule
from instep.structure.shapes import is_dense
from instep.structure.tree import get_by_path
from instep.structure.verdicts import Verdicts, partial_verdict


def confirm_means(
    verdicts: Verdicts,
    sizes: tuple[int, ...],
    outputs: Sequence[Any],
    inputs: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> tuple[Findings, bool]:
    """Test means on several parts. Of the rules of each, keep those that give the value of the whole.

    `outputs` and `inputs` are those of the parts and the whole. The second result is whether every mean was tested:
    outputs of other types, and those whose shape depends on the size of a part, are not.
    """
    findings, complete = Findings(), True
    context = MergeContext.create(sizes, outputs[:-1], inputs[:-1])
    for path, verdict in verdicts.items():
        if not verdict.is_mean:
            continue
        values = [value for output in outputs if (value := _as_float(get_by_path(path, output))) is not None]
        if len(values) < len(outputs) or len({value.shape for value in values}) > 1 or not values[-1].isfinite().all():
            complete = False
            continue
        *parts, whole = values
        scale = max(float(value.abs().nan_to_num().max()) for value in values)
        merged = {op: apply_rule(op, parts, context, path) for op in verdict.ops}
        errors = {op: float((value - whole).abs().nan_to_num(torch.inf).max()) for op, value in merged.items()}
        fitting = [op for op, error in errors.items() if error <= tolerance * scale]
        if fitting:
            findings.outputs[path] = partial_verdict(fitting)
        else:
            findings.errors[path] = unexplained_error(values, path, sizes)
    return findings, complete


def _as_float(value: Any) -> Tensor | None:
    """A float tensor or number in double precision; None for anything else."""
    if isinstance(value, (float, np.floating)):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor) or not is_dense(value) or not value.numel():
        return None
    dtype = torch.complex128 if value.is_complex() else torch.float64
    return value.to(dtype) if value.is_floating_point() or value.is_complex() else None
