"""One trial of a backward: whether the gradients of two parts of a few samples add up to those of the samples together.

Torch's own operations do that by themselves. A `torch.autograd.Function` of the user's may not: one whose backward
divides by the norm of the gradient that arrives, or by the number of its elements, sees the samples of a shard alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.attempt import Attempt
from instep.private import function_of
from instep.replicas.carry import tensors_by_path
from instep.replicas.hook_owner import LIBRARIES
from instep.replicas.probing import probing
from instep.replicas.sandbox import Sandbox
from instep.structure.tree import Path
from instep.structure.trial_sizes import sizes_for
from instep.structure.verdicts import Joined, Reduced, Verdict

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-2}


def functions_in(tensors: Iterable[Tensor]) -> list[str]:
    """The names of the functions with a backward of the user's own that tensors were made by."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(pending), {}
    while pending:
        node = pending.pop()
        made = function_of(node)
        if made is not None and (made.__module__ or "").partition(".")[0] not in LIBRARIES:
            found[made.__qualname__] = True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return list(found)


def adds_up(attempt: Attempt, source: nn.Module, device: torch.device, found: Mapping[Path, Verdict]) -> bool:
    """Whether the parameters' gradients of two parts add up to those of the whole; also where that cannot be tried."""
    sizes = sizes_for(attempt.batch, attempt.least)
    total = sum(sizes)
    places = [(0, sizes[0]), (sizes[0], sizes[1]), (0, total)]
    try:
        with probing() as excuses, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sandbox = Sandbox(source, device)
            runs = [
                sandbox.gradients(attempt.method, *arguments, partial(_weighed, found, place, total))
                for place, arguments in zip(places, attempt.arguments(sandbox, sizes), strict=True)
            ]
    except Exception:  # forward, or an argument, has something against a trial; the call itself is fine
        return True
    if excuses or sandbox.excuse is not None or sandbox.drew:
        return True
    return all(_is_sum(parts, whole) for *parts, whole in zip(*runs, strict=True))


def _weighed(found: Mapping[Path, Verdict], place: tuple[int, int], total: int, output: Any) -> Tensor | None:
    """A number that the whole has the sum of the parts' of, in which every entry has another weight."""
    terms = [
        term
        for path, tensor in tensors_by_path(output)
        if tensor.requires_grad and (term := _term(found.get(path), tensor, place, total)) is not None
    ]
    return sum(terms[1:], start=terms[0]) if terms else None


def _term(verdict: Verdict | None, tensor: Tensor, place: tuple[int, int], total: int) -> Tensor | None:
    first, count = place
    if isinstance(verdict, Joined):
        if tensor.ndim < verdict.rank:
            tensor = tensor.unsqueeze(verdict.dim)
        shape = list(tensor.shape)
        shape[verdict.dim] = total
        numbers = torch.arange(1, torch.Size(shape).numel() + 1, device=tensor.device, dtype=torch.float64)
        weights = numbers.cos().add_(0.5).view(shape).narrow(verdict.dim, first, count)
        return (tensor * weights.to(tensor.dtype)).sum()
    if isinstance(verdict, Reduced) and verdict.rules[0] in ("sum", "mean"):
        return tensor.sum() * (1.0 if verdict.rules[0] == "sum" else count / total)
    return None


def _is_sum(parts: Sequence[Tensor | None], whole: Tensor | None) -> bool:
    there = [part for part in parts if part is not None]
    if whole is None or not there:
        return whole is None and not there
    added, scale = torch.stack(there).sum(0), max(float(whole.abs().max()), *(float(p.abs().max()) for p in there))
    close = _CLOSE.get(whole.dtype, 0.2)
    return not scale or bool(torch.allclose(added, whole, rtol=0, atol=close * scale, equal_nan=True))
