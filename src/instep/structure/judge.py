"""From what a few samples give in two parts, and what they give together, to a verdict for every output.

Pure: it is handed the outputs. A leaf that the user named, by a rule or by `out_dims`, is not judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import InstepError, MergeError
from instep.structure.company import flips
from instep.structure.compare import apart as how_far
from instep.structure.compare import by_how_much, in_order, is_sorted, ordinary, plain_alike, same, unsqueezed
from instep.structure.dims import AUTO, Declared
from instep.structure.fit import NUMBERS, own_kind
from instep.structure.joining import join_by_kind
from instep.structure.merge_messages import across_samples, cannot_merge, unexplained
from instep.structure.rules import Rule, WeightedBy, rule_for, speaks_of
from instep.structure.shapes import few
from instep.structure.tree import Path, is_sequence, open_node, tensors_in
from instep.structure.types import Kind
from instep.structure.verdicts import Constant, Joined, Listed, Reading, Reduced, Unclear, Verdict
from instep.structure.weights import counts_in, weights_of


@dataclass(frozen=True)
class Trial:
    """A few samples in two parts and together: what went in and what came out."""

    sizes: tuple[int, int]
    parts: tuple[Any, Any]
    whole: Any
    inputs: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
    """The arguments by name, of both parts and of the whole."""
    tolerance: float = 3e-4
    """How far entries of a tensor may be apart, relative to the largest."""
    fine: float = 2e-5
    """The same for sums and means, which are told apart by little."""
    numbers: bool = True
    """Whether values count; where numbers are drawn, or samples meet by a collective, only shapes do."""
    criteria: Sequence[tuple[str, nn.Module]] = ()
    """Losses inside the module whose means are over weights, by name."""


@dataclass
class Findings:
    """What a trial showed."""

    found: dict[Path, Verdict] = field(default_factory=dict)
    open: set[Path] = field(default_factory=set)
    """Leaves of which the numbers proved nothing: zeros, equal values. They are worth another trial."""
    errors: dict[Path, MergeError] = field(default_factory=dict)
    """Leaves that no rule explains."""
    turned: set[Path] = field(default_factory=set)
    """Joined integers of which a few differ: rounding, or samples that meet."""
    ordered: set[Path] = field(default_factory=set)
    """Leaves that were in order already, or nothing but zeros: samples in another order may tell more."""


@dataclass(frozen=True)
class Named:
    """What the user said about outputs."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    general: Rule | None = None
    declared: Declared = field(default_factory=lambda: Declared(AUTO, 0))


def judge(trial: Trial, named: Named) -> Findings:
    """A verdict for every output of a trial that the numbers, or else the shapes, speak of."""
    judging = _Judging(trial, named)
    judging.node((*trial.parts, trial.whole), (), named.declared)
    return judging.findings


class _Judging:
    def __init__(self, trial: Trial, named: Named) -> None:
        self.trial, self.named = trial, named
        self.findings = Findings()
        a, b = trial.sizes
        self.sizes = (a, b, a + b)

    def node(self, values: Sequence[Any], path: Path, spec: Declared) -> None:
        named, types = self.named, {type(value) for value in values}
        if rule_for(named.rules, path) is not None or not (spec.auto or not spec.is_plain):
            return
        if type(None) in types or (named.general is not None and speaks_of(named.general, values)):
            return
        kinds = [own_kind(value) for value in values]
        if any(kinds):
            if kinds[0] is not None and all(kind is kinds[0] for kind in kinds):
                self._kind(values, kinds[0], path)
        elif all(isinstance(value, Tensor) for value in values):
            self._tensors(values, path)
        elif all(isinstance(value, np.ndarray) and value.dtype.kind in "biufc" for value in values):
            self._tensors([torch.from_numpy(value.copy()) for value in values], path)
        elif all(isinstance(value, NUMBERS) for value in values):
            self._numbers(values, path)
        elif len(types) == 1 and isinstance(values[0], (str, bytes)):
            self._strings(values, path)
        elif len(types) == 1 and is_sequence(values[0]):
            self._sequence(values, path, spec)
        elif len(types) == 1:
            self._inside(values, path, spec)

    def _say(self, path: Path, verdict: Verdict) -> None:
        self.findings.found[path] = verdict
        if not verdict.proven and self.trial.numbers:
            self.findings.open.add(path)

    def _inside(self, values: Sequence[Any], path: Path, spec: Declared) -> None:
        if isinstance(values[0], torch.Size):
            for key, numbers in enumerate(zip(*values, strict=True)):
                self._numbers(numbers, (*path, key))
            return
        nodes = [node for node in map(open_node, values) if node is not None]
        if len(nodes) < 3 or any(set(node.keys) != set(nodes[0].keys) for node in nodes):
            return
        tables = [dict(zip(node.keys, node.children, strict=True)) for node in nodes]
        keys = tuple(nodes[0].keys)
        for key, below in zip(keys, spec.children(keys, path), strict=True):
            self.node([table[key] for table in tables], (*path, key), below)

    def _sequence(self, values: Sequence[Any], path: Path, spec: Declared) -> None:
        lengths = [len(value) for value in values]
        if len(set(lengths)) == 1:
            if lengths[0]:
                self._say(path, Reading(samples=False))
            self._inside(values, path, spec)
            return
        few_samples = self.sizes == (1, 1, 2)  # as is anything cut in half
        if not spec.auto:
            return
        joined, whole = [*values[0], *values[1]], list(values[2])
        as_samples = tuple(lengths) == self.sizes
        if not self.trial.numbers:
            if as_samples:
                self._say(path, Reading(samples=True, proven=False))
        elif len(joined) != len(whole) or not self._alike(joined, whole):
            why = f"lists of {lengths[:2]} entries apart and {lengths[2]} together, which are not the same entries"
            self._across(path, why)
        else:
            self._say(path, Reading(samples=True, proven=not few_samples) if as_samples else Listed(None))
            if as_samples and in_order(whole):
                self.findings.ordered.add(path)

    def _alike(self, left: Any, right: Any) -> bool:
        """Whether two structures hold the same, as far as it can be compared."""
        one, two = list(tensors_in(left)), list(tensors_in(right))
        if len(one) != len(two):
            return False
        if any(own_kind(tensor) is not None for tensor in (*one, *two)):
            return True
        return all(a.shape == b.shape and self._close(a, b) for a, b in zip(one, two, strict=True)) and plain_alike(
            left, right
        )

    def _close(self, left: Tensor, right: Tensor) -> bool:
        if left.dtype != right.dtype:
            return False
        if left.is_floating_point() or left.is_complex():
            return how_far(left, right) <= self.trial.tolerance or self._is_tiny(left, right)
        return float((left != right).sum()) <= flips(left.numel(), self.trial.tolerance)

    def _is_tiny(self, *values: Tensor) -> bool:
        """Whether there is nothing but what rounding leaves of numbers of ordinary size."""
        return all(not v.numel() or float(v.abs().max()) <= self.trial.tolerance / 100 for v in values)

    def _kind(self, values: Sequence[Any], kind: Kind, path: Path) -> None:
        """A type with its own rule: what it makes of the parts has to hold the tensors of the whole."""
        try:
            if not self.trial.numbers or [kind.size(value) for value in values] != list(self.sizes):
                return
            joined, whole = list(tensors_in(join_by_kind(kind, list(values[:2])))), list(tensors_in(values[2]))
        except InstepError as error:  # it does not know where its value stood
            self.findings.errors[path] = cannot_merge(path, values[:2], str(error), self.trial.sizes)
            return
        if any(own_kind(tensor) is not None for tensor in (*joined, *whole)) or len(joined) != len(whole):
            return
        pairs = list(zip(joined, whole, strict=True))
        if all(a.shape == b.shape for a, b in pairs) and not all(self._close(a, b) for a, b in pairs):
            self._across(path, "its values depend on other samples of the batch")

    def _across(self, path: Path, why: str) -> None:
        self.findings.errors[path] = across_samples(path, why, self.trial.sizes)

    def _tensors(self, values: Sequence[Tensor], path: Path) -> None:
        if len({value.dtype for value in values}) > 1 or any(v.is_quantized or v.is_meta for v in values):
            return
        values = [ordinary(value) for value in values]
        whole = values[2]
        parts = unsqueezed(values, self.sizes)
        shapes = [tuple(part.shape) for part in parts]
        if len(set(shapes)) == 1:
            self._reduced(parts, path)
            return
        if len({len(shape) for shape in shapes}) > 1:
            if self.trial.numbers:
                shown = [list(value.shape) for value in values]
                self._across(path, f"its shapes are {shown[0]} and {shown[1]} apart, {shown[2]} together")
            return
        following = [
            dim for dim in range(whole.ndim) if all(s[dim] == size for s, size in zip(shapes, self.sizes, strict=True))
        ]
        if len(following) > 1:
            if self.trial.numbers:
                self._across(path, f"its dims {following[0]} and {following[1]} both follow the batch")
        elif following:
            self._joined(parts, following[0], path)
        elif self.trial.numbers:
            self._selected(parts, path)

    def _joined(self, parts: Sequence[Tensor], dim: int, path: Path) -> None:
        whole = parts[2]
        shapes = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        if not self.trial.numbers:
            self._say(path, Joined(whole.ndim, dim, proven=False))
        elif len(set(shapes)) == 1:  # else padded to the longest: what the shapes of a call say decides
            together = torch.cat(list(parts[:2]), dim)
            if not self._close(together, whole):
                self._across(path, "its entries depend on other samples of the batch" + by_how_much(together, whole))
                return
            first = whole.narrow(dim, 0, 1)
            alike = bool(((whole == first) | (whole.isnan() & first.isnan())).all())
            real = whole.is_floating_point() or whole.is_complex()
            sure = (not self._is_tiny(whole) if real else torch.equal(together, whole)) and not is_sorted(whole)
            sure = sure and not alike
            if not real and not torch.equal(together, whole):
                self.findings.turned.add(path)
            elif (is_sorted(whole) or (real and whole.ndim > 1)) and not alike:
                self.findings.ordered.add(path)  # rows may be in the order that forward brings them into
            self._say(path, Joined(whole.ndim, dim, proven=sure))

    def _selected(self, parts: Sequence[Tensor], path: Path) -> None:
        """Lengths that do not follow the batch: rows that were selected follow one another, else nothing is known."""
        whole = parts[2]
        for dim in range(whole.ndim):
            shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
            if len(shapes) == 1 and parts[0].shape[dim] + parts[1].shape[dim] == whole.shape[dim]:
                if not (parts[0].numel() and parts[1].numel()) or is_sorted(whole):
                    self._say(path, Listed(dim, proven=False))
                    return
                if self._close(torch.cat(list(parts[:2]), dim), whole):
                    self._say(path, Listed(dim))
                    return
        shown = [list(part.shape) for part in parts]
        why = f"its shapes are {shown[0]} and {shown[1]} apart, {shown[2]} together"
        self._across(path, why)

    def _strings(self, values: Sequence[Any], path: Path) -> None:
        if all(value == values[0] for value in values):
            self._say(path, Constant(proven=True))
        elif self.trial.numbers:
            why = f"a string that differs ({few(values)})"
            self.findings.errors[path] = unexplained(path, values[:2], why, self.trial.sizes, ())

    def _numbers(self, values: Sequence[Any], path: Path) -> None:
        if isinstance(values[0], (bool, np.bool_)) or all(isinstance(value, (int, np.integer)) for value in values):
            self._reduced([torch.tensor(value) for value in values], path)
        else:
            # What `.item()` gave has the precision of the tensor it came from.
            self._reduced([torch.tensor(value, dtype=torch.float64) for value in map(float, values)], path)

    def _reduced(self, values: Sequence[Tensor], path: Path) -> None:
        """Equal shapes whatever the number of samples: a constant, a sum or a mean."""
        if not self.trial.numbers:
            return
        first, second, whole = values
        if same(first, whole) and same(second, whole):
            if bool((whole != 0).any()) and not bool(whole.isnan().any()):
                self._say(path, Constant())
                return
            self._say(path, Unclear())
            if not whole.is_floating_point():  # the largest of some samples may be the first, and so number 0
                self.findings.ordered.add(path)
            return
        if not (whole.is_floating_point() or whole.is_complex()):
            self._counted(values, path)
            return
        finite = [bool(value.isfinite().all()) for value in values]
        if finite[2] and not all(finite):
            self._beside_nothing(values, finite, path)
            return
        if not all(finite) or self._is_tiny(*values):
            self._say(path, Unclear(zeros=False))
            return
        verdict, off = self._mean_or_sum(values)
        if verdict is not None:
            self._say(path, verdict)
        elif off <= self.trial.fine:  # it fits, but everything is too close together to prove anything
            self._say(path, Unclear(zeros=False))
        else:
            self._give_up(values, path)

    def _beside_nothing(self, values: Sequence[Tensor], finite: Sequence[bool], path: Path) -> None:
        """A part is NaN and the whole is not: a mean in which that part weighs nothing, or no mean at all."""
        there = [values[index] for index in (0, 1) if finite[index]]
        fits = bool(there) and how_far(there[0], values[2]) <= self.trial.fine
        rules = [
            WeightedBy(weight)
            for weight, *shares in weights_of(self.trial.inputs, self.sizes, self.trial.criteria)
            if fits and all(bool(share) == known for share, known in zip(shares, finite, strict=False))
        ]
        if rules:
            self._say(path, Reduced(tuple(rules), proven=False))
        else:
            self._give_up(values, path)

    def _counted(self, values: Sequence[Tensor], path: Path) -> None:
        """Integers: a sum, if both parts have something to add."""
        first, second, whole = values
        if whole.dtype is torch.bool or not torch.equal(first + second, whole):
            self._give_up(values, path)
        elif bool(((first != 0) & (second != 0)).any()):
            self._say(path, Reduced(("sum",)))
        else:  # or the largest of both, or where the largest is
            self._say(path, Unclear(zeros=False))
            self.findings.ordered.add(path)

    def _give_up(self, values: Sequence[Tensor], path: Path) -> None:
        scalars = all(value.ndim == 0 for value in values)
        shown = f" ({few(values[:2])} apart, {few(values[2:])} together)" if scalars else ""
        what = "a value" if scalars else f"a tensor of shape {list(values[0].shape)}"
        hints = [count.line for count in counts_in(self.trial.inputs[2], self.sizes[2])] if scalars else []
        why = f"{what} that differs between parts and whole{shown}"
        self.findings.errors[path] = unexplained(path, values[:2], why, self.trial.sizes, hints)

    def _mean_or_sum(self, values: Sequence[Tensor]) -> tuple[Reduced | None, float]:
        """The rules that make the whole of the parts, and how far off the best one is.

        It has to fit much better than the parts are apart, or it proves nothing.
        """
        first, second, whole = [value.to(torch.complex128 if value.is_complex() else torch.float64) for value in values]
        scale = max(float(value.abs().max()) for value in (first, second, whole))
        tolerance = self.trial.fine
        apart = float((first - second).abs().max()) / scale

        def off(guess: Tensor) -> float:
            return float((guess - whole).abs().max()) / scale

        adds_up = off(first + second) <= tolerance
        a, b, _ = self.sizes
        errors: dict[Rule, float] = {"mean": off((a * first + b * second) / (a + b))}
        alone = float("inf")
        for weight, one, two in weights_of(self.trial.inputs, self.sizes, self.trial.criteria):
            error = off((one * first + two * second) / (one + two))
            if one and two:
                errors[WeightedBy(weight)] = error
            else:  # the whole is what one part gave: so it is with the larger of two as well
                alone = min(alone, error)
        best = min(errors.values())
        if adds_up:  # unless one part is nothing, and weighs nothing
            return (None, 0.0) if min(best, alone) <= tolerance else (Reduced(("sum",)), 0.0)
        if alone <= tolerance < best:
            return None, alone
        if best > tolerance or 20 * best > apart:
            return None, best
        near = tuple(rule for rule, error in errors.items() if error <= max(8 * best, tolerance / 50))
        return Reduced(near, proven=len(near) == 1), best
