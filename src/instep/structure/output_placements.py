"""What the numbers of a trial said about one output, and merging by it.

A verdict speaks of a leaf: the dim of it that follows the batch, or that it is constant, a sum of the parts, or a mean
of them under some weights. It is used only for parts that look like those it was found for; everything else is left
to the tables.
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
from instep.structure.shapes import equal_values, format_values, has_batch_dim, tensors_equal
from instep.structure.split import concat_sequences
from instep.structure.tree import Path
from instep.structure.weights import CriterionWeight, EntryCount


@dataclass(frozen=True)
class OutputShard:
    """A tensor or array whose batch is in `dim`; a shard of one sample may have lost that dim."""

    rank: int
    dim: int
    proven: bool = True
    """Whether numbers showed that samples are independent; shapes alone do not."""

    @property
    def description(self) -> str:
        sure = "" if self.proven else ", by shapes alone"
        return f"batch in dim {self.dim}{sure}"

    def accepts(self, parts: Sequence[Any], scene: MergeContext) -> bool:
        """Whether every part has the rank, or lacks one dim because it holds one sample."""
        return all(isinstance(part, Tensor) for part in parts) and all(
            part.ndim == self.rank or (size == 1 and part.ndim == self.rank - 1)
            for part, size in zip(parts, scene.sizes, strict=True)
        )

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        whole = [part if part.ndim == self.rank else part.unsqueeze(self.dim) for part in parts]
        shapes = [part.shape for part in whole]
        others = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in shapes}
        if [shape[self.dim] for shape in shapes] != list(scene.sizes) or len(others) > 1:
            shown = [list(part.shape) for part in parts]
            raise cannot_merge(path, parts, f"tensors of shapes {shown}, with the batch in dim {self.dim}", scene.sizes)
        return torch.cat(whole, self.dim)


@dataclass(frozen=True)
class OutputReplicate:
    """The same for parts and whole: nothing of the batch is in it, as far as was seen."""

    proven: bool = False

    description = "constant"

    def accepts(self, *_: Any) -> bool:
        return True

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        first = parts[0]
        if all(part is first for part in parts):
            return first
        if all(isinstance(part, Tensor) for part in parts):
            same = all(part.shape == first.shape for part in parts) and tensors_equal(parts)
            if same:
                needs = first.is_floating_point() and any(part.requires_grad for part in parts)
                return mean_of_equal_tensors(parts, scene.sizes) if needs else first
            why = f"a tensor that was the same for parts and whole, and now differs ({_format_parts(parts)})"
        elif all(equal_values(part, first) for part in parts):
            return first
        else:
            why = f"a value that was the same for parts and whole, and now differs ({format_values(parts)})"
        raise cannot_merge(path, parts, why, scene.sizes)


@dataclass(frozen=True)
class Undetermined:
    """A value whose shape has nothing of the batch in it, and of which the numbers said nothing else.

    It may be a constant, a sum or a mean: for zeros these are all the same.
    """

    all_zero: bool = True
    """Whether there was nothing but zeros or NaN; else numbers that are too small, or too close together."""
    proven: bool = False

    description = "the same shape for any batch"

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        return _have_same_shape(parts)

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        first = parts[0]
        if isinstance(first, Tensor):
            equal = all(isinstance(part, Tensor) for part in parts) and tensors_equal(parts)
            plain = not (first.is_floating_point() or first.is_complex())
            if equal and not (plain and bool(first.any())):
                return mean_of_equal_tensors(parts, scene.sizes) if any(part.requires_grad for part in parts) else first
        elif all(equal_values(part, first) for part in parts) and (isinstance(first, float) or not np.any(first)):
            return first
        if _has_single_nonzero(parts):
            return apply_rule("sum", parts, scene, path)  # as good as the largest: there is but one
        shown = _format_parts(parts) if all(isinstance(part, Tensor) for part in parts) else format_values(parts)
        why = f"a constant, a sum or a mean, of which the samples that were tried say nothing ({shown})"
        raise cannot_merge(path, parts, why, scene.sizes)


@dataclass(frozen=True)
class Partial:
    """A sum, or a mean under some weights, of what the parts give.

    Several rules are kept where the numbers fit more than one (a mean over samples and one over valid labels, when
    every sample has as many): they are used only as long as they say the same.
    """

    rules: tuple[MergeRule, ...]
    proven: bool = True

    @property
    def description(self) -> str:
        return " or ".join(_describe_rule(rule) for rule in self.rules)

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        return _have_same_shape(parts)

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        if len(self.rules) > 1 and not self.rules_agree(scene):
            raise cannot_merge(
                path,
                parts,
                f"it can be a {self.description}, which differ for this batch",
                scene.sizes,
                suggestions=_count_rule_code(self),
            )
        return apply_rule(self.rules[0], parts, scene, path)

    @property
    def is_mean(self) -> bool:
        """Whether it is a mean over something, which samples that all weigh alike do not tell."""
        return "sum" not in self.rules

    def intersect(self, new: Partial) -> Partial | None:
        """What is left after another trial: the rules that fit every time; None if nothing does.

        What a loss of the module divides by is not among the rules where samples do not tell it from a mean over them.
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

    def rules_agree(self, scene: MergeContext) -> bool:
        """Whether all rules weigh these shards alike."""
        if len(self.rules) < 2:
            return True
        first, *others = [_normalized_weights(rule, scene) for rule in self.rules]
        return all(np.allclose(first, other, rtol=1e-9, atol=0) for other in others)


@dataclass(frozen=True)
class OutputPerSample:
    """Parts that follow one another, however long each is: rows that were selected, boxes that were found."""

    dim: int | None
    """The dim along which tensors are joined; None for lists."""
    proven: bool = True
    """Whether there were rows of both parts, and not in order by chance."""

    @property
    def description(self) -> str:
        return "the parts one after another" + ("" if self.dim is None else f", along dim {self.dim}")

    def accepts(self, parts: Sequence[Any], _: MergeContext) -> bool:
        if self.dim is None:
            return all(isinstance(part, (list, tuple)) for part in parts)
        dim = self.dim
        return all(isinstance(part, Tensor) and part.ndim > dim for part in parts)

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        if not self.proven and any(part.numel() for part in parts):
            why = f"rows that were selected, of which the samples that were tried say nothing ({_format_parts(parts)})"
            raise cannot_merge(path, parts, why, scene.sizes)
        return concat_sequences(parts) if self.dim is None else apply_rule(("cat", self.dim), parts, scene, path)


@dataclass(frozen=True)
class ListKind:
    """A list with one entry a sample, or one whose entries each have a meaning of their own, whatever its length."""

    per_sample: bool
    proven: bool = True

    @property
    def description(self) -> str:
        return "one entry a sample" if self.per_sample else "a structure"

    def accepts(self, *_: Any) -> bool:
        return False  # a merger that knows the reading of a list needs nothing else

    def merge(self, parts: Sequence[Any], scene: MergeContext, path: Path) -> Any:
        raise cannot_merge(path, parts, "a list is merged by its reading", scene.sizes)


Verdict: TypeAlias = OutputShard | OutputReplicate | Undetermined | Partial | OutputPerSample | ListKind
Verdicts: TypeAlias = Mapping[Path, Verdict]


def check_missing_parts(
    told: Any, verdict: Verdict | None, parts: Sequence[Any], scene: MergeContext, path: Path
) -> None:
    """`MergeError` where a replica that has samples gives None for what the whole batch would have their part of.

    Nothing to add to a sum, or no rows that were selected, is no such thing. What the user `told` is not judged, nor
    are parts that come from no call.
    """
    if told or not scene.inputs:
        return
    absent = [index for index, part in enumerate(parts) if part is None and scene.sizes[index]]
    there = [(part, size) for part, size in zip(parts, scene.sizes, strict=True) if part is not None]
    rows = isinstance(verdict, OutputShard) or (isinstance(verdict, ListKind) and verdict.per_sample)
    tensors = [part for part, _ in there if isinstance(part, Tensor)]
    if verdict is None and len(tensors) == len(there):
        sizes = [size for _, size in there]
        rows = any(
            has_batch_dim([t.shape for t in tensors], sizes, tensors[0].ndim, dim) for dim in range(tensors[0].ndim)
        )
    unknown = verdict is None and any(not tensor.ndim for tensor in tensors)
    rule = verdict.rules[0] if isinstance(verdict, Partial) else "mean" if unknown else "sum"
    counts = rule.weights(scene, "") if isinstance(rule, WeightedBy) else scene.sizes
    share = rule != "sum" and any(float(counts[index]) for index in absent)
    if absent and (rows or share):
        what = "one entry a sample" if rows else "a number that may be a mean" if unknown else "a mean"
        why = f"it is None on replicas {absent} and {what} on the others, which leaves samples out"
        error = cannot_merge(path, parts, why, scene.sizes)
        hint = "Where forward asks about its batch, ask about the whole: instep.all_reduce(flag.any(), 'max')."
        raise MergeError(f"{error}\n{hint}")


def check_extra_attributes(parts: Sequence[Any], scene: MergeContext, path: Path) -> None:
    """`MergeError` where lists, numbers and the like have attributes of their own that are not the same on all."""
    names = differing_attributes(parts)
    if names:
        raise attributes_differ(path, parts, names, scene.sizes)


def merge_torch_sizes(found: Verdicts, parts: Sequence[torch.Size], scene: MergeContext, path: Path) -> torch.Size:
    """One `torch.Size` from several, number by number, by what a trial said of each."""
    first = parts[0]
    told = [found.get((*path, key)) for key in range(len(first))]
    known = [verdict for verdict in told if isinstance(verdict, (OutputReplicate, Partial))]
    if known and len(known) == len(first) and all(len(part) == len(first) for part in parts):
        columns = enumerate(zip(known, zip(*parts, strict=True), strict=True))
        return torch.Size([verdict.merge(column, scene, (*path, key)) for key, (verdict, column) in columns])
    if any(set(part) & set(scene.sizes) for part in parts) or any(part != first for part in parts):
        why = f"shapes, which differ or hold the size of a shard ({format_values(parts)})"
        raise cannot_merge(path, parts, why, scene.sizes)
    return first


def _have_same_shape(parts: Sequence[Any]) -> bool:
    shapes = {tuple(part.shape) if isinstance(part, (Tensor, np.ndarray)) else () for part in parts}
    return len(shapes) == 1 and all(isinstance(part, (Tensor, np.ndarray, *NUMBER_TYPES)) for part in parts)


def _has_single_nonzero(parts: Sequence[Any]) -> bool:
    """Whether integers are 0 but for one of the parts, everywhere."""
    counts = [torch.as_tensor(part) for part in parts]
    if any(count.is_floating_point() or count.is_complex() or count.dtype is torch.bool for count in counts):
        return False
    return int(torch.stack([count != 0 for count in counts]).sum(0).max()) <= 1


def _describe_rule(rule: MergeRule) -> str:
    if isinstance(rule, WeightedBy):
        return f"mean weighted by {rule.weight}"
    return {"mean": "mean weighted by samples", "sum": "sum of the parts"}.get(str(rule), str(rule))


def _normalized_weights(rule: MergeRule, scene: MergeContext) -> list[float]:
    """Each part's weight in the whole, under a rule that is a mean."""
    weights = [float(w) for w in (rule.weights(scene, "") if isinstance(rule, WeightedBy) else scene.sizes)]
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
