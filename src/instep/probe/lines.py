"""Tries merge and state rules on samples of a call. An error offers only those that give the value of the whole batch.

Rules are tried on several windows of samples, with parts of different sizes. Later windows start from the state that
the first one left, as a second call would. This distinguishes an attribute that `forward` assigns, which is merged like
an output, from one that it adds to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.errors import InstepError, MergeError, StateError
from instep.probe.possible_lines import Arguments, evaluate, output_lines, state_lines
from instep.probe.sandbox import RunResult, TrialFailed
from instep.probe.tolerance import tolerances
from instep.probe.trial import PartInputs, Trial
from instep.replicas.diff import MISSING
from instep.replicas.object_graph import Contents, read_contents
from instep.replicas.state.containers import merge_contents
from instep.replicas.state.merge import StateMerger
from instep.replicas.state.rules import builtin_rule
from instep.structure.compare import relative_difference, to_comparable
from instep.structure.merge import Merger
from instep.structure.merge_messages import INTERACTION_ADVICE
from instep.structure.merge_rules import MergeContext, WeightedBy, apply_rule, get_by_dotted_path
from instep.structure.placements import Shard
from instep.structure.problems import Line, Problem, set_problems
from instep.structure.shapes import is_integer
from instep.structure.spec import AUTO
from instep.structure.tree import NUMBER_TYPES, flatten_one_level, format_path
from instep.structure.verdicts import Verdicts

_MAX_LINES = 3
"""The number of `weighted_by` lines shown for one problem."""
_MAX_WINDOWS = 24
_MAX_POINTERS = 12
"""The number of values from which an integer attribute is tried."""
_MAX_STARTS = 12
"""The number of steps in which a distinguishing window is searched."""
_MIN_TOLERANCE = 2e-6
_RULE_FAILURES = (InstepError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


class Window(NamedTuple):
    """The arguments and results of the parts and the whole, for a window of samples."""

    sizes: tuple[int, ...]
    inputs: PartInputs
    runs: Sequence[RunResult]
    tolerance: float
    state: Mapping[str, Any]
    """Attributes that the runs started from instead of those of the module."""


class Values(NamedTuple):
    """The values of one output or attribute in a window."""

    old: Any
    parts: list[Any]
    whole: Any


def add_tried_lines(error: MergeError | StateError, trial: Trial, state_merger: StateMerger) -> None:
    """Add the lines that solve the problems of an error to its message.

    A `MergeError` also gets the problems of attributes, which would be the next error.
    """
    if error.problems and trial.can_run:
        try:
            with trial.open_sandbox():
                _LineTrials(trial, state_merger).add_lines(error)
        except TrialFailed:  # the module cannot be copied: the message keeps its general advice
            return


class _LineTrials:
    """Windows of samples of one call, on which lines are tried."""

    def __init__(self, trial: Trial, state_merger: StateMerger) -> None:
        self.trial, self.state_merger = trial, state_merger
        self.module, self.dim = trial.call.module, trial.user_rules.dim_spec.batch_dim
        self.windows: list[Window] = []
        self.small, self.large = trial.part_sizes(), trial.part_sizes(large=True)
        self.state: dict[str, Any] = {}
        """Attributes after the first window."""

    def add_lines(self, error: MergeError | StateError) -> None:
        """Add lines to all problems of an error. Runs in double precision, unless `forward` fails in it."""
        with ExitStack() as stack:
            stack.enter_context(self.trial.sandbox.in_double_precision())
            if not self._observe_first():
                stack.close()
                self._observe_first()
            problems: list[Problem] = list(error.problems)
            if isinstance(error, MergeError) and self.windows and self.trial.check is None:
                problems += self._predict_problems({problem.name for problem in problems})
            if self.windows:
                self._observe_more([problem.name for problem in problems if problem.keyword == "state"])
            set_problems(error, [self._solve(problem) for problem in problems], self._all_names())

    # Windows

    def _observe_first(self) -> bool:
        """Run the first samples, in the first mode in which `forward` does not fail."""
        for sizes in self.trial.modes():
            if self._observe(sizes, 0):
                self.small, self.large = sizes, self.trial.part_sizes(large=True)
                return True
            if self.trial.incomparable_reasons:
                return False
        return False

    def _observe_more(self, state_names: Sequence[str]) -> None:
        """Run the first samples again from the state that they left, then other samples and larger parts."""
        for name in state_names:
            old, _, whole = self._state_values(name, self.windows[0])
            if not self._is_filled_container(name, whole) and whole is not MISSING and old is not whole:
                self.state[name] = whole
        batch = self.trial.batch_size
        windows = [
            (self.small[::-1], batch - sum(self.small)),
            (self.large, 0),
            (self.large[::-1], batch - sum(self.large)),
        ]
        if self.state:
            windows.insert(0, (self.small, 0))
        for sizes, start in windows:
            self._observe(sizes, start)
        for many in self.trial.many_part_sizes()[-1:]:
            self._observe(many, 0)
        for name in state_names:
            for value in self._values_before_wrapping(name):
                self._observe(self.small, 0, {name: value})

    def _values_before_wrapping(self, name: str) -> list[Any]:
        """Values from which a pointer into a buffer, `(ptr + len(x)) % size`, starts again at 0 in the whole."""
        if self.trial.sandbox.device.type != "cpu":
            return []  # an index that is out of bounds would end the CUDA context
        old = self._state_values(name, self.windows[0]).old
        is_pointer = isinstance(old, Tensor) and is_integer(old) and old.numel() == 1
        if not is_pointer and type(old) is not int:
            return []
        modules = list(self.module.modules())
        tensors = [*self.module.buffers(), *self.module.parameters()]
        sizes = [value for module in modules for value in vars(module).values() if type(value) is int]
        sizes += [int(size) for tensor in tensors for size in tensor.shape]
        starts = [size - sum(self.small) for size in dict.fromkeys(sizes)]
        found = [start for start in starts if start > 0][:_MAX_POINTERS]
        return [torch.full_like(old, start) for start in found] if isinstance(old, Tensor) else found

    def _observe(self, sizes: tuple[int, ...], start: int, before: Mapping[str, Any] | None = None) -> bool:
        """Run one window from the state `before`, by default from that of the first window.

        That state is left out if `forward` fails with it (other batch sizes).
        """
        for state in [before] if before is not None else [self.state, {}] if self.state else [{}]:
            observed = self.trial.observe(sizes, start, state)
            for inputs, runs in observed:
                tolerance = tolerances(self.trial.sandbox, {}, [(run.output, run.attributes) for run in runs])[1]
                self.windows.append(Window(sizes, inputs, runs, max(tolerance, _MIN_TOLERANCE), state))
            if observed:
                return True
        return False

    def _values(self, problem: Problem, window: Window) -> Values:
        """The values of the output or attribute of a problem."""
        name = problem.name
        if problem.keyword == "state":
            return self._state_values(name, window)
        outputs = [get_by_dotted_path(name, run.output) if name else run.output for run in window.runs]
        return Values(None, outputs[:-1], outputs[-1])

    def _state_values(self, name: str, window: Window) -> Values:
        old = window.state[name] if name in window.state else self.trial.sandbox.read(name, MISSING)
        values = [run.value_of(name, old) for run in window.runs]
        return Values(old, values[:-1], values[-1])

    def _reads_old(self, name: str, whole: Any) -> bool:
        """Whether the new value of an attribute depends on its old one."""
        if self._is_filled_container(name, whole):
            return True
        return self.trial.reads_attribute(self.small, 0, name, whole, in_place=self._in_place(name))

    def _all_names(self) -> set[str]:
        """The names of all outputs and changed attributes."""
        runs = self.windows[0].runs if self.windows else ()
        names = {format_path(path) for run in runs[2:] for path in _leaf_paths(run.output)}
        return names.union(*((*run.attributes, *run.changes) for run in runs))

    # Problems

    def _predict_problems(self, known: set[str]) -> list[Problem]:
        """Further problems of the call, which would be the next errors: of outputs in larger parts, of attributes."""
        found: list[Problem] = []
        attributes: dict[str, Verdicts] = {}
        for sizes in dict.fromkeys((self.small, self.large)):
            findings, verdicts = self.trial.judge_first_samples(sizes)
            attributes.update(verdicts)
            found += [problem for error in findings.errors.values() for problem in error.problems]
        return [p for p in found if p.name not in known] + self._predict_state_problems(attributes)

    def _predict_state_problems(self, attributes: Mapping[str, Verdicts]) -> list[Problem]:
        """Problems of the attributes that differ between parts, have no rule, and are no outputs that can be merged."""
        window, merger = self.windows[0], self.state_merger
        policy = replace(merger, mergers={}, list_growth={}, on_unmerged="error")
        policy.verdicts, policy.unmergeable, policy.sample_dependent = attributes, self.trial.unmergeable, ()
        for name in dict.fromkeys(name for run in window.runs for name in (*run.attributes, *run.changes)):
            path = self.trial.sandbox.path_of(name)
            if name in attributes or merger.state_rule(path) is not None:
                continue
            if name not in self.trial.unmergeable and (not self._in_place(name) or self._has_layer_rule(name)):
                continue
            old, parts, _ = self._state_values(name, window)
            if not self._is_filled_container(name, old) and not any(part is MISSING for part in parts):
                with suppress(InstepError):  # the call raises it when it merges its state
                    policy.merge_value(path, old, parts, window.sizes)
        return policy.problems

    def _in_place(self, name: str) -> bool:
        """Whether `forward` changes an attribute in place, and never assigns it."""
        return not any(name in run.attributes for run in self.windows[0].runs)

    def _is_filled_container(self, name: str, value: Any) -> bool:
        """Whether an attribute is a container to which `forward` adds entries."""
        return self._in_place(name) and isinstance(value, (list, deque, set))

    def _has_layer_rule(self, name: str) -> bool:
        owner, _, key = name.rpartition(".")
        modules = dict(self.module.named_modules())
        default = self.state_merger.default_rule
        if builtin_rule(modules.get(owner), key) is not None:
            return True
        return default is not None and default(self.module, name) is not None

    def _sequences(self) -> set[str]:
        """The arguments with the samples in dim 1: sequences `[T, B]`."""
        pairs = zip(self.trial.plan.names, self.trial.plan.placements, strict=True)
        return {name for name, placement in pairs if isinstance(placement, Shard) and placement.dim == 1}

    def _solve(self, problem: Problem) -> Problem:
        """The problem with the lines that solve it, or with what to do if there is none."""
        is_state = problem.keyword == "state"
        if not self.windows:
            reasons = dict.fromkeys(self.trial.incomparable_reasons) or ["forward fails on a part of the batch"]
            return replace(problem, note=(f"No rule could be tried, because {', '.join(reasons)}.", *problem.advice))
        whole = self._values(problem, self.windows[0]).whole
        if whole is None or whole is MISSING or not problem.can_try:
            return problem
        outputs = self.windows[0].runs[2].output
        arguments = Arguments(self.trial.inputs, self.trial.batch_size, self._sequences())
        lines = list(output_lines(whole, problem.name, outputs, arguments, self.module))
        if is_state and self._reads_old(problem.name, whole):
            lines = [*state_lines(whole), *lines]
        elif is_state:
            lines += state_lines(whole)
        lines = self._fitting(lines, problem)
        if not lines:
            return replace(problem, note=_no_line(problem, whole))
        if not is_state and self.trial.method != "forward":
            lines = [line._replace(method=self.trial.method) for line in lines]
        if "weighted_by" not in lines[0].rule:
            return replace(problem, lines=tuple(lines[:1]))
        return replace(problem, lines=tuple(line for line in lines if "weighted_by" in line.rule)[:_MAX_LINES])

    def _fitting(self, lines: list[Line], problem: Problem) -> list[Line]:
        """The lines that give the value of the whole in every window, and in further ones that distinguish them."""
        rules = {line: evaluate(line.rule, self.module) for line in dict.fromkeys(lines)}
        tried = 0
        for window in self.windows:
            tried += self._discard(rules, problem, window)
        while tried and len(self.windows) < _MAX_WINDOWS and (place := self._distinguishing_window(rules)) is not None:
            count = len(self.windows)
            if not self._observe(*place):
                break
            for window in self.windows[count:]:
                self._discard(rules, problem, window)
        return list(rules) if tried else []

    def _discard(self, rules: dict[Line, Any], problem: Problem, window: Window) -> bool:
        """Remove the rules that do not fit a window. Returns whether any rule was tested."""
        values = self._values(problem, window)
        if not _is_informative(values, window.tolerance):
            return False
        # Single samples may lack a dim: many parts test only rules for values of the same shape.
        testable = len(window.sizes) == 2 or len({_shape(value) for value in (*values.parts, values.whole)}) == 1
        if not testable:
            return False
        for line, rule in list(rules.items()):
            if not self._fits(line, rule, problem, values, window):
                del rules[line]
        return True

    def _fits(self, line: Line, rule: Any, problem: Problem, values: Values, window: Window) -> bool:
        name = problem.name
        try:
            if problem.keyword != "state":
                outputs = [run.output for run in window.runs[:-1]]
                context = MergeContext.create(window.sizes, outputs, window.inputs[:-1])
                merged = apply_rule(rule, values.parts, context, (name,) if name else (), self.dim)
            else:
                merged = self._merge_state(line.keyword, rule, name, values, window)
        except _RULE_FAILURES:
            return False
        return _is_close(merged, values.whole, window.tolerance)

    def _merge_state(self, keyword: str, rule: Any, name: str, values: Values, window: Window) -> Any:
        """What `StateMerger` makes of an attribute if this is its only rule."""
        is_merge = keyword == "merge"
        outputs = Merger.from_options({name: rule} if is_merge else AUTO, dim=self.dim)
        policy = StateMerger({} if is_merge else {name: rule}, outputs)
        path, old = self.trial.sandbox.path_of(name), values.old
        with policy.using_inputs(window.inputs[:-1]):
            if self._is_filled_container(name, old):
                before, after = read_contents(old), [_contents(part) for part in values.parts]
                contents = merge_contents(old, path, before, after, window.sizes, policy)
                merged: Any = set(contents.items) if isinstance(old, set) else list(contents.items)
            else:
                merged = policy.merge_value(path, old, list(values.parts), window.sizes)
        if policy.problems:
            raise set_problems(StateError(), policy.problems)
        return merged

    def _distinguishing_window(self, rules: Mapping[Line, Any]) -> tuple[tuple[int, int], int] | None:
        """A window in which the weights of the remaining rules differ; None if there is none."""
        weighted = [rule for rule in rules.values() if isinstance(rule, WeightedBy) and callable(rule.weight)]
        if len(weighted) < 2:
            return None
        best, found = 1e-3, None
        for sizes in dict.fromkeys((self.small, self.large, self.small[::-1])):
            last = self.trial.batch_size - sum(sizes)
            for start in sorted({last * step // _MAX_STARTS for step in range(_MAX_STARTS + 1)}):
                inputs = self.trial.part_inputs(sizes, start)
                context = MergeContext.create(sizes, (None, None), inputs)
                shares = [_first_share(rule, context) for rule in weighted]
                spread = max(shares) - min(shares)
                if spread > best:
                    best, found = spread, (sizes, start)
        return found


def _first_share(rule: WeightedBy, context: MergeContext) -> float:
    """The weight of the first part, as a fraction of 1; -1 if the rule does not apply to these samples."""
    try:
        first, second = (float(weight) for weight in rule.weights(context, ""))
    except _RULE_FAILURES:
        return -1.0
    return first / (first + second) if first + second else 0.0


def offer_dim_1(error: MergeError, rules: str = "") -> None:
    """Replace the problems of an error by one whose solution is another batch dim, with rules for the outputs."""
    first = error.problems[0]
    line = Line("dim", f"1, {rules}" if rules else "1", "the samples are in dim 1, as in sequences [T, B]")
    set_problems(error, [Problem(first.name, first.headline, keyword="dim", lines=(line,))])


def _no_line(problem: Problem, whole: Any) -> tuple[str, ...]:
    """What to do if no line gives the value of the whole."""
    tried = "No rule by name gives the value of the whole batch: sums, means, means weighted by arguments, extrema and"
    first = f"{tried} concatenation were tried on its samples. Write one of:"
    form = "(lambda old, new, sizes: ...)" if problem.keyword == "state" else "(lambda parts, sizes: ...)"
    line = f"{problem.keyword}={{{problem.name!r}: {form}}}" if problem.name else f"{problem.keyword}={form}"
    own = f"  {line}   # a function of the replicas' values, if there is one"
    is_number = isinstance(whole, NUMBER_TYPES) or (isinstance(whole, Tensor) and not whole.ndim)
    if problem.keyword == "state":
        return (first, *INTERACTION_ADVICE, own, "  on_unmerged_state='warn'   # keep the first replica's value")
    if not is_number:
        own = own.partition("(lambda")[0] + ("...}" if problem.name else "...")
        parts = "'pad', 'nested', 'list', 'drop', a function (parts, sizes)"
        return (first, *INTERACTION_ADVICE, f"{own}   # {parts}: accept other values than those of one device")
    return (
        first,
        "  return one value per sample, a tensor [B], and take the mean outside forward",
        "  return the terms of a sum, or the numerator and the divisor of a ratio, as outputs of their own",
        "  instep.with_loss(net, criterion)   # the loss of a criterion, computed on the replicas",
        "  m = instep.all_reduce(m, 'mean')   # in forward: every mean m over samples that it is computed from",
        *INTERACTION_ADVICE,
        own,
    )


def _contents(value: Any) -> Contents:
    return read_contents(value if isinstance(value, set) else list(value))


def _leaf_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    node = flatten_one_level(value)
    if node is None:
        yield path
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _leaf_paths(child, (*path, key))


def _as_tensor(value: Any) -> Tensor | None:
    """A number, array or tensor as a tensor to compare; None for anything else."""
    if isinstance(value, (Tensor, *NUMBER_TYPES)) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
        tensor = torch.as_tensor(value)
        return None if tensor.is_nested or tensor.layout is not torch.strided else to_comparable(tensor)
    return None


def _is_close(left: Any, right: Any, tolerance: float) -> bool:
    """Whether two values are equal: integers and strings exactly, floats within the tolerance."""
    left_tensor, right_tensor = _as_tensor(left), _as_tensor(right)
    if left_tensor is not None and right_tensor is not None:
        if left_tensor.shape != right_tensor.shape:
            return False
        if left_tensor.is_floating_point() or right_tensor.is_floating_point() or right_tensor.is_complex():
            return relative_difference(left_tensor, right_tensor) <= tolerance
        return torch.equal(left_tensor, right_tensor)
    left_node, right_node = flatten_one_level(left), flatten_one_level(right)
    if left_node is not None and right_node is not None:
        return list(left_node.keys) == list(right_node.keys) and all(
            _is_close(a, b, tolerance) for a, b in zip(left_node.children, right_node.children, strict=True)
        )
    try:
        return bool(left == right)
    except (RuntimeError, TypeError, ValueError):
        return False


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of a dense tensor, array or number; empty for any other value."""
    tensor = _as_tensor(value)
    return () if tensor is None else tuple(tensor.shape)


def _is_informative(values: Values, tolerance: float) -> bool:
    """Whether the values of a window can distinguish rules: the parts differ, and two or more are not zero."""
    tensors = [_as_tensor(value) for value in (*values.parts, values.whole)]
    parts, whole = [part for part in tensors[:-1] if part is not None], tensors[-1]
    if whole is None or len(parts) < len(values.parts) or len({part.shape for part in parts}) > 1:
        return True
    same = all(_is_close(parts[0], other, 100 * tolerance) for other in (*parts[1:], whole))
    return not same and (whole.dtype is torch.bool or sum(bool(part.any()) for part in parts) > 1)
