"""Derives a verdict for every output from the outputs of two parts and of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import InstepError, MergeError
from instep.probe.independence import max_rounding_mismatches
from instep.structure.compare import (
    describe_difference,
    equal_or_nan,
    is_sorted,
    is_sorted_list,
    plain_values_equal,
    restore_batch_dim,
    to_comparable,
)
from instep.structure.compare import relative_difference as how_far
from instep.structure.infer import NUMBER_TYPES, handler_for
from instep.structure.merge_messages import cannot_merge, depends_on_other_samples, no_rule_fits
from instep.structure.merge_rules import MergeRule, WeightedBy, applies_to, find_rule
from instep.structure.output_placements import (
    ListKind,
    OutputPerSample,
    OutputReplicate,
    OutputShard,
    Partial,
    Undetermined,
    Verdict,
)
from instep.structure.shapes import format_values
from instep.structure.spec import AUTO, DimSpec
from instep.structure.split import merge_by_handler
from instep.structure.tree import Path, flatten_one_level, is_sequence, tensors_in
from instep.structure.types import TypeHandler
from instep.structure.weights import candidate_counts, candidate_weights


@dataclass(frozen=True)
class TrialOutputs:
    """A few samples in two parts and together: what went in and what came out."""

    sizes: tuple[int, int]
    parts: tuple[Any, Any]
    whole: Any
    inputs: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    """The arguments by name, of both parts and of the whole."""
    tolerance: float = 3e-4
    """How far entries of a tensor may be apart, relative to the largest."""
    reduction_tolerance: float = 2e-5
    """The same for sums and means, which are told apart by little."""
    compare_values: bool = True
    """Whether values count; where numbers are drawn, or samples meet by a collective, only shapes do."""
    criteria: Sequence[tuple[str, nn.Module]] = ()
    """Losses inside the module whose means are over weights, by name."""


@dataclass
class Findings:
    """What a trial showed."""

    outputs: dict[Path, Verdict] = field(default_factory=dict)
    unresolved: set[Path] = field(default_factory=set)
    """Leaves of which the numbers proved nothing: zeros, equal values. They are worth another trial."""
    errors: dict[Path, MergeError] = field(default_factory=dict)
    """Leaves that no rule explains."""
    mismatched_integers: set[Path] = field(default_factory=set)
    """Joined integers of which a few differ: rounding, or samples that meet."""
    needs_reordering: set[Path] = field(default_factory=set)
    """Leaves that were in order already, or nothing but zeros: samples in another order may tell more."""


@dataclass(frozen=True)
class UserRules:
    """What the user said about outputs."""

    path_rules: Mapping[str, MergeRule] = field(default_factory=dict)
    default_rule: MergeRule | None = None
    dim_spec: DimSpec = field(default_factory=lambda: DimSpec(AUTO, 0))


def judge(trial: TrialOutputs, named: UserRules) -> Findings:
    """A verdict for every output of a trial that the numbers, or else the shapes, speak of."""
    judging = _Judge(trial, named)
    judging.judge_node((*trial.parts, trial.whole), (), named.dim_spec)
    return judging.findings


class _Judge:
    def __init__(self, trial: TrialOutputs, named: UserRules) -> None:
        self.trial, self.user_rules = trial, named
        self.findings = Findings()
        a, b = trial.sizes
        self.sizes = (a, b, a + b)

    def judge_node(self, values: Sequence[Any], path: Path, spec: DimSpec) -> None:
        named, types = self.user_rules, {type(value) for value in values}
        if find_rule(named.path_rules, path) is not None or not (spec.is_auto or not spec.is_uniform):
            return
        if type(None) in types or (named.default_rule is not None and applies_to(named.default_rule, values)):
            return
        kinds = [handler_for(value) for value in values]
        if any(kinds):
            if kinds[0] is not None and all(kind is kinds[0] for kind in kinds):
                self._judge_custom(values, kinds[0], path)
        elif all(isinstance(value, Tensor) for value in values):
            self._judge_tensors(values, path)
        elif all(isinstance(value, np.ndarray) and value.dtype.kind in "biufc" for value in values):
            self._judge_tensors([torch.from_numpy(value.copy()) for value in values], path)
        elif all(isinstance(value, NUMBER_TYPES) for value in values):
            self._judge_numbers(values, path)
        elif len(types) == 1 and isinstance(values[0], (str, bytes)):
            self._judge_strings(values, path)
        elif len(types) == 1 and is_sequence(values[0]):
            self._judge_sequence(values, path, spec)
        elif len(types) == 1:
            self._judge_children(values, path, spec)

    def _set_verdict(self, path: Path, verdict: Verdict) -> None:
        self.findings.outputs[path] = verdict
        if not verdict.proven and self.trial.compare_values:
            self.findings.unresolved.add(path)

    def _judge_children(self, values: Sequence[Any], path: Path, spec: DimSpec) -> None:
        if isinstance(values[0], torch.Size):
            for key, numbers in enumerate(zip(*values, strict=True)):
                self._judge_numbers(numbers, (*path, key))
            return
        nodes = [node for node in map(flatten_one_level, values) if node is not None]
        if len(nodes) < 3 or any(set(node.keys) != set(nodes[0].keys) for node in nodes):
            return
        tables = [dict(zip(node.keys, node.children, strict=True)) for node in nodes]
        keys = tuple(nodes[0].keys)
        for key, below in zip(keys, spec.children(keys, path), strict=True):
            self.judge_node([table[key] for table in tables], (*path, key), below)

    def _judge_sequence(self, values: Sequence[Any], path: Path, spec: DimSpec) -> None:
        lengths = [len(value) for value in values]
        if len(set(lengths)) == 1:
            if lengths[0]:
                self._set_verdict(path, ListKind(per_sample=False))
            self._judge_children(values, path, spec)
            return
        few_samples = self.sizes == (1, 1, 2)  # as is anything cut in half
        if not spec.is_auto:
            return
        joined, whole = [*values[0], *values[1]], list(values[2])
        as_samples = tuple(lengths) == self.sizes
        if not self.trial.compare_values:
            if as_samples:
                self._set_verdict(path, ListKind(per_sample=True, proven=False))
        elif len(joined) != len(whole) or not self._structures_close(joined, whole):
            why = f"lists of {lengths[:2]} entries apart and {lengths[2]} together, which are not the same entries"
            self._set_dependence_error(path, why)
        else:
            self._set_verdict(
                path, ListKind(per_sample=True, proven=not few_samples) if as_samples else OutputPerSample(None)
            )
            if as_samples and is_sorted_list(whole):
                self.findings.needs_reordering.add(path)

    def _structures_close(self, left: Any, right: Any) -> bool:
        """Whether two structures hold the same, as far as it can be compared."""
        one, two = list(tensors_in(left)), list(tensors_in(right))
        if len(one) != len(two):
            return False
        if any(handler_for(tensor) is not None for tensor in (*one, *two)):
            return True
        return all(
            a.shape == b.shape and self._tensors_close(a, b) for a, b in zip(one, two, strict=True)
        ) and plain_values_equal(left, right)

    def _tensors_close(self, left: Tensor, right: Tensor) -> bool:
        if left.dtype != right.dtype:
            return False
        if left.is_floating_point() or left.is_complex():
            return how_far(left, right) <= self.trial.tolerance or self._is_rounding_noise(left, right)
        return float((left != right).sum()) <= max_rounding_mismatches(left.numel(), self.trial.tolerance)

    def _is_rounding_noise(self, *values: Tensor) -> bool:
        """Whether there is nothing but what rounding leaves of numbers of ordinary size."""
        return all(not v.numel() or float(v.abs().max()) <= self.trial.tolerance / 100 for v in values)

    def _judge_custom(self, values: Sequence[Any], kind: TypeHandler, path: Path) -> None:
        """A type with its own rule: what it makes of the parts has to hold the tensors of the whole."""
        try:
            if not self.trial.compare_values or [kind.size(value) for value in values] != list(self.sizes):
                return
            joined, whole = list(tensors_in(merge_by_handler(kind, list(values[:2])))), list(tensors_in(values[2]))
        except InstepError as error:  # it does not know where its value stood
            self.findings.errors[path] = cannot_merge(path, values[:2], str(error), self.trial.sizes)
            return
        if any(handler_for(tensor) is not None for tensor in (*joined, *whole)) or len(joined) != len(whole):
            return
        pairs = list(zip(joined, whole, strict=True))
        if all(a.shape == b.shape for a, b in pairs) and not all(self._tensors_close(a, b) for a, b in pairs):
            self._set_dependence_error(path, "its values depend on other samples of the batch")

    def _set_dependence_error(self, path: Path, why: str) -> None:
        self.findings.errors[path] = depends_on_other_samples(path, why, self.trial.sizes)

    def _judge_tensors(self, values: Sequence[Tensor], path: Path) -> None:
        if len({value.dtype for value in values}) > 1 or any(v.is_quantized or v.is_meta for v in values):
            return
        values = [to_comparable(value) for value in values]
        whole = values[2]
        parts = restore_batch_dim(values, self.sizes)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) == 1:
            self._judge_fixed_shape(parts, path)
            return
        if len({len(shape) for shape in shapes}) > 1:
            if self.trial.compare_values:
                shown = [list(value.shape) for value in values]
                self._set_dependence_error(path, f"its shapes are {shown[0]} and {shown[1]} apart, {shown[2]} together")
            return
        following = [
            dim for dim in range(whole.ndim) if all(s[dim] == size for s, size in zip(shapes, self.sizes, strict=True))
        ]
        if len(following) > 1:
            if self.trial.compare_values:
                self._set_dependence_error(path, f"its dims {following[0]} and {following[1]} both follow the batch")
        elif following:
            self._judge_shard(parts, following[0], path)
        elif self.trial.compare_values:
            self._judge_selected_rows(parts, path)

    def _judge_shard(self, parts: Sequence[Tensor], dim: int, path: Path) -> None:
        whole = parts[2]
        shapes = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        if not self.trial.compare_values:
            self._set_verdict(path, OutputShard(whole.ndim, dim, proven=False))
        elif len(set(shapes)) == 1:  # else padded to the longest: what the shapes of a call say decides
            together = torch.cat(list(parts[:2]), dim)
            if not self._tensors_close(together, whole):
                self._set_dependence_error(
                    path, "its entries depend on other samples of the batch" + describe_difference(together, whole)
                )
                return
            first = whole.narrow(dim, 0, 1)
            alike = bool(((whole == first) | (whole.isnan() & first.isnan())).all())
            real = whole.is_floating_point() or whole.is_complex()
            sure = (not self._is_rounding_noise(whole) if real else torch.equal(together, whole)) and not is_sorted(
                whole
            )
            sure = sure and not alike
            if not real and not torch.equal(together, whole):
                self.findings.mismatched_integers.add(path)
            elif (is_sorted(whole) or (real and whole.ndim > 1)) and not alike:
                self.findings.needs_reordering.add(path)  # rows may be in the order that forward brings them into
            self._set_verdict(path, OutputShard(whole.ndim, dim, proven=sure))

    def _judge_selected_rows(self, parts: Sequence[Tensor], path: Path) -> None:
        """Lengths that do not follow the batch: rows that were selected follow one another, else nothing is known."""
        whole = parts[2]
        for dim in range(whole.ndim):
            shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
            if len(shapes) == 1 and parts[0].shape[dim] + parts[1].shape[dim] == whole.shape[dim]:
                if not (parts[0].numel() and parts[1].numel()) or is_sorted(whole):
                    self._set_verdict(path, OutputPerSample(dim, proven=False))
                    return
                if self._tensors_close(torch.cat(list(parts[:2]), dim), whole):
                    self._set_verdict(path, OutputPerSample(dim))
                    return
        shown = [list(part.shape) for part in parts]
        why = f"its shapes are {shown[0]} and {shown[1]} apart, {shown[2]} together"
        self._set_dependence_error(path, why)

    def _judge_strings(self, values: Sequence[Any], path: Path) -> None:
        if all(value == values[0] for value in values):
            self._set_verdict(path, OutputReplicate(proven=True))
        elif self.trial.compare_values:
            why = f"a string that differs ({format_values(values)})"
            self.findings.errors[path] = no_rule_fits(path, values[:2], why, self.trial.sizes, ())

    def _judge_numbers(self, values: Sequence[Any], path: Path) -> None:
        if isinstance(values[0], (bool, np.bool_)) or all(isinstance(value, (int, np.integer)) for value in values):
            self._judge_fixed_shape([torch.tensor(value) for value in values], path)
        else:
            # What `.item()` gave has the precision of the tensor it came from.
            self._judge_fixed_shape([torch.tensor(value, dtype=torch.float64) for value in map(float, values)], path)

    def _judge_fixed_shape(self, values: Sequence[Tensor], path: Path) -> None:
        """Equal shapes whatever the number of samples: a constant, a sum or a mean."""
        if not self.trial.compare_values:
            return
        first, second, whole = values
        if equal_or_nan(first, whole) and equal_or_nan(second, whole):
            if bool((whole != 0).any()) and not bool(whole.isnan().any()):
                self._set_verdict(path, OutputReplicate())
                return
            self._set_verdict(path, Undetermined())
            if not whole.is_floating_point():  # the largest of some samples may be the first, and so number 0
                self.findings.needs_reordering.add(path)
            return
        if not (whole.is_floating_point() or whole.is_complex()):
            self._judge_integers(values, path)
            return
        finite = [bool(value.isfinite().all()) for value in values]
        if finite[2] and not all(finite):
            self._judge_nan_part(values, finite, path)
            return
        if not all(finite) or self._is_rounding_noise(*values):
            self._set_verdict(path, Undetermined(all_zero=False))
            return
        verdict, off = self._fit_reduction(values)
        if verdict is not None:
            self._set_verdict(path, verdict)
        elif off <= self.trial.reduction_tolerance:  # it fits, but everything is too close together to prove anything
            self._set_verdict(path, Undetermined(all_zero=False))
        else:
            self._set_unexplained_error(values, path)

    def _judge_nan_part(self, values: Sequence[Tensor], finite: Sequence[bool], path: Path) -> None:
        """A part is NaN and the whole is not: a mean in which that part weighs nothing, or no mean at all."""
        there = [values[index] for index in (0, 1) if finite[index]]
        fits = bool(there) and how_far(there[0], values[2]) <= self.trial.reduction_tolerance
        rules = [
            WeightedBy(weight)
            for weight, *shares in candidate_weights(self.trial.inputs, self.sizes, self.trial.criteria)
            if fits and all(bool(share) == known for share, known in zip(shares, finite, strict=False))
        ]
        if rules:
            self._set_verdict(path, Partial(tuple(rules), proven=False))
        else:
            self._set_unexplained_error(values, path)

    def _judge_integers(self, values: Sequence[Tensor], path: Path) -> None:
        """Integers: a sum, if both parts have something to add."""
        first, second, whole = values
        if whole.dtype is torch.bool or not torch.equal(first + second, whole):
            self._set_unexplained_error(values, path)
        elif bool(((first != 0) & (second != 0)).any()):
            self._set_verdict(path, Partial(("sum",)))
        else:  # or the largest of both, or where the largest is
            self._set_verdict(path, Undetermined(all_zero=False))
            self.findings.needs_reordering.add(path)

    def _set_unexplained_error(self, values: Sequence[Tensor], path: Path) -> None:
        scalars = all(value.ndim == 0 for value in values)
        shown = f" ({format_values(values[:2])} apart, {format_values(values[2:])} together)" if scalars else ""
        what = "a value" if scalars else f"a tensor of shape {list(values[0].shape)}"
        hints = [count.code for count in candidate_counts(self.trial.inputs[2], self.sizes[2])] if scalars else []
        why = f"{what} that differs between parts and whole{shown}"
        self.findings.errors[path] = no_rule_fits(path, values[:2], why, self.trial.sizes, hints)

    def _fit_reduction(self, values: Sequence[Tensor]) -> tuple[Partial | None, float]:
        """The rules that make the whole of the parts, and how far off the best one is.

        It has to fit much better than the parts are apart, or it proves nothing.
        """
        first, second, whole = [value.to(torch.complex128 if value.is_complex() else torch.float64) for value in values]
        scale = max(float(value.abs().max()) for value in (first, second, whole))
        tolerance = self.trial.reduction_tolerance
        apart = float((first - second).abs().max()) / scale

        def off(guess: Tensor) -> float:
            return float((guess - whole).abs().max()) / scale

        adds_up = off(first + second) <= tolerance
        a, b, _ = self.sizes
        errors: dict[MergeRule, float] = {"mean": off((a * first + b * second) / (a + b))}
        alone = float("inf")
        for weight, one, two in candidate_weights(self.trial.inputs, self.sizes, self.trial.criteria):
            error = off((one * first + two * second) / (one + two))
            if one and two:
                errors[WeightedBy(weight)] = error
            else:  # the whole is what one part gave: so it is with the larger of two as well
                alone = min(alone, error)
        best = min(errors.values())
        if adds_up:  # unless one part is nothing, and weighs nothing
            return (None, 0.0) if min(best, alone) <= tolerance else (Partial(("sum",)), 0.0)
        if alone <= tolerance < best:
            return None, alone
        if best > tolerance or 20 * best > apart:
            return None, best
        near = tuple(rule for rule, error in errors.items() if error <= max(8 * best, tolerance / 50))
        return Partial(near, proven=len(near) == 1), best
