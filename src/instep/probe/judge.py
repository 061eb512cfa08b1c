"""Derives a verdict for every output by comparing the outputs of two parts with those of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import InstepError, MergeError
from instep.structure.compare import (
    describe_difference,
    equal_or_nan,
    is_sorted,
    is_sorted_list,
    plain_values_equal,
    relative_difference,
    restore_batch_dim,
    to_comparable,
)
from instep.structure.merge_messages import cannot_merge, depends_on_other_samples, no_rule_fits, wrong_weights
from instep.structure.merge_rules import (
    MergeContext,
    MergeRule,
    WeightedBy,
    applies_to,
    apply_rule,
    find_rule,
    is_weighable,
    reduces_samples,
)
from instep.structure.placements import Nested, PerSample, Ragged, Replicate, Shard
from instep.structure.shapes import format_values
from instep.structure.spec import AUTO, DimSpec
from instep.structure.split import merge_by_handler
from instep.structure.tree import NUMBER_TYPES, Path, flatten_one_level, is_sequence, tensors_in
from instep.structure.types import TypeHandler
from instep.structure.types_torch import handler_for
from instep.structure.verdicts import Undetermined, Verdict, partial_verdict
from instep.structure.weights import possible_weights


@dataclass(frozen=True)
class TrialOutputs:
    """Inputs and outputs of two parts and of the whole."""

    sizes: tuple[int, int]
    parts: tuple[Any, Any]
    whole: Any
    inputs: Sequence[Mapping[str, Any]]
    """Arguments by name, for both parts and the whole."""
    tolerance: float = 3e-4
    """Maximum difference between tensors, relative to the largest entry."""
    reduction_tolerance: float = 2e-5
    """The same for sums and means, which differ by less from each other."""
    compare_values: bool = True
    """Whether to compare values, or only shapes because `forward` draws random numbers or uses collectives."""
    criteria: Sequence[tuple[str, nn.Module]] = ()
    """Criteria of the module that compute a weighted mean, with their names."""


@dataclass
class Findings:
    """The results of a trial."""

    outputs: dict[Path, Verdict] = field(default_factory=dict)
    unresolved: set[Path] = field(default_factory=set)
    """Leaves whose values prove nothing, such as zeros or equal values. Another trial may resolve them."""
    errors: dict[Path, MergeError] = field(default_factory=dict)
    """Leaves that cannot be merged."""
    mismatched_integers: set[Path] = field(default_factory=set)
    """Integer leaves with a few differing entries, because of rounding or because samples depend on each other."""
    needs_reordering: set[Path] = field(default_factory=set)
    """Leaves to test with the samples in another order, such as sorted rows or zeros."""


@dataclass(frozen=True)
class UserRules:
    """The user's options for outputs. Leaves that they cover get no verdict."""

    path_rules: Mapping[str, MergeRule] = field(default_factory=dict)
    default_rule: MergeRule | None = None
    dim_spec: DimSpec = field(default_factory=lambda: DimSpec(AUTO, 0))


def max_rounding_mismatches(num_entries: int, tolerance: float) -> float:
    """The number of integer entries that may differ because of rounding, by the precision of the computation.

    None in float64, 1 in 200 in float32, 1 in 10 in lower precision.

    >>> [max_rounding_mismatches(num_entries, 3e-4) < 1 for num_entries in (30, 300)]
    [True, False]
    """
    if tolerance <= 1e-6:
        return 0.0
    return num_entries / 200 if tolerance <= 1e-3 else max(num_entries / 10, 1.0)


def judge(trial: TrialOutputs, user_rules: UserRules) -> Findings:
    """Derive verdicts from the values of a trial, or from the shapes if values cannot be compared."""
    visitor = _Judge(trial, user_rules)
    visitor.judge_node((*trial.parts, trial.whole), (), user_rules.dim_spec)
    return visitor.findings


class _Judge:
    def __init__(self, trial: TrialOutputs, user_rules: UserRules) -> None:
        self.trial, self.user_rules = trial, user_rules
        self.findings = Findings()
        first, second = trial.sizes
        self.sizes = (first, second, first + second)

    def judge_node(self, values: Sequence[Any], path: Path, spec: DimSpec) -> None:
        rules, types = self.user_rules, {type(value) for value in values}
        rule = find_rule(rules.path_rules, path)
        if isinstance(rule, WeightedBy):
            self._check_weights(rule, values, path)
        if rule is not None or not (spec.is_auto or not spec.is_uniform):
            return
        default = rules.default_rule
        if type(None) in types:
            return
        if default is not None and applies_to(default, values):
            if isinstance(default, WeightedBy):
                self._check_weights(default, values, path)
            if not reduces_samples(default, values, self.sizes):
                return
        handlers = [handler_for(value) for value in values]
        if any(handlers):
            if handlers[0] is not None and all(handler is handlers[0] for handler in handlers):
                self._judge_custom(values, handlers[0], path)
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

    def _check_weights(self, rule: WeightedBy, values: Sequence[Any], path: Path) -> None:
        """Check that the user's weights give the mean of the whole."""
        if not self.trial.compare_values or not all(map(is_weighable, values)):
            return
        if reduces_samples(rule, values, self.sizes):
            return
        try:
            context = MergeContext.create(self.trial.sizes, self.trial.parts, self.trial.inputs[:2])
            merged, whole = (torch.as_tensor(v) for v in (apply_rule(rule, values[:2], context, path), values[2]))
        except Exception:  # weights that cannot be computed: the call itself raises the error
            return
        if merged.shape != whole.shape or relative_difference(merged, whole) > self.trial.tolerance:
            self.findings.errors[path] = wrong_weights(path, merged, whole, self.trial.sizes)

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
        for key, child_spec in zip(keys, spec.children(keys, path), strict=True):
            self.judge_node([table[key] for table in tables], (*path, key), child_spec)

    def _judge_sequence(self, values: Sequence[Any], path: Path, spec: DimSpec) -> None:
        lengths = [len(value) for value in values]
        if len(set(lengths)) == 1:
            if lengths[0]:
                self._set_verdict(path, Verdict(Nested()))
            self._judge_children(values, path, spec)
            return
        is_minimal = self.sizes == (1, 1, 2)  # any list that is split in half fits
        if not spec.is_auto:
            return
        concatenated, whole = [*values[0], *values[1]], list(values[2])
        is_per_sample = tuple(lengths) == self.sizes
        if not self.trial.compare_values:
            if is_per_sample:
                self._set_verdict(path, Verdict(PerSample(), proven=False))
        elif len(concatenated) != len(whole) or not self._structures_close(concatenated, whole):
            why = f"lists of {lengths[:2]} entries in the parts and {lengths[2]} in the whole: not the same entries"
            self._set_dependence_error(path, why)
        else:
            self._set_verdict(
                path, Verdict(PerSample(), proven=not is_minimal) if is_per_sample else Verdict(Ragged(None))
            )
            if is_per_sample and is_sorted_list(whole):
                self.findings.needs_reordering.add(path)

    def _structures_close(self, left: Any, right: Any) -> bool:
        """Whether two structures are equal within tolerance. Tensors with a type handler are not compared."""
        left_tensors, right_tensors = list(tensors_in(left)), list(tensors_in(right))
        if len(left_tensors) != len(right_tensors):
            return False
        if any(handler_for(tensor) is not None for tensor in (*left_tensors, *right_tensors)):
            return True
        return all(
            a.shape == b.shape and self._tensors_close(a, b) for a, b in zip(left_tensors, right_tensors, strict=True)
        ) and plain_values_equal(left, right)

    def _tensors_close(self, left: Tensor, right: Tensor) -> bool:
        if left.dtype != right.dtype:
            return False
        if left.is_floating_point() or left.is_complex():
            return relative_difference(left, right) <= self.trial.tolerance or self._is_rounding_noise(left, right)
        return float((left != right).sum()) <= max_rounding_mismatches(left.numel(), self.trial.tolerance)

    def _is_rounding_noise(self, *values: Tensor) -> bool:
        """Whether all values are small enough to be rounding errors of values near 1."""
        return all(not v.numel() or float(v.abs().max()) <= self.trial.tolerance / 100 for v in values)

    def _judge_custom(self, values: Sequence[Any], handler: TypeHandler, path: Path) -> None:
        """Check that the type handler merges the parts into the tensors of the whole."""
        try:
            if not self.trial.compare_values or [handler.size(value) for value in values] != list(self.sizes):
                return
            merged, whole = list(tensors_in(merge_by_handler(handler, list(values[:2])))), list(tensors_in(values[2]))
        except InstepError as error:  # the handler cannot locate the samples
            self.findings.errors[path] = cannot_merge(path, values[:2], str(error), self.trial.sizes)
            return
        if any(handler_for(tensor) is not None for tensor in (*merged, *whole)) or len(merged) != len(whole):
            return
        pairs = list(zip(merged, whole, strict=True))
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
                self._set_dependence_error(path, _describe_shapes(values))
            return
        batch_dims = [
            dim for dim in range(whole.ndim) if all(s[dim] == size for s, size in zip(shapes, self.sizes, strict=True))
        ]
        if len(batch_dims) > 1:
            if self.trial.compare_values:
                self._set_dependence_error(path, f"its dims {batch_dims[0]} and {batch_dims[1]} both follow the batch")
        elif batch_dims:
            self._judge_shard(parts, batch_dims[0], path)
        elif self.trial.compare_values:
            self._judge_selected_rows(parts, path)

    def _judge_shard(self, parts: Sequence[Tensor], dim: int, path: Path) -> None:
        whole = parts[2]
        shapes = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        if not self.trial.compare_values:
            self._set_verdict(path, Verdict(Shard(dim), proven=False, rank=whole.ndim))
        elif len(set(shapes)) == 1:  # else padded to the longest sample; decided by the shapes of each call
            concatenated = torch.cat(list(parts[:2]), dim)
            if not self._tensors_close(concatenated, whole):
                self._set_dependence_error(
                    path, "its entries depend on other samples of the batch" + describe_difference(concatenated, whole)
                )
                return
            first = whole.narrow(dim, 0, 1)
            all_equal = bool(((whole == first) | (whole.isnan() & first.isnan())).all())
            is_float = whole.is_floating_point() or whole.is_complex()
            proven = (
                not self._is_rounding_noise(whole) if is_float else torch.equal(concatenated, whole)
            ) and not is_sorted(whole)
            proven = proven and not all_equal
            if not is_float and not torch.equal(concatenated, whole):
                self.findings.mismatched_integers.add(path)
            elif (is_sorted(whole) or (is_float and whole.ndim > 1)) and not all_equal:
                self.findings.needs_reordering.add(path)  # forward may have sorted the rows
            self._set_verdict(path, Verdict(Shard(dim), proven, rank=whole.ndim))

    def _judge_selected_rows(self, parts: Sequence[Tensor], path: Path) -> None:
        """No dim has the batch size. Accept rows that were selected per sample: the parts concatenate to the whole."""
        whole = parts[2]
        for dim in range(whole.ndim):
            shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
            if len(shapes) == 1 and parts[0].shape[dim] + parts[1].shape[dim] == whole.shape[dim]:
                if not (parts[0].numel() and parts[1].numel()) or is_sorted(whole):
                    self._set_verdict(path, Verdict(Ragged(dim), proven=False))
                    return
                if self._tensors_close(torch.cat(list(parts[:2]), dim), whole):
                    self._set_verdict(path, Verdict(Ragged(dim)))
                    return
        self._set_dependence_error(path, _describe_shapes(parts))

    def _judge_strings(self, values: Sequence[Any], path: Path) -> None:
        if all(value == values[0] for value in values):
            self._set_verdict(path, Verdict(Replicate()))
        elif self.trial.compare_values:
            why = f"a string that differs ({format_values(values)})"
            self.findings.errors[path] = no_rule_fits(path, values[:2], why, self.trial.sizes)

    def _judge_numbers(self, values: Sequence[Any], path: Path) -> None:
        if isinstance(values[0], (bool, np.bool_)) or all(isinstance(value, (int, np.integer)) for value in values):
            self._judge_fixed_shape([torch.tensor(value) for value in values], path)
        else:
            # A float from `.item()` has the precision of its tensor; `tolerance` accounts for it.
            self._judge_fixed_shape([torch.tensor(value, dtype=torch.float64) for value in map(float, values)], path)

    def _judge_fixed_shape(self, values: Sequence[Tensor], path: Path) -> None:
        """The shape does not depend on the number of samples: a constant, a sum or a mean."""
        if not self.trial.compare_values:
            return
        first, second, whole = values
        if equal_or_nan(first, whole) and equal_or_nan(second, whole):
            if bool((whole != 0).any()) and not bool(whole.isnan().any()):
                self._set_verdict(path, Verdict(Replicate(), proven=False))
                return
            self._set_verdict(path, Verdict(Undetermined(), proven=False))
            if not whole.is_floating_point():  # may be an argmax over samples
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
            self._set_verdict(path, Verdict(Undetermined(all_zero=False), proven=False))
            return
        verdict, error = self._fit_reduction(values)
        if verdict is not None:
            self._set_verdict(path, verdict)
        elif error <= self.trial.reduction_tolerance:  # a rule fits, but the parts are too close to prove it
            self._set_verdict(path, Verdict(Undetermined(all_zero=False), proven=False))
        else:
            self._set_unexplained_error(values, path)

    def _judge_nan_part(self, values: Sequence[Tensor], finite: Sequence[bool], path: Path) -> None:
        """A part is NaN and the whole is finite. Accept weighted means in which the NaN part has weight 0."""
        finite_parts = [values[index] for index in (0, 1) if finite[index]]
        fits = bool(finite_parts) and relative_difference(finite_parts[0], values[2]) <= self.trial.reduction_tolerance
        rules = [
            WeightedBy(weight)
            for weight, *part_weights in possible_weights(self.trial.inputs, self.sizes, self.trial.criteria)
            if fits
            and all(
                bool(part_weight) == is_finite for part_weight, is_finite in zip(part_weights, finite, strict=False)
            )
        ]
        if rules:
            self._set_verdict(path, partial_verdict(rules, proven=False))
        else:
            self._set_unexplained_error(values, path)

    def _judge_integers(self, values: Sequence[Tensor], path: Path) -> None:
        """Integers: a sum, proven only if both parts are nonzero."""
        first, second, whole = values
        if whole.dtype is torch.bool or not torch.equal(first + second, whole):
            self._set_unexplained_error(values, path)
        elif bool(((first != 0) & (second != 0)).any()):
            self._set_verdict(path, partial_verdict(["sum"]))
        else:  # may also be a max or an argmax
            self._set_verdict(path, Verdict(Undetermined(all_zero=False), proven=False))
            self.findings.needs_reordering.add(path)

    def _set_unexplained_error(self, values: Sequence[Tensor], path: Path) -> None:
        self.findings.errors[path] = unexplained_error(values, path, self.trial.sizes)

    def _fit_reduction(self, values: Sequence[Tensor]) -> tuple[Verdict | None, float]:
        """The rules that compute the whole from the parts, and the relative error of the best one.

        A rule proves nothing unless its error is much smaller than the difference between the parts.
        """
        first, second, whole = [value.to(torch.complex128 if value.is_complex() else torch.float64) for value in values]
        scale = max(float(value.abs().max()) for value in (first, second, whole))
        tolerance = self.trial.reduction_tolerance
        distance = float((first - second).abs().max()) / scale

        def relative_error(merged: Tensor) -> float:
            return float((merged - whole).abs().max()) / scale

        is_sum = relative_error(first + second) <= tolerance
        first_size, second_size, _ = self.sizes
        errors: dict[MergeRule, float] = {
            "mean": relative_error((first_size * first + second_size * second) / (first_size + second_size))
        }
        single_part_error = float("inf")
        for weight, first_weight, second_weight in possible_weights(self.trial.inputs, self.sizes, self.trial.criteria):
            error = relative_error((first_weight * first + second_weight * second) / (first_weight + second_weight))
            if first_weight and second_weight:
                errors[WeightedBy(weight)] = error
            else:  # the whole equals one part, which a max would give too
                single_part_error = min(single_part_error, error)
        best_error = min(errors.values())
        if is_sum:  # not proven if a part may be zero with weight zero
            return (None, 0.0) if min(best_error, single_part_error) <= tolerance else (partial_verdict(["sum"]), 0.0)
        if single_part_error <= tolerance < best_error:
            return None, single_part_error
        if best_error > tolerance or 20 * best_error > distance:
            return None, best_error
        fitting = [rule for rule, error in errors.items() if error <= max(8 * best_error, tolerance / 50)]
        return partial_verdict(fitting), best_error


def unexplained_error(values: Sequence[Tensor], path: Path, sizes: Sequence[int]) -> MergeError:
    """The error for values of parts and whole that no rule explains."""
    *parts, whole = values
    scalars = whole.ndim == 0
    values_text = f" ({format_values(parts)} in the parts, {format_values([whole])} in the whole)" if scalars else ""
    description = "a value" if scalars else f"a tensor of shape {list(whole.shape)}"
    why = f"{description} that differs between parts and whole{values_text}"
    return no_rule_fits(path, parts, why, sizes)


def _describe_shapes(values: Sequence[Tensor]) -> str:
    """The shapes of both parts and of the whole, for a message."""
    first, second, whole = (list(value.shape) for value in values)
    return f"its shapes are {first} and {second} in the parts and {whole} in the whole"
