"""Placements of outputs, as a trial of the probe found them, and how each merges the replicas' parts.

A verdict describes one output leaf: its batch dimension, or that it is constant, a sum of the parts, or a weighted mean
of them. It applies only to parts of the form it was found for; other parts merge by their shapes.

These classes are not those of `placements`: an input placement is exact and says how to split a value, a verdict is
evidence (`proven`), needs the rank of the output, and refuses parts that contradict it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.compare import differing_attributes
from instep.structure.infer import NUMBER_TYPES
from instep.structure.merge_messages import attributes_differ, cannot_merge
from instep.structure.merge_rules import MergeContext, MergeRule, WeightedBy, apply_rule, mean_of_equal_tensors
from instep.structure.shapes import equal_values, format_values, has_batch_dim
from instep.structure.split import concat_sequences
from instep.structure.tree import Path
from instep.structure.weights import CriterionWeight, EntryCount


@dataclass(frozen=True)
class OutputShard:
    """A tensor or array with the batch in `dim`. A shard of one sample may lack that dimension (`squeeze`)."""

    rank: int
    dim: int
    proven: bool = True
    """Whether values showed that samples are independent; shapes alone do not."""

    @property
    def description(self) -> str:
        sure = "" if self.proven else ", by shapes alone"
        return f"batch in dim {self.dim}{sure}"

    def accepts(self, parts: Sequence[Any], context: MergeContext) -> bool:
        """Whether every part has the rank, or one dimension less and one sample."""
        return all(isinstance(part, Tensor) for part in parts) and all(
            part.ndim == self.rank or (size == 1 and part.ndim == self.rank - 1)
            for part, size in zip(parts, context.sizes, strict=True)
        )

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        whole = [part if part.ndim == self.rank else part.unsqueeze(self.dim) for part in parts]
        shapes = [part.shape for part in whole]
        others = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in shapes}
        if [shape[self.dim] for shape in shapes] != list(context.sizes) or len(others) > 1:
            shown = [list(part.shape) for part in parts]
            raise cannot_merge(
                path, parts, f"tensors of shapes {shown}, with the batch in dim {self.dim}", context.sizes
            )
        return torch.cat(whole, self.dim)


@dataclass(frozen=True)
class OutputReplicate:
    """A value that was the same for parts and whole."""

    proven: bool = False

    description = "constant"

    def accepts(self, *_: Any) -> bool:
        return True

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        first = parts[0]
        if all(part is first for part in parts):
            return first
        if all(isinstance(part, Tensor) for part in parts):
            same = all(part.shape == first.shape for part in parts) and context.are_equal(parts)
            if same:
                needs = first.is_floating_point() and any(part.requires_grad for part in parts)
                return mean_of_equal_tensors(parts, context) if needs else first
            why = f"a tensor that was constant in the trial and now differs ({_format_parts(parts)})"
        elif all(equal_values(part, first) for part in parts):
            return first
        else:
            why = f"a value that was constant in the trial and now differs ({format_values(parts)})"
        raise cannot_merge(path, parts, why, context.sizes)


@dataclass(frozen=True)
class Undetermined:
    """A value whose shape does not depend on the batch and whose reduction is unknown.

    It may be a constant, a sum or a mean: for zeros all of these are equal.
    """

    all_zero: bool = True
    """Whether all values were 0 or NaN. Otherwise they were too small, or too close to each other."""
    proven: bool = False

    description = "the same shape for any batch"

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        return _have_same_shape(parts)

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        first = parts[0]
        if isinstance(first, Tensor):
            equal = all(isinstance(part, Tensor) for part in parts) and context.are_equal(parts)
            plain = not (first.is_floating_point() or first.is_complex())
            if equal and not (plain and context.is_nonzero(first)):
                return mean_of_equal_tensors(parts, context) if any(part.requires_grad for part in parts) else first
        elif all(equal_values(part, first) for part in parts) and (isinstance(first, float) or not np.any(first)):
            return first
        if _has_single_nonzero(parts):
            return apply_rule("sum", parts, context, path)  # equal to the maximum: only one part is nonzero
        shown = _format_parts(parts) if all(isinstance(part, Tensor) for part in parts) else format_values(parts)
        why = f"a constant, a sum or a mean, which the samples tried cannot decide ({shown})"
        raise cannot_merge(path, parts, why, context.sizes)


@dataclass(frozen=True)
class Partial:
    """A sum or a weighted mean of the parts.

    Several rules remain if the values fit more than one, such as a mean over samples and a mean over valid labels when
    every sample has equally many. They are used only for calls on which they agree.
    """

    rules: tuple[MergeRule, ...]
    proven: bool = True

    @property
    def description(self) -> str:
        return " or ".join(_describe_rule(rule) for rule in self.rules)

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        return _have_same_shape(parts)

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        if len(self.rules) > 1 and not self.rules_agree(context):
            raise cannot_merge(
                path,
                parts,
                f"it can be a {self.description}, which differ for this batch",
                context.sizes,
                suggestions=_count_rule_code(self),
            )
        return apply_rule(self.rules[0], parts, context, path)

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean, plain or weighted."""
        return "sum" not in self.rules

    def intersect(self, new: Partial) -> Partial | None:
        """The rules that fit both trials; None if there are none.

        A trial whose samples have equal weights does not list criterion weights, so these also agree with a plain mean.
        """
        common = tuple(rule for rule in self.rules if rule in new.rules)
        if common:
            return Partial(common, len(common) == 1)
        if "mean" in self.rules and new._uses_criterion_weights:
            return new
        return self if "mean" in new.rules and self._uses_criterion_weights else None

    @property
    def _uses_criterion_weights(self) -> bool:
        return all(isinstance(rule, WeightedBy) and isinstance(rule.weight, CriterionWeight) for rule in self.rules)

    def rules_agree(self, context: MergeContext) -> bool:
        """Whether all rules give these shards the same weights."""
        if len(self.rules) < 2:
            return True
        first, *others = [_normalized_weights(rule, context) for rule in self.rules]
        return all(np.allclose(first, other, rtol=1e-9, atol=0) for other in others)


@dataclass(frozen=True)
class OutputPerSample:
    """Parts that are concatenated whatever their lengths: selected rows, detected boxes."""

    dim: int | None
    """The dimension of the concatenation; None for lists."""
    proven: bool = True
    """Whether both parts had rows, and the rows were not sorted."""

    @property
    def description(self) -> str:
        return "the parts one after another" + ("" if self.dim is None else f", along dim {self.dim}")

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        if self.dim is None:
            return all(isinstance(part, (list, tuple)) for part in parts)
        dim = self.dim
        return all(isinstance(part, Tensor) and part.ndim > dim for part in parts)

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        if not self.proven and any(part.numel() for part in parts):
            why = f"rows that were selected, which the samples tried cannot decide ({_format_parts(parts)})"
            raise cannot_merge(path, parts, why, context.sizes)
        return concat_sequences(parts) if self.dim is None else apply_rule(("cat", self.dim), parts, context, path)


@dataclass(frozen=True)
class ListKind:
    """Whether a list has one entry per sample or is a structure of separate outputs."""

    per_sample: bool
    proven: bool = True

    @property
    def description(self) -> str:
        return "one entry a sample" if self.per_sample else "a structure"

    def accepts(self, *_: Any) -> bool:
        return False  # the merger handles lists itself

    def merge(self, parts: Sequence[Any], context: MergeContext, path: Path) -> Any:
        raise cannot_merge(path, parts, "a list has no rule of its own", context.sizes)


Verdict: TypeAlias = OutputShard | OutputReplicate | Undetermined | Partial | OutputPerSample | ListKind
Verdicts: TypeAlias = Mapping[Path, Verdict]


def check_missing_parts(
    has_rule: Any, verdict: Verdict | None, parts: Sequence[Any], context: MergeContext, path: Path
) -> None:
    """Raise `MergeError` if a replica with samples returned None for an output that covers all samples.

    None is fine for a sum and for selected rows. Outputs with a rule of the user (`has_rule`) are not checked, nor are
    parts that do not come from a call.
    """
    if has_rule or not context.inputs:
        return
    absent = [index for index, part in enumerate(parts) if part is None and context.sizes[index]]
    there = [(part, size) for part, size in zip(parts, context.sizes, strict=True) if part is not None]
    rows = isinstance(verdict, OutputShard) or (isinstance(verdict, ListKind) and verdict.per_sample)
    tensors = [part for part, _ in there if isinstance(part, Tensor)]
    if verdict is None and len(tensors) == len(there):
        sizes = [size for _, size in there]
        rows = any(
            has_batch_dim([t.shape for t in tensors], sizes, tensors[0].ndim, dim) for dim in range(tensors[0].ndim)
        )
    unknown = verdict is None and any(not tensor.ndim for tensor in tensors)
    rule = verdict.rules[0] if isinstance(verdict, Partial) else "mean" if unknown else "sum"
    counts = rule.weights(context, "") if isinstance(rule, WeightedBy) else context.sizes
    share = rule != "sum" and any(float(counts[index]) for index in absent)
    if absent and (rows or share):
        what = "one entry a sample" if rows else "a number that may be a mean" if unknown else "a mean"
        why = f"it is None on replicas {absent} and {what} on the others, so samples would be left out"
        error = cannot_merge(path, parts, why, context.sizes)
        hint = "If forward branches on its batch, branch on the whole batch: instep.all_reduce(flag.any(), 'max')."
        raise MergeError(f"{error}\n{hint}")


def check_extra_attributes(parts: Sequence[Any], context: MergeContext, path: Path) -> None:
    """Raise `MergeError` if containers or numbers have extra attributes that differ between replicas."""
    names = differing_attributes(parts)
    if names:
        raise attributes_differ(path, parts, names, context.sizes)


def merge_torch_sizes(found: Verdicts, parts: Sequence[torch.Size], context: MergeContext, path: Path) -> torch.Size:
    """Merge `torch.Size` values entry by entry, by the verdict of each entry."""
    first = parts[0]
    entries = [found.get((*path, key)) for key in range(len(first))]
    known = [verdict for verdict in entries if isinstance(verdict, (OutputReplicate, Partial))]
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


def _describe_rule(rule: MergeRule) -> str:
    if isinstance(rule, WeightedBy):
        return f"mean weighted by {rule.weight}"
    return {"mean": "mean weighted by samples", "sum": "sum of the parts"}.get(str(rule), str(rule))


def _normalized_weights(rule: MergeRule, context: MergeContext) -> list[float]:
    """The weight of each part under a mean rule, as fractions of 1."""
    weights = [float(w) for w in (rule.weights(context, "") if isinstance(rule, WeightedBy) else context.sizes)]
    whole = sum(weights) or 1.0
    return [weight / whole for weight in weights]


def _count_rule_code(verdict: Partial) -> list[str]:
    return [
        rule.weight.code
        for rule in verdict.rules
        if isinstance(rule, WeightedBy) and isinstance(rule.weight, EntryCount)
    ]


def _format_parts(parts: Sequence[Tensor]) -> str:
    return (
        format_values(parts)
        if all(part.ndim == 0 for part in parts)
        else f"shapes {[list(part.shape) for part in parts]}"
    )
