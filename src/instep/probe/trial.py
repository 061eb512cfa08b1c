"""A probe trial: runs two parts and the whole of a few samples in a sandbox, and records the verdicts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import MergeError
from instep.probe.draws import TrialDraws
from instep.probe.independence import check_independence, scale_floats
from instep.probe.judge import Findings, TrialOutputs, UserRules, judge
from instep.probe.means import confirm_means
from instep.probe.record import (
    ProbeRecord,
    combine,
    has_mean,
    has_undetermined,
    is_inconclusive,
    is_proven,
    is_settled,
    needs_more_samples,
    refine,
)
from instep.probe.sandbox import (
    RunResult,
    Sandbox,
    TrialFailed,
    call_user_code,
    copy_arguments,
    is_number_sequence,
)
from instep.probe.tolerance import tolerances, uses_low_precision
from instep.probe.trial_call import TrialCall
from instep.probe.window import (
    MAX_PART_SIZE,
    Trait,
    default_part_sizes,
    discriminating_window,
    distinguished_traits,
    even_part_sizes,
    find_traits,
    large_part_sizes,
    many_part_sizes,
    replicated_scalars,
    sizes_beyond,
)
from instep.replicas.object_graph import values_equal
from instep.replicas.state.merge import check_no_parameter_writes
from instep.runtime.probe_flag import probe_context
from instep.structure.merge_messages import draws_in_trial
from instep.structure.placements import Nested, PreSplit, Ragged, Replicate, contains_placement
from instep.structure.problems import set_problems
from instep.structure.split import batch_first, unsplit
from instep.structure.tree import structure_key
from instep.structure.verdicts import Undetermined, Verdicts
from instep.structure.weights import find_weight_window, find_weighted_criteria, label_and_mask_counts

DRAWS = "forward draws random numbers"
"""Why values cannot be compared, if the draws cannot be replaced."""
OutputCheck = Callable[[Sequence[Any], bool, float], MergeError | None]
"""Checks the outputs of both parts and the whole. Returns an error or None.

The other arguments are whether values can be compared, and the tolerance. The check may remove entries that only it
needs from the outputs."""
PartInputs = Sequence[dict[str, Any]]
"""Arguments by name, for the parts and the whole."""
TrialResult = tuple[Findings, dict[str, Verdicts]]
"""Findings about the outputs, and verdicts for attributes that `forward` assigned."""


class Trial:
    """Runs the trials of one call."""

    sandbox: Sandbox
    incomparable_reasons: list[str]
    """Why the values of parts and whole cannot be compared; empty if they can."""

    def __init__(
        self,
        method: str,
        user_rules: UserRules,
        call: TrialCall,
        min_part: int,
        check: OutputCheck | None = None,
        *,
        use_large_parts: bool = False,
    ) -> None:
        self.check = check
        self.check_error: MergeError | None = None
        """The error that the check returned."""
        self.unmergeable: set[str] = set()
        self.sample_dependent: set[str] = set()
        self.constant: set[str] = set()
        self.method, self.user_rules, self.call, self.plan = method, user_rules, call, call.plan
        self.carried_state = [value for value in call.carried if value.module is not None]
        self.batch_size, self.min_part = call.batch_size, min_part
        pairs = zip(call.plan.placements, call.values, strict=True)
        self.inputs = call.by_name([batch_first(*pair) for pair in pairs])
        """Arguments by name, with the batch moved to dim 0."""
        self._traits: dict[Trait, Tensor] | None = None
        self.seen_traits: set[Trait] = set()
        self.use_large_parts = use_large_parts
        """Whether all trials use large parts."""
        self.even_only = False
        """Whether the module needs an even number of samples."""
        self._reads: dict[str, bool] = {}
        """By attribute, whether its new value depends on its old one."""
        self.initial_state: Mapping[str, Any] = {}
        """Attributes that runs start from instead of those of the module, by dotted name."""
        self.criteria: list[tuple[str, nn.Module]] = []

    @property
    def traits(self) -> dict[Trait, Tensor]:
        """Integer values among the arguments that may determine the weights of samples."""
        if self._traits is None:
            self._traits = find_traits(self.inputs, self.batch_size)
        return self._traits

    @property
    def can_run(self) -> bool:
        """Whether the batch can be split into two parts. A batch that the user has split (`Shards`) cannot."""
        return not any(contains_placement(PreSplit, placement) for placement in self.plan.placements)

    def has_untested_traits(self, record: ProbeRecord) -> bool:
        """Whether this call has traits on which means have not been tested."""
        *_, sizes = [self.part_sizes(), *self.many_part_sizes()]
        return discriminating_window(self.traits, record.seen_traits, sizes) is not None

    @contextmanager
    def open_sandbox(self) -> Iterator[None]:
        """Context manager in which trials run: creates the sandbox and ignores warnings."""
        with probe_context() as self.incomparable_reasons, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.sandbox = call_user_code(Sandbox, self.call.module, self.call.device)
            yield

    def run(self, record: ProbeRecord, weights: Sequence[Any] = ()) -> None:
        """Run the trials and update the record. Raises `MergeError` for outputs that cannot be merged.

        `weights` are those of means that the trials should distinguish.
        """
        if not self.can_run:
            record.summary = "not tried: the batch came already split"
            record.schedule_trial(useful=False)
            return
        self.seen_traits, self.criteria = set(record.seen_traits), find_weighted_criteria(self.call.module)
        try:
            with self.open_sandbox():
                findings, attributes = self._try_all(weights)
        except TrialFailed as failure:
            record.summary = f"not tried: {failure}"
            record.status = "failed" if record.status == "untried" else record.status
            record.schedule_trial(useful=record.trials.count < 2)
            return
        check_no_parameter_writes(self.call.module, self.sandbox.written_parameters)
        self._update_record(record, findings, attributes)

    def _try_all(self, weights: Sequence[Any]) -> TrialResult:
        """Run a trial, and further ones as long as they may show more."""
        findings, attributes = self._first_trial(weights)
        first_sizes, large_sizes = self.part_sizes(), self.part_sizes(large=True)
        if has_undetermined(findings) and not findings.errors and large_sizes != first_sizes:
            more, attributes = self._try_and_recheck(large_sizes, weights)
            findings = combine(findings, more)
        if self._needs_other_samples(findings):
            findings = combine(findings, self._try_last_samples(first_sizes))
        if self._needs_double_precision(findings) and not self.incomparable_reasons:
            findings, attributes = self._try_in_double_precision(findings, attributes)
        numbers = [
            n for pair in zip(self.plan.placements, self.call.values, strict=True) for n in replicated_scalars(*pair)
        ]
        beyond = sizes_beyond(numbers, first_sizes, self.batch_size, self.min_part, even=self.even_only)
        if beyond is not None and not findings.errors and not self.incomparable_reasons:
            with suppress(TrialFailed):  # forward may not run on so many samples
                findings = combine(findings, self._try_window(beyond, 0)[0])
        if has_mean(findings.outputs, *attributes.values()) and not findings.errors:
            findings, attributes = self._confirm_means(findings, attributes)
        return findings, attributes

    def _update_record(self, record: ProbeRecord, findings: Findings, attributes: dict[str, Verdicts]) -> None:
        outputs, conflicts = refine(record.outputs, findings)
        unexplained = [error for path, error in findings.errors.items() if not is_settled(record.outputs.get(path))]
        if unexplained or conflicts:
            problems = [problem for error in (*unexplained, *conflicts.values()) for problem in error.problems]
            error = set_problems(MergeError(), problems)
            if self.sandbox.draws is not None:
                draws_in_trial(error, in_evaluation_mode=self.sandbox.in_evaluation_mode)
            if self.check is None and not findings.errors.keys() & record.outputs.keys():
                record.error = str(error)
            raise error
        record.status, record.outputs, record.seen_traits = "tried", outputs, self.seen_traits
        self.unmergeable |= record.unmergeable
        record.attributes = self._combine_attributes(record.attributes, attributes)
        record.unmergeable = frozenset(self.unmergeable)
        record.sample_dependent |= self.sample_dependent
        record.constant = (record.constant | self.constant) - record.sample_dependent - record.unmergeable
        record.draws_randomly = DRAWS in self.incomparable_reasons
        record.calls_batch_norm |= bool(self.sandbox.batch_norms.total)
        record.summary = self._summary()
        unresolved = [path for path in findings.unresolved if not is_proven(record.outputs.get(path))]
        record.schedule_trial(useful=bool(unresolved) or (bool(record.attributes) and record.trials.count < 1))

    def _summary(self) -> str:
        """How the samples were tried, for `explain`."""
        first, second = self.part_sizes()
        tried = f"tried on {first} and {second} samples, separately and together"
        if self.incomparable_reasons:
            return f"{tried}; only shapes count: {', '.join(dict.fromkeys(self.incomparable_reasons))}"
        if self.sandbox.in_evaluation_mode:
            return f"{tried}, in evaluation mode: forward draws random numbers that cannot be repeated for a sample"
        return tried if self.sandbox.draws is None else f"{tried}, with the same random numbers for each sample"

    def _first_trial(self, weights: Sequence[Any]) -> TrialResult:
        """Run the first trial, in the first mode in which `forward` does not fail."""
        failures = []
        for sizes in self.modes():
            try:
                return self._try_and_recheck(sizes, weights)
            except TrialFailed as failure:
                failures.append(failure)
        raise failures[0]

    def modes(self) -> Iterator[tuple[int, int]]:
        """Set a mode and yield its part sizes: gradients disabled, then enabled, then both with even part sizes."""
        even_choices = [False, True] if even_part_sizes(self.batch_size, self.min_part) is not None else [False]
        gradient_choices = [False, True] if torch.is_grad_enabled() else [False]
        for even_only, takes_gradients in itertools.product(even_choices, gradient_choices):
            self.even_only, self.sandbox.takes_gradients = even_only, takes_gradients
            yield self.part_sizes()

    def part_sizes(self, *, large: bool = False) -> tuple[int, int]:
        """The sizes of the two parts."""
        large = large or self.use_large_parts
        if self.even_only:
            half = min(MAX_PART_SIZE, (self.batch_size - 2) // 4 * 2) if large else 0
            sizes = even_part_sizes(self.batch_size, max(half, self.min_part))
            assert sizes is not None
            return sizes
        choose = large_part_sizes if large else default_part_sizes
        return choose(self.batch_size, self.min_part)

    def _try_and_recheck(self, sizes: tuple[int, int], weights: Sequence[Any]) -> TrialResult:
        """Run a trial, and rerun it where rows or integers may match or differ by chance."""
        start = self._choose_window(sizes, weights)
        findings, attributes = self._try_window(sizes, start)
        if any(isinstance(v.placement, Ragged) for v in findings.outputs.values()) and sizes[0] != sizes[1]:
            # A strided selection such as x[::2] also concatenates if the first part has an even size.
            findings = combine(findings, self._try_window((sizes[1], sizes[0]), start)[0])
        by_chance = findings.mismatched_integers or findings.needs_reordering
        if by_chance and not findings.errors and not self.carried_state:
            self._check_independence(sizes, start, findings)
        return findings, attributes

    def _needs_other_samples(self, findings: Findings) -> bool:
        """Whether a trial on other samples may resolve more verdicts."""
        verdicts = findings.outputs.values()
        undetermined = self.use_large_parts and any(isinstance(v.placement, Undetermined) for v in verdicts)
        return not findings.errors and (undetermined or any(map(needs_more_samples, verdicts)))

    def _try_last_samples(self, sizes: tuple[int, int]) -> Findings:
        """Run a trial on the last samples of the batch, with the part sizes swapped.

        They may give values where the first samples gave none, and two weights that are proportional by chance in one
        trial are unlikely to be so in both.
        """
        return self._try_window((sizes[1], sizes[0]), self.batch_size - sum(sizes))[0]

    def _needs_double_precision(self, findings: Findings) -> bool:
        """Whether rounding errors may prevent a verdict."""
        if any(is_inconclusive(verdict) for verdict in findings.outputs.values()):
            return True
        return bool(findings.errors) and uses_low_precision(self.sandbox, self.inputs)

    def _try_in_double_precision(self, findings: Findings, attributes: dict[str, Verdicts]) -> TrialResult:
        """Run the trial in double precision, which distinguishes rules by smaller differences.

        The verdict of an output does not depend on its precision. If `forward` fails in double precision, the findings
        are returned unchanged.
        """
        saved = self.sample_dependent, self.constant  # values differ in double precision, so state is not compared
        self.sample_dependent, self.constant = set(), set()
        try:
            with self.sandbox.in_double_precision():
                more, more_attributes = self._try_and_recheck(self.part_sizes(), ())
        except TrialFailed:
            return findings, attributes
        finally:
            self.sample_dependent, self.constant = saved
        errors = {path: error for path, error in findings.errors.items() if path not in more.outputs}
        outputs = {**findings.outputs, **more.outputs}
        unresolved = {path for path in findings.unresolved | more.unresolved if not is_proven(outputs.get(path))}
        return Findings(outputs, unresolved, {**errors, **more.errors}), more_attributes

    def _confirm_means(self, findings: Findings, attributes: dict[str, Verdicts]) -> TrialResult:
        """Test means on more samples while there are untested traits: on many parts, then on two."""
        for sizes in self.many_part_sizes():
            start = discriminating_window(self.traits, self.seen_traits, sizes)
            if start is None or findings.errors:
                continue
            try:
                more, more_attributes = self._confirm_on_parts(sizes, start, findings.outputs, attributes)
            except TrialFailed:
                break
            findings, attributes = combine(findings, more), self._combine_attributes(attributes, more_attributes)
        large = self.part_sizes(large=True)
        for sizes in (self.part_sizes(), large, large):
            start = discriminating_window(self.traits, self.seen_traits, sizes)
            if start is None or findings.errors:
                break
            more, more_attributes = self._try_window(sizes, start)
            findings, attributes = combine(findings, more), self._combine_attributes(attributes, more_attributes)
        return findings, attributes

    def many_part_sizes(self) -> list[tuple[int, ...]]:
        """Sizes of many parts: large ones, then the smallest."""
        smallest = self.min_part + self.min_part % 2 if self.even_only else self.min_part
        return many_part_sizes(self.batch_size, smallest) if self.check is None else []

    def _confirm_on_parts(
        self, sizes: tuple[int, ...], start: int, outputs: Verdicts, attributes: Mapping[str, Verdicts]
    ) -> TrialResult:
        """Run many parts and the whole, and test the means among these verdicts on them."""
        tested, findings = {"": outputs, **attributes}, {name: Findings() for name in ("", *attributes)}
        complete = True
        for inputs, runs in self._run_window(sizes, start):
            if self.incomparable_reasons:
                return Findings(), {}
            tolerance = tolerances(self.sandbox, inputs[-1], [run.output for run in runs])[1]
            for name, verdicts in tested.items():
                values = [run.attributes.get(name) if name else run.output for run in runs]
                found, all_tested = confirm_means(verdicts, sizes, values, inputs, tolerance)
                findings[name], complete = combine(findings[name], found), complete and all_tested
        self.unmergeable |= {name for name in attributes if findings[name].errors}
        if complete:
            self.seen_traits |= distinguished_traits(self.traits, start, sizes)
        return findings[""], {name: findings[name].outputs for name in attributes}

    def _try_window(self, sizes: tuple[int, int], start: int) -> TrialResult:
        """Run both parts and the whole of the samples from `start`, and judge the results."""
        windows = self._run_window(sizes, start)
        findings, attributes = self._judge_runs(sizes, start, *next(windows))
        if not findings.errors:
            for inputs, runs in windows:
                more, more_attributes = self._judge_runs(sizes, start, inputs, runs)
                findings, attributes = combine(findings, more), self._combine_attributes(attributes, more_attributes)
        return findings, attributes

    def _run_window(self, sizes: tuple[int, ...], start: int) -> Iterator[tuple[PartInputs, list[RunResult]]]:
        """Arguments and results of the parts and the whole; then with different draws too, if `forward` draws."""
        inputs, runs = self._run_comparable(sizes, start)
        yield inputs, runs
        if not self.incomparable_reasons:
            yield from ((inputs, other_runs) for other_runs in self._run_different_draws(sizes, start))

    def _judge_runs(
        self, sizes: tuple[int, int], start: int, inputs: PartInputs, runs: Sequence[RunResult]
    ) -> TrialResult:
        """Findings about the results of both parts and the whole."""
        outputs = [run.output for run in runs]
        tolerance, reduction_tolerance = tolerances(self.sandbox, inputs[2], outputs)
        compare_values = not self.incomparable_reasons
        if self.check is not None:
            self.check_error = self.check(outputs, compare_values, tolerance)
            if self.check_error is not None:
                raise self.check_error

        def judge_values(values: Sequence[Any], rules: UserRules) -> Findings:
            parts, precision = (values[0], values[1]), (tolerance, reduction_tolerance)
            return judge(
                TrialOutputs(sizes, parts, values[2], inputs, *precision, compare_values, self.criteria), rules
            )

        findings, attributes = judge_values(outputs, self.user_rules), {}
        if compare_values:
            self._classify_changes([run.changes for run in runs])
            reads = partial(self.reads_attribute, sizes, start)
            attributes = self._judge_attributes([run.attributes for run in runs], judge_values, reads)
        if has_mean(findings.outputs, *attributes.values()):
            self.seen_traits |= distinguished_traits(self.traits, start, sizes)
        return findings, attributes

    def _run_comparable(self, sizes: tuple[int, ...], start: int) -> tuple[PartInputs, list[RunResult]]:
        """Run the parts and the whole. If they draw random numbers, run them so that all samples draw alike.

        Draws that cannot be replaced must not change the results. If they do, runs in evaluation mode, without such
        draws, are returned. If there are none, `incomparable_reasons` gets the reason.
        """
        sandbox, reasons = self.sandbox, self.incomparable_reasons
        inputs, first_runs = self._run_alike(sizes, start)
        if sandbox.drew_alike() or reasons:
            return inputs, first_runs
        runs: list[RunResult] | None = first_runs
        if sandbox.draws is None:
            sandbox.draws = TrialDraws(sandbox.device)
            runs = self._rerun(sizes, start)
            if runs is not None and sandbox.drew_alike():
                return inputs, runs
        if runs is not None and values_equal(runs, self._rerun(sizes, start, seed=1)):
            return inputs, runs
        sandbox.switch_to_eval()
        runs = self._rerun(sizes, start)
        if runs is not None and sandbox.drew_alike() and _have_same_structure(runs, first_runs):
            return inputs, runs
        reasons.append(DRAWS)
        return inputs, first_runs

    def _run_alike(
        self, sizes: tuple[int, ...], start: int, seed: int | None = None
    ) -> tuple[PartInputs, list[RunResult]]:
        """Run the parts and the whole. If draws are replaced, all samples draw alike."""
        if self.sandbox.draws is not None:
            self.sandbox.draws.start_runs()
        self.sandbox.seed = seed
        try:
            return self._run_parts(sizes, start)
        finally:
            self.sandbox.seed = None

    def _rerun(self, sizes: tuple[int, ...], start: int, seed: int | None = None) -> list[RunResult] | None:
        """Run the parts and the whole with other draws or in another mode; None if `forward` fails."""
        try:
            return self._run_alike(sizes, start, seed)[1]
        except TrialFailed:
            return None

    def _run_different_draws(self, sizes: tuple[int, ...], start: int) -> Iterator[list[RunResult]]:
        """Run the parts again while every sample draws numbers of its own."""
        draws = self.sandbox.draws
        for seed in range(2 if sum(sizes) > 4 else 6):  # of few samples, random masks may select equal numbers
            if draws is None or not draws.start_runs(sizes, seed):
                return
            try:
                runs = self._run_parts(sizes, start)[1]
            except TrialFailed:
                return
            if not draws.diverged and self.sandbox.drew_alike():
                yield runs

    def observe(
        self, sizes: tuple[int, ...], start: int, initial_state: Mapping[str, Any]
    ) -> list[tuple[PartInputs, list[RunResult]]]:
        """What `_run_window` returns; empty if `forward` fails or values cannot be compared."""
        self.initial_state = initial_state
        try:
            windows = list(self._run_window(sizes, start))
        except TrialFailed:
            return []
        finally:
            self.initial_state = {}
        return [] if self.incomparable_reasons else windows

    def judge_first_samples(self, sizes: tuple[int, int]) -> TrialResult:
        """The findings of one trial on the first samples. Adds to `unmergeable`."""
        try:
            return self._try_window(sizes, 0)
        except TrialFailed:
            return Findings(), {}

    def part_inputs(self, sizes: tuple[int, int], start: int) -> list[dict[str, Any]]:
        """The arguments of both parts by name."""
        return [self.call.by_name(shard) for shard in self._split(start, sizes)]

    def _classify_changes(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Record which state the runs changed to the same value, and which depends on the samples."""
        for name in dict.fromkeys(name for table in changes for name in table):
            is_constant = all(name in table and values_equal(table[name], changes[0][name]) for table in changes)
            (self.constant if is_constant else self.sample_dependent).add(name)

    def _judge_attributes(
        self,
        assigned: Sequence[Mapping[str, Any]],
        judge_values: Callable[[Sequence[Any], UserRules], Findings],
        reads: Callable[[str, Any], bool],
    ) -> dict[str, Verdicts]:
        """Verdicts for the attributes that the runs assigned. Attributes that are constant have none.

        `reads` returns whether `forward` reads an attribute before it assigns this value to it.
        """
        attributes: dict[str, Verdicts] = {}
        for name in dict.fromkeys(name for table in assigned for name in table):
            initial = self.sandbox.read(name, None)
            values = [table.get(name) for table in assigned]
            if any(map(is_number_sequence, values)):
                (self.unmergeable if any(value != values[0] for value in values) else self.constant).add(name)
                continue
            result = judge_values([table.get(name, initial) for table in assigned], UserRules())
            result.outputs = {p: v for p, v in result.outputs.items() if not isinstance(v.placement, Undetermined)}
            if result.errors or (_may_be_running_total(initial, result) and reads(name, values[2])):
                self.unmergeable.add(name)
                continue
            verdicts = {path: v for path, v in result.outputs.items() if not isinstance(v.placement, Replicate)}
            if not all(isinstance(verdict.placement, Nested) for verdict in verdicts.values()):
                attributes[name] = verdicts
            elif result.outputs and not result.unresolved - result.outputs.keys():
                self.constant.add(name)
        return attributes

    def reads_attribute(
        self, sizes: tuple[int, int], start: int, name: str, value: Any, *, in_place: bool = False
    ) -> bool:
        """Whether `forward` reads an attribute that it sets to `value`.

        It does if a second run on the same samples, which starts from `value`, sets another value or none. A run that
        writes to the attribute in place sets none.
        """
        if name not in self._reads:
            self.initial_state = {name: value}
            runs = self._rerun(sizes, start)
            self.initial_state = {}
            self._reads[name] = runs is None or not values_equal(
                runs[2].value_of(name, value if in_place else None), value
            )
        return self._reads[name]

    def _combine_attributes(self, before: Mapping[str, Verdicts], later: Mapping[str, Verdicts]) -> dict[str, Verdicts]:
        """Verdicts for attributes after another trial. Unmergeable attributes stay unmergeable."""
        combined = {**before, **later}
        for name in before.keys() & later.keys():
            combined[name], conflicts = refine(before[name], Findings(dict(later[name])))
            self.unmergeable |= {name} if conflicts else set()
        return {name: verdicts for name, verdicts in combined.items() if name not in self.unmergeable}

    def _check_independence(self, sizes: tuple[int, int], start: int, findings: Findings) -> None:
        """Test rows that `forward` may have sorted, and integers that differ, perhaps because of rounding."""
        singles = self._split(start, [1] * sum(sizes))

        def run(indices: Sequence[int], kept: Sequence[int], factor: float) -> Any:
            values = []
            for argument, placement in enumerate(self.plan.placements):
                column = [singles[index][argument] for index in indices]
                scaled = [
                    sample if position in kept else scale_floats(placement, sample, factor)
                    for position, sample in enumerate(column)
                ]
                values.append(unsplit(placement, column if factor == 1.0 else scaled))
            if self.sandbox.draws is not None:
                self.sandbox.draws.start_runs()
            return self._call_sandbox(values).output

        check_independence(findings, sizes, partial(call_user_code, run))

    def _choose_window(self, sizes: tuple[int, int], weights: Sequence[Any]) -> int:
        """The start of the window in which the weights differ, or else labels and masks, or else any integers."""
        has_weights = weights or (not self.seen_traits and label_and_mask_counts(self.inputs, self.batch_size))
        start = None if has_weights else discriminating_window(self.traits, self.seen_traits, sizes)
        return find_weight_window(self.inputs, self.batch_size, sizes, weights) if start is None else start

    def _call_sandbox(self, values: Sequence[Any]) -> RunResult:
        sandbox = self.sandbox
        copied = partial(copy_arguments, double=sandbox.double_precision, gradients=sandbox.takes_gradients)
        arguments = call_user_code(copied, values)
        return call_user_code(self.sandbox.run, self.method, *self.call.args_and_kwargs(arguments))

    def _run_parts(self, sizes: tuple[int, ...], start: int) -> tuple[PartInputs, list[RunResult]]:
        """Run the parts and the whole. Returns their arguments and results."""
        inputs, runs = [], []
        self.sandbox.start_runs()
        for shard in self._parts_and_whole(sizes, start):
            inputs.append(self.call.by_name(shard))
            for name, value in self.initial_state.items():
                self.sandbox.assign(name, value)
            runs.append(self._call_sandbox(shard))
        return inputs, runs

    def part_arguments(self, sizes: tuple[int, int]) -> Iterator[tuple[Sequence[Any], dict[str, Any]]]:
        """Copies of the arguments of both parts and of the whole; see `_parts_and_whole`."""
        for shard in self._parts_and_whole(sizes):
            yield self.call.args_and_kwargs(copy_arguments(shard))

    def _parts_and_whole(self, sizes: tuple[int, ...], start: int = 0) -> Iterator[list[Any]]:
        """The arguments of the parts and of the whole, from sample `start`.

        Each step sets the carried state in the sandbox, so use the arguments before the next step.
        """
        total = sum(sizes)
        shards = [*self._split(start, sizes), *self._split(start, [total])]
        starts = itertools.accumulate(sizes, initial=start)
        ranges = [*zip(starts, sizes, strict=False), (start, total)]
        for shard, (first, count) in zip(shards, ranges, strict=True):
            for value in self.carried_state:
                self.sandbox.assign_shard(value, value.split([first, count, self.batch_size - first - count])[1])
            yield shard

    def _split(self, start: int, sizes: Sequence[int]) -> list[list[Any]]:
        with torch.enable_grad() if self.sandbox.takes_gradients else torch.no_grad():
            return self.call.split(start, sizes)


def _have_same_structure(left: Sequence[RunResult], right: Sequence[RunResult]) -> bool:
    return all(structure_key(one.output) == structure_key(two.output) for one, two in zip(left, right, strict=True))


def _may_be_running_total(initial: Any, findings: Findings) -> bool:
    """Whether an attribute may be a running total, which looks like a sum over samples only if it starts from zero."""
    verdict = findings.outputs.get(())
    if verdict is None or verdict.ops != ("sum",):
        return False
    return (
        initial == 0 if isinstance(initial, (int, float)) else isinstance(initial, Tensor) and not bool(initial.any())
    )
