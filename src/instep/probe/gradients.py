"""Tests whether the gradients of two parts of a batch add up to the whole batch's gradients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.probe.sandbox import Sandbox
from instep.probe.trial import Trial
from instep.probe.window import default_part_sizes
from instep.replicas.state.carried import tensors_by_path
from instep.runtime.probe_flag import probe_context
from instep.structure.output_placements import OutputShard, Partial, Verdict
from instep.structure.tree import Path

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2}


def are_gradients_additive(
    attempt: Trial, source: nn.Module, device: torch.device, found: Mapping[Path, Verdict]
) -> bool:
    """Whether the parameters' gradients of two parts add up to those of the whole; also where that cannot be tried."""
    sizes = default_part_sizes(attempt.batch_size, attempt.min_part)
    total = sum(sizes)
    places = [(0, sizes[0]), (sizes[0], sizes[1]), (0, total)]
    try:
        with probe_context() as excuses, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sandbox = Sandbox(source, device)
            runs = [
                sandbox.gradients(attempt.method, *arguments, partial(_weighted_sum, found, place, total))
                for place, arguments in zip(places, attempt.part_arguments(sandbox, sizes), strict=True)
            ]
    except Exception:  # forward, or an argument, has something against a trial; the call itself is fine
        return True
    if excuses or sandbox.incomparable_reason is not None or sandbox.used_rng:
        return True
    return all(_is_sum(parts, whole) for *parts, whole in zip(*runs, strict=True))


def _weighted_sum(found: Mapping[Path, Verdict], place: tuple[int, int], total: int, output: Any) -> Tensor | None:
    """A number that the whole has the sum of the parts' of, in which every entry has another weight."""
    terms = [
        term
        for path, tensor in tensors_by_path(output)
        if tensor.requires_grad and (term := _weighted_term(found.get(path), tensor, place, total)) is not None
    ]
    return sum(terms[1:], start=terms[0]) if terms else None


def _weighted_term(verdict: Verdict | None, tensor: Tensor, place: tuple[int, int], total: int) -> Tensor | None:
    first, count = place
    if isinstance(verdict, OutputShard):
        if tensor.ndim < verdict.rank:
            tensor = tensor.unsqueeze(verdict.dim)
        shape = list(tensor.shape)
        shape[verdict.dim] = total
        numbers = torch.arange(1, torch.Size(shape).numel() + 1, device=tensor.device, dtype=torch.float64)
        weights = numbers.cos().add_(0.5).view(shape).narrow(verdict.dim, first, count)
        return (tensor * weights.to(tensor.dtype)).sum()
    if isinstance(verdict, Partial) and verdict.rules[0] in ("sum", "mean"):
        return tensor.sum() * (1.0 if verdict.rules[0] == "sum" else count / total)
    return None


def _is_sum(parts: Sequence[Tensor | None], whole: Tensor | None) -> bool:
    there = [part for part in parts if part is not None]
    if whole is None or not there:
        return whole is None and not there
    added, scale = torch.stack(there).sum(0), max(float(whole.abs().max()), *(float(p.abs().max()) for p in there))
    close = _TOLERANCES.get(whole.dtype, 0.2)
    return not scale or bool(torch.allclose(added, whole, rtol=0, atol=close * scale, equal_nan=True))
