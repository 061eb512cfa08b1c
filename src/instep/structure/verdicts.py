"""Verdicts: what trials of the probe have shown about the placement of each output, and how it is merged.

A verdict applies only to parts of the form it was found for. Other parts are merged by their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.structure.merge_messages import cannot_merge, change_problem
from instep.structure.merge_rules import MergeContext, MergeRule, WeightedBy, apply_rule, mean_of_equal_tensors
from instep.structure.placements import Nested, Partial, PerSample, Placement, Ragged, Replicate, Shard
from instep.structure.shapes import equal_values, format_values, has_batch_dim
from instep.structure.split import concat_sequences
from instep.structure.tree import NUMBER_TYPES, Path
from instep.structure.weights import CriterionWeight, Weight


@dataclass(frozen=True)
class Undetermined:
    """No placement is known. The shape does not depend on the batch: a constant, a sum or a mean fits.

    For zeros all of these are equal.
    """

    all_zero: bool = True
    """Whether all values were 0 or NaN. Otherwise they were too small, or too close to each other."""


@dataclass(frozen=True)
class Verdict:
    """The placement of one output, and the evidence for it."""

    placement: Placement | Undetermined
    proven: bool = True
    """Whether values prove it. Shapes alone do not, nor do zeros, equal values and sorted rows."""
    rank: int = 0
    """The number of dims of a `Shard`. A part of one sample may lack the batch dim (`squeeze`)."""
    alternatives: tuple[MergeRule, ...] = ()
    """Other reductions that fit as well as that of a `Partial`.

    A mean over samples and a mean over valid labels are equal if every sample has equally many labels. Alternatives
    are used only for calls on which all of them agree.
    """

    @property
    def ops(self) -> tuple[MergeRule, ...]:
        """The reductions that fit; empty unless the output is `Partial`."""
        return (self.placement.op, *self.alternatives) if isinstance(self.placement, Partial) else ()

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that the reductions use."""
        weights = [op.weight for op in self.ops if isinstance(op, WeightedBy)]
        return tuple([weight for weight in weights if isinstance(weight, Weight)])

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean, plain or weighted."""
        return bool(self.ops) and "sum" not in self.ops

    @property
    def description(self) -> str:
        placement = self.placement
        if isinstance(placement, Shard):
            return f"batch in dim {placement.dim}" + ("" if self.proven else ", by shapes alone")
        if isinstance(placement, Partial):
            return " or ".join(map(_describe_op, self.ops))
        if isinstance(placement, Ragged):
            return "the parts one after another" + ("" if placement.dim is None else f", along dim {placement.dim}")
        if isinstance(placement, Replicate):
            return "constant"
        if isinstance(placement, PerSample):
            return "one entry per sample"
        return "a structure" if isinstance(placement, Nested) else "the same shape for any batch"

    def accepts(self, parts: Sequence[Any], context: MergeContext) -> bool:
        """Whether `merge` applies to these parts. Lists and structures are merged by the `Merger`."""
        placement = self.placement
        if isinstance(placement, Shard):
            return all(isinstance(part, Tensor) for part in parts) and all(
                part.ndim == self.rank or (size == 1 and part.ndim == self.rank - 1)
                for part, size in zip(parts, context.sizes, strict=True)
            )
        if isinstance(placement, Ragged):
            dim = placement.dim
            if dim is None:
                return all(isinstance(part, (list, tuple)) for part in parts)
            return all(isinstance(part, Tensor) and part.ndim > dim for part in parts)
        if isinstance(placement, (Partial, Undetermined)):
            return _have_same_shape(parts)
        return isinstance(placement, Replicate)

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        """Merge parts that the verdict accepts. Raises `MergeError` if their values contradict it."""
        placement = self.placement
        if isinstance(placement, Shard):
            return _cat_shards(parts, placement.dim, self.rank, context, path)
        if isinstance(placement, Partial):
            return self._reduce(parts, context, path)
        if isinstance(placement, Ragged):
            if not self.proven and any(part.numel() for part in parts):
                why = f"rows that were selected, which the samples tried cannot decide ({_format_parts(parts)})"
                raise cannot_merge(path, parts, why, context.sizes)
            dim = placement.dim
            return concat_sequences(parts) if dim is None else apply_rule(("cat", dim), parts, context, path)
        if isinstance(placement, Replicate):
            return _merge_constants(parts, context, path)
        assert isinstance(placement, Undetermined)
        return _merge_undetermined(parts, context, path)

    def _reduce(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        if not self.ops_agree(context):
            why = f"it can be a {self.description}, which differ for this batch"
            raise cannot_merge(path, parts, why, context.sizes)
        return apply_rule(self.ops[0], parts, context, path)

    def ops_agree(self, context: MergeContext) -> bool:
        """Whether all reductions give these shards the same weights."""
        if len(self.ops) < 2:
            return True
        first, *others = [_normalized_weights(op, context) for op in self.ops]
        return all(isclose(one, two, rel_tol=1e-9) for other in others for one, two in zip(first, other, strict=True))

    def intersect(self, new: Verdict) -> Verdict | None:
        """The reductions that fit both trials; None if there are none.

        A trial whose samples have equal weights does not list criterion weights, so these also agree with a plain mean.
        """
        common = [op for op in self.ops if op in new.ops]
        if common:
            return partial_verdict(common)
        if "mean" in self.ops and new._uses_criterion_weights:
            return new
        return self if "mean" in new.ops and self._uses_criterion_weights else None

    @property
    def _uses_criterion_weights(self) -> bool:
        return all(isinstance(op, WeightedBy) and isinstance(op.weight, CriterionWeight) for op in self.ops)


Verdicts: TypeAlias = Mapping[Path, Verdict]


def partial_verdict(ops: Sequence[MergeRule], proven: bool = True) -> Verdict:
    """The verdict for an output that one of `ops` reduces. It is proven only if there is one."""
    return Verdict(Partial(ops[0]), proven and len(ops) == 1, alternatives=tuple(ops[1:]))


def _cat_shards(parts: Sequence[Tensor], dim: int, rank: int, context: MergeContext, path: Path) -> Tensor:
    full = [part if part.ndim == rank else part.unsqueeze(dim) for part in parts]
    shapes = [part.shape for part in full]
    sample_shapes = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if [shape[dim] for shape in shapes] != list(context.sizes) or len(sample_shapes) > 1:
        why = f"tensors of shapes {[list(part.shape) for part in parts]}, with the batch in dim {dim}"
        raise cannot_merge(path, parts, why, context.sizes)
    return torch.cat(full, dim)


def _merge_constants(parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
    first = parts[0]
    if all(part is first for part in parts):
        return first
    if all(isinstance(part, Tensor) for part in parts):
        if all(part.shape == first.shape for part in parts) and context.are_equal(parts):
            needs_grad = first.is_floating_point() and any(part.requires_grad for part in parts)
            return mean_of_equal_tensors(parts, context) if needs_grad else first
        why = f"a tensor that was constant in the trial and now differs ({_format_parts(parts)})"
    elif all(equal_values(part, first) for part in parts):
        return first
    else:
        why = f"a value that was constant in the trial and now differs ({format_values(parts)})"
    raise cannot_merge(path, parts, why, context.sizes)


def _merge_undetermined(parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        equal = all(isinstance(part, Tensor) for part in parts) and context.are_equal(parts)
        exact = not (first.is_floating_point() or first.is_complex())
        if equal and not (exact and context.is_nonzero(first)):
            return mean_of_equal_tensors(parts, context) if any(part.requires_grad for part in parts) else first
    elif all(equal_values(part, first) for part in parts) and (isinstance(first, float) or not np.any(first)):
        return first
    if _has_single_nonzero(parts):
        return apply_rule("sum", parts, context, path)  # equal to the maximum: only one part is nonzero
    shown = _format_parts(parts) if all(isinstance(part, Tensor) for part in parts) else format_values(parts)
    why = f"a constant, a sum or a mean, which the samples tried cannot decide ({shown})"
    raise cannot_merge(path, parts, why, context.sizes)


def check_missing_parts(verdict: Verdict | None, parts: Sequence[Any], context: MergeContext, path: Path) -> None:
    """Raise `MergeError` if a replica with samples returned None for an output that covers all samples.

    None is fine for a sum and for selected rows. Parts that do not come from a call are not checked.
    """
    missing = [index for index, part in enumerate(parts) if part is None and context.sizes[index]]
    if not missing or not context.inputs:
        return
    covers_samples = verdict is not None and isinstance(verdict.placement, (Shard, PerSample))
    may_be_mean = False
    if verdict is None:
        present = [(part, size) for part, size in zip(parts, context.sizes, strict=True) if part is not None]
        shapes = [part.shape for part, _ in present if isinstance(part, Tensor)]
        if len(shapes) == len(present):
            sizes, rank = [size for _, size in present], len(shapes[0])
            covers_samples = any(has_batch_dim(shapes, sizes, rank, dim) for dim in range(rank))
        may_be_mean = any(not shape for shape in shapes)
    op = verdict.ops[0] if verdict is not None and verdict.ops else "mean" if may_be_mean else "sum"
    weights = op.weights(context, "") if isinstance(op, WeightedBy) else context.sizes
    if covers_samples or (op != "sum" and any(float(weights[index]) for index in missing)):
        what = "one entry per sample" if covers_samples else "a number that may be a mean" if may_be_mean else "a mean"
        why = f"it is None on replicas {missing} and {what} on the others, so samples would be left out"
        error = cannot_merge(path, parts, why, context.sizes)
        hint = "If forward branches on its batch, branch on the whole batch: instep.all_reduce(flag.any(), 'max')."
        raise change_problem(error, hints=(*error.problems[0].hints, hint))


def merge_torch_sizes(verdicts: Verdicts, parts: Sequence[torch.Size], context: MergeContext, path: Path) -> torch.Size:
    """Merge `torch.Size` values entry by entry, by the verdict of each entry."""
    first = parts[0]
    found = [verdicts.get((*path, key)) for key in range(len(first))]
    known = [verdict for verdict in found if verdict and isinstance(verdict.placement, (Replicate, Partial))]
    if known and len(known) == len(first) and all(len(part) == len(first) for part in parts):
        columns = enumerate(zip(known, zip(*parts, strict=True), strict=True))
        return torch.Size([verdict.merge(column, context, (*path, key)) for key, (verdict, column) in columns])
    if any(set(part) & set(context.sizes) for part in parts) or any(part != first for part in parts):
        why = f"shapes, which differ or hold the size of a shard ({format_values(parts)})"
        raise cannot_merge(path, parts, why, context.sizes)
    return first


def _have_same_shape(parts: Sequence[Any]) -> bool:
    shapes = {tuple(part.shape) if isinstance(part, (Tensor, np.ndarray)) else () for part in parts}
    return len(shapes) == 1 and all(isinstance(part, (Tensor, np.ndarray, *NUMBER_TYPES)) for part in parts)


def _has_single_nonzero(parts: Sequence[Any]) -> bool:
    """Whether at most one part is nonzero at every position; False for other dtypes than integers."""
    counts = [torch.as_tensor(part) for part in parts]
    if any(count.is_floating_point() or count.is_complex() or count.dtype is torch.bool for count in counts):
        return False
    return int(torch.stack([count != 0 for count in counts]).sum(0).max()) <= 1


def _describe_op(op: MergeRule) -> str:
    if isinstance(op, WeightedBy):
        return f"mean weighted by {op.weight}"
    return {"mean": "mean weighted by samples", "sum": "sum of the parts"}.get(str(op), str(op))


def _normalized_weights(op: MergeRule, context: MergeContext) -> list[float]:
    """The weight of each part in a mean, as fractions of 1."""
    weights = [float(weight) for weight in (op.weights(context, "") if isinstance(op, WeightedBy) else context.sizes)]
    total = sum(weights) or 1.0
    return [weight / total for weight in weights]


def _format_parts(parts: Sequence[Tensor]) -> str:
    scalars = all(part.ndim == 0 for part in parts)
    return format_values(parts) if scalars else f"shapes {[list(part.shape) for part in parts]}"
