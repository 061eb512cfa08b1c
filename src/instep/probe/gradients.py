"""Tests whether the gradients of two parts of a batch add up to the whole batch's gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.probe.draws import TrialDraws
from instep.probe.trial import Trial
from instep.replicas.state.carried import tensors_by_path
from instep.structure.placements import Shard
from instep.structure.tree import Path
from instep.structure.verdicts import Verdict

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}


def are_gradients_additive(trial: Trial, verdicts: Mapping[Path, Verdict]) -> bool:
    """Whether the parameter gradients of two parts add up to those of the whole. True if this cannot be tested."""
    sizes = trial.part_sizes()
    total = sum(sizes)
    ranges = [(0, sizes[0]), (sizes[0], sizes[1]), (0, total)]
    try:
        with trial.open_sandbox():
            sandbox = trial.sandbox
            sandbox.draws = TrialDraws(sandbox.device)
            sandbox.draws.start_runs()
            sandbox.start_runs()
            runs = [
                sandbox.gradients(trial.method, *arguments, partial(_weighted_sum, verdicts, sample_range, total))
                for sample_range, arguments in zip(ranges, trial.part_arguments(sizes), strict=True)
            ]
    except Exception:  # forward or the arguments do not support a trial; the call itself may succeed
        return True
    if trial.incomparable_reasons or not sandbox.drew_alike():
        return True
    return all(_is_sum(parts, whole) for *parts, whole in zip(*runs, strict=True))


def _weighted_sum(
    verdicts: Mapping[Path, Verdict], sample_range: tuple[int, int], total: int, output: Any
) -> Tensor | None:
    """A scalar that is additive over parts and weights every entry differently; None without gradients."""
    terms = [
        term
        for path, tensor in tensors_by_path(output)
        if tensor.requires_grad
        and (term := _weighted_term(verdicts.get(path), tensor, sample_range, total)) is not None
    ]
    return sum(terms[1:], start=terms[0]) if terms else None


def _weighted_term(verdict: Verdict | None, tensor: Tensor, sample_range: tuple[int, int], total: int) -> Tensor | None:
    if verdict is None:
        return None
    first, count = sample_range
    if isinstance(verdict.placement, Shard):
        dim = verdict.placement.dim
        if tensor.ndim < verdict.rank:
            tensor = tensor.unsqueeze(dim)
        shape = list(tensor.shape)
        shape[dim] = total
        positions = torch.arange(1, torch.Size(shape).numel() + 1, device=tensor.device, dtype=torch.float64)
        weights = positions.cos().add_(0.5).view(shape).narrow(dim, first, count)
        return (tensor * weights.to(tensor.dtype)).sum()
    if verdict.ops and verdict.ops[0] in ("sum", "mean"):
        return tensor.sum() * (1.0 if verdict.ops[0] == "sum" else count / total)
    return None


def _is_sum(parts: Sequence[Tensor | None], whole: Tensor | None) -> bool:
    present = [part for part in parts if part is not None]
    if whole is None or not present:
        return whole is None and not present
    total, scale = torch.stack(present).sum(0), max(float(whole.abs().max()), *(float(p.abs().max()) for p in present))
    tolerance = _TOLERANCES.get(whole.dtype, 0.2)
    return not scale or bool(torch.allclose(total, whole, rtol=0, atol=tolerance * scale, equal_nan=True))
