"""One trial of the probe: runs parts and whole in a sandbox and records the verdicts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from instep.errors import MergeError
from instep.probe.independence import find_changed_path, is_order_dependent, scale_floats, substituted_batches
from instep.probe.judge import Findings, TrialOutputs, UserRules, judge
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
from instep.probe.sandbox import Sandbox, copy_arguments, is_number_sequence, to_double
from instep.probe.tolerance import tolerances, uses_low_precision
from instep.probe.window import (
    MAX_PART_SIZE,
    Trait,
    default_part_sizes,
    discriminating_window,
    distinguished_traits,
    even_part_sizes,
    find_traits,
    large_part_sizes,
)
from instep.replicas.object_graph import values_equal
from instep.replicas.state.carried import CarriedValue
from instep.replicas.state.merge import check_no_parameter_writes
from instep.runtime.probe_flag import probe_context
from instep.structure.merge_messages import depends_on_other_samples
from instep.structure.output_placements import (
    OutputPerSample,
    OutputReplicate,
    OutputShard,
    Partial,
    Undetermined,
    Verdicts,
)
from instep.structure.placements import PreSplit, contains_placement
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan, unsplit
from instep.structure.tree import map_tensors, structure_key
from instep.structure.weights import candidate_counts, find_weight_window, find_weighted_criteria

T = TypeVar("T")
PlaceFunction = Callable[[Sequence[Any]], Sequence[Any]]
"""Brings one replica's arguments to the first device."""
OutputCheck = Callable[[Sequence[Any], bool, float], MergeError | None]
"""What is wrong with the outputs of both parts and the whole, given whether their numbers can be compared, and how
exactly; it may take out of them what only it needs."""
RunResult = tuple[Any, dict[str, Any], dict[str, Any]]
"""What `forward` gave, the attributes that it set, and what else it left on the module."""


class Trial:
    """One trial, or several, for one call."""

    def __init__(
        self,
        method: str,
        named: UserRules,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: PlaceFunction,
        least: int,
        carried: Sequence[CarriedValue],
        check: OutputCheck | None = None,
    ) -> None:
        self.check = check
        self.check_error: MergeError | None = None
        """What the check said."""
        self.unmergeable: set[str] = set()
        self.sample_dependent: set[str] = set()
        self.constant: set[str] = set()
        self.carried_state = [slot for slot in carried if slot.module is not None]
        self.method, self.user_rules, self.plan, self.values = method, named, plan, values
        self.num_positional, self.place = positional, place
        self.batch_size, self.min_part = plan.batch_size or 0, least
        self.inputs = dict(zip(plan.names, values, strict=True))
        self._traits: dict[Trait, Tensor] | None = None
        self.seen_traits: set[Trait] = set()
        self.use_large_parts = False
        """Whether as many samples are tried as there may be, at once."""
        self.even_only = False
        """Whether the module takes only even numbers of samples."""
        self.criteria: list[tuple[str, nn.Module]] = []

    @property
    def traits(self) -> dict[Trait, Tensor]:
        """The integers of this call that may decide what samples weigh."""
        if self._traits is None:
            self._traits = find_traits(self.inputs, self.batch_size)
        return self._traits

    def has_untested_traits(self, known: ProbeRecord) -> bool:
        """Whether this call has integers that means were not tried on."""
        return (
            self.batch_size >= 2
            and discriminating_window(self.traits, known.seen_traits, self._part_sizes()) is not None
        )

    def run(self, source: nn.Module, device: torch.device, known: ProbeRecord, rivals: Sequence[Any]) -> None:
        """Try, and note what was seen."""
        if self.batch_size < 2 or any(contains_placement(PreSplit, role) for role in self.plan.placements):
            known.summary = "not tried: the batch came already split"
            known.schedule_trial(useful=False)
            return
        self.seen_traits, self.criteria = set(known.seen_traits), find_weighted_criteria(source)
        try:
            with probe_context() as excuses, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sandbox = _call_user_code(Sandbox, source, device)
                first, (findings, attributes) = self._first_trial(sandbox, rivals, excuses)
                wide = self._part_sizes(large=True)
                if has_undetermined(findings) and not findings.errors and wide != first:
                    more, attributes = self._try_and_recheck(sandbox, wide, rivals, excuses)
                    findings = combine(findings, more)
                if self._needs_other_samples(findings):
                    findings = combine(findings, self._try_last_samples(sandbox, first, excuses))
                if self._needs_double_precision(sandbox, findings) and not excuses:
                    findings, attributes = self._try_in_double_precision(sandbox, findings, attributes, excuses)
                if has_mean(findings.outputs, *attributes.values()) and not findings.errors:
                    findings, attributes = self._confirm_means(sandbox, findings, attributes, excuses)
        except _TrialFailed as refused:
            known.summary = f"not tried: {refused}"
            known.status = "failed" if known.status == "untried" else known.status
            known.schedule_trial(useful=known.trials.count < 2)
            return
        check_no_parameter_writes(source, sandbox.written_parameters)
        found, clashes = refine(known.outputs, findings)
        unexplained = [e for path, e in findings.errors.items() if not is_settled(known.outputs.get(path))]
        for error in (*unexplained, *clashes.values()):
            if self.check is None and not findings.errors.keys() & known.outputs.keys():
                known.error = str(error)
            raise error
        known.status, known.outputs, known.seen_traits = "tried", found, self.seen_traits
        self.unmergeable |= known.unmergeable
        attributes = self._combine_attributes(known.attributes, attributes)
        known.attributes, known.unmergeable = attributes, frozenset(self.unmergeable)
        known.sample_dependent |= self.sample_dependent
        known.constant = (known.constant | self.constant) - known.sample_dependent - known.unmergeable
        why = f"; only shapes count: {', '.join(dict.fromkeys(excuses))}" if excuses else ""
        known.summary = f"tried on {first[0]} and {first[1]} samples, and on them together{why}"
        left = [path for path in findings.unresolved if not is_proven(known.outputs.get(path))]
        known.schedule_trial(useful=bool(left) or (bool(attributes) and known.trials.count < 1))

    def _first_trial(
        self, sandbox: Sandbox, rivals: Sequence[Any], excuses: list[str]
    ) -> tuple[tuple[int, int], tuple[Findings, dict[str, Verdicts]]]:
        """The first trial, and the sizes of its parts; even ones where the module does not take odd ones."""
        try:
            return self._part_sizes(), self._try_and_recheck(sandbox, self._part_sizes(), rivals, excuses)
        except _TrialFailed:
            self.even_only = even_part_sizes(self.batch_size, self.min_part) is not None
            if not self.even_only:
                raise
            return self._part_sizes(), self._try_and_recheck(sandbox, self._part_sizes(), rivals, excuses)

    def _part_sizes(self, *, large: bool = False) -> tuple[int, int]:
        """The samples of the two parts, a few or many."""
        large = large or self.use_large_parts
        if self.even_only:
            half = min(MAX_PART_SIZE, (self.batch_size - 2) // 4 * 2) if large else 0
            sizes = even_part_sizes(self.batch_size, max(half, self.min_part))
            assert sizes is not None
            return sizes
        return (
            large_part_sizes(self.batch_size, self.min_part)
            if large
            else default_part_sizes(self.batch_size, self.min_part)
        )

    def _try_and_recheck(
        self, sandbox: Sandbox, sizes: tuple[int, int], rivals: Sequence[Any], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """A trial, and what it takes to see that rows do not follow one another, nor integers differ, by chance."""
        start = self._choose_window(sizes, rivals)
        findings, attributes = self._try_window(sandbox, sizes, start, excuses)
        if any(isinstance(verdict, OutputPerSample) for verdict in findings.outputs.values()) and sizes[0] != sizes[1]:
            # Every second row follows on, too, after a part of an even number of samples.
            findings = combine(findings, self._try_window(sandbox, (sizes[1], sizes[0]), start, excuses)[0])
        if (
            (findings.mismatched_integers or findings.needs_reordering)
            and not findings.errors
            and not self.carried_state
        ):
            self._check_independence(sandbox, sizes, start, findings)
        return findings, attributes

    def _needs_other_samples(self, findings: Findings) -> bool:
        """Whether the last samples may say what the first ones did not."""
        found = findings.outputs.values()
        zeros = self.use_large_parts and any(isinstance(verdict, Undetermined) for verdict in found)
        return not findings.errors and (zeros or any(map(needs_more_samples, found)))

    def _try_last_samples(self, sandbox: Sandbox, sizes: tuple[int, int], excuses: list[str]) -> Findings:
        """Another trial, on the last samples, with the parts exchanged.

        Where a part of the first ones gave nothing, these may give something; and numbers of labels that happen to
        be in the ratio of other weights are so once, not twice.
        """
        return self._try_window(sandbox, (sizes[1], sizes[0]), self.batch_size - sum(sizes), excuses)[0]

    def _needs_double_precision(self, sandbox: Sandbox, findings: Findings) -> bool:
        """Whether rounding may be what keeps values from being explained."""
        if any(is_inconclusive(verdict) for verdict in findings.outputs.values()):
            return True
        return bool(findings.errors) and uses_low_precision(sandbox, self.inputs)

    def _try_in_double_precision(
        self, sandbox: Sandbox, findings: Findings, attributes: dict[str, Verdicts], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """The trial in double precision, in which a mean is told from anything else by far smaller differences.

        What an output means has nothing to do with its precision. Where `forward` does not run in it, nothing changes.
        """
        seen = self.sample_dependent, self.constant  # every number is another one in double precision
        self.sample_dependent, self.constant = set(), set()
        try:
            with sandbox.in_double_precision():
                more, later = self._try_and_recheck(sandbox, self._part_sizes(), (), excuses)
        except _TrialFailed:
            return findings, attributes
        finally:
            self.sample_dependent, self.constant = seen
        errors = {path: error for path, error in findings.errors.items() if path not in more.outputs}
        kept = {path: verdict for path, verdict in findings.outputs.items() if path not in more.outputs}
        found = {**kept, **more.outputs}
        still = {path for path in findings.unresolved | more.unresolved if not is_proven(found.get(path))}
        return Findings(found, still, {**errors, **more.errors}), later

    def _confirm_means(
        self, sandbox: Sandbox, findings: Findings, attributes: dict[str, Verdicts], excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        """Means are tried on other samples too, a few and then more, while there are integers not tried yet."""
        for sizes in (self._part_sizes(), self._part_sizes(large=True)):
            start = discriminating_window(self.traits, self.seen_traits, sizes)
            if start is None or findings.errors:
                break
            more, later = self._try_window(sandbox, sizes, start, excuses)
            findings, attributes = combine(findings, more), self._combine_attributes(attributes, later)
        return findings, attributes

    def _try_window(
        self, sandbox: Sandbox, sizes: tuple[int, int], start: int, excuses: list[str]
    ) -> tuple[Findings, dict[str, Verdicts]]:
        inputs, runs = self._run_parts(sandbox, sizes, start)
        if sandbox.incomparable_reason is not None:
            excuses.append(sandbox.incomparable_reason)
        if sandbox.used_rng and not excuses:
            noisy = runs
            sandbox.used_rng = False
            sandbox.switch_to_eval()
            inputs, runs = self._run_parts(sandbox, sizes, start)
            if sandbox.used_rng or [structure_key(r[0]) for r in runs] != [structure_key(r[0]) for r in noisy]:
                excuses.append("forward draws random numbers")
                runs = noisy
        outputs = [output for output, _, _ in runs]
        tolerance, fine = tolerances(sandbox, inputs[2], outputs)
        sure = not excuses
        if self.check is not None:
            self.check_error = self.check(outputs, sure, tolerance)
            if self.check_error is not None:
                raise self.check_error

        def trial(outputs: Sequence[Any]) -> TrialOutputs:
            return TrialOutputs(
                sizes, (outputs[0], outputs[1]), outputs[2], inputs, tolerance, fine, sure, self.criteria
            )

        findings = judge(trial(outputs), self.user_rules)
        tables = [table for _, table, _ in runs]
        left = [table for _, _, table in runs] if sure else []
        for place in dict.fromkeys(place for table in left for place in table):
            same = all(place in table and values_equal(table[place], left[0][place]) for table in left)
            (self.constant if same else self.sample_dependent).add(place)
        attributes: dict[str, Verdicts] = {}
        for name in dict.fromkeys(name for table in tables for name in table) if sure else ():
            held = sandbox.initial_value(name)
            rows = [table.get(name) for table in tables]
            if any(map(is_number_sequence, rows)):
                (self.unmergeable if any(row != rows[0] for row in rows) else self.constant).add(name)
                continue
            said = judge(trial([table.get(name, held) for table in tables]), UserRules())
            said.outputs = {path: v for path, v in said.outputs.items() if not isinstance(v, Undetermined)}
            if said.errors or _may_be_running_total(held, said):
                self.unmergeable.add(name)
            elif said.outputs:
                attributes[name] = {path: v for path, v in said.outputs.items() if not isinstance(v, OutputReplicate)}
                self.constant |= set() if attributes[name] or said.unresolved - said.outputs.keys() else {name}
        attributes = {name: found for name, found in attributes.items() if found}
        if has_mean(findings.outputs, *attributes.values()):
            self.seen_traits |= distinguished_traits(self.traits, start, sizes)
        return findings, attributes

    def _combine_attributes(self, before: Mapping[str, Verdicts], later: Mapping[str, Verdicts]) -> dict[str, Verdicts]:
        """What is known of attributes after another trial; doubt stays."""
        known = {**before, **later}
        for name in before.keys() & later.keys():
            known[name], clashes = refine(before[name], Findings(dict(later[name])))
            self.unmergeable |= {name} if clashes else set()
        return {name: found for name, found in known.items() if name not in self.unmergeable}

    def _check_independence(self, sandbox: Sandbox, sizes: tuple[int, int], start: int, findings: Findings) -> None:
        """The same samples in another order, and with others: what is theirs alone does not change with that.

        Asked of rows, which may have been in the order that `forward` brings them into, and of integers that rounding
        may have turned over.
        """
        n = sum(sizes)
        singles = self._split([start, *[1] * n, self.batch_size - start - n], n)

        def run(who: Sequence[int], kept: Sequence[int], factor: float = 1.0) -> Any:
            values = []
            for at, role in enumerate(self.plan.placements):
                column = [singles[index][at] for index in who]
                loud = [v if place in kept else scale_floats(role, v, factor) for place, v in enumerate(column)]
                values.append(unsplit(role, column if factor == 1.0 else loud))
            return self._call_sandbox(sandbox, values)[0]

        try:
            usual = _call_user_code(run, range(n), range(n))
        except _TrialFailed:
            return  # samples that were put together one by one are not what it takes
        if findings.needs_reordering:
            self._check_reversed(usual, lambda: _call_user_code(run, range(n)[::-1], range(n)), sizes, findings)
        for who, kept, factor in (
            substituted_batches(sizes) if findings.mismatched_integers and not findings.errors else ()
        ):
            try:
                output = _call_user_code(run, who, kept, factor)
            except _TrialFailed:
                continue  # it does not like such company
            path = find_changed_path(findings.outputs, findings.mismatched_integers, usual, output, kept)
            if path is not None:
                why = "its entries depend on other samples of the batch: they change with their company"
                findings.errors[path] = depends_on_other_samples(path, why, sizes)
                return

    def _check_reversed(
        self, usual: Any, turned_round: Callable[[], Any], sizes: tuple[int, int], findings: Findings
    ) -> None:
        """See whether samples in reverse order give the same in reverse; then rows in order are nothing but that."""
        try:
            output = turned_round()
        except _TrialFailed:
            return
        for path in findings.needs_reordering:
            verdict = findings.outputs.get(path)
            if is_order_dependent(path, verdict, usual, output):
                why = "its entries depend on other samples of the batch: they change with the order of the samples"
                findings.errors[path] = depends_on_other_samples(path, why, sizes)
            elif isinstance(verdict, OutputShard):
                findings.outputs[path] = OutputShard(verdict.rank, verdict.dim)
                findings.unresolved.discard(path)

    def _choose_window(self, sizes: tuple[int, int], rivals: Sequence[Any]) -> int:
        """The first sample of a trial: where rivals differ, or else labels and masks, or any integers there are."""
        named = rivals or (not self.seen_traits and candidate_counts(self.inputs, self.batch_size))
        telling = None if named else discriminating_window(self.traits, self.seen_traits, sizes)
        return find_weight_window(self.inputs, self.batch_size, sizes, rivals) if telling is None else telling

    def _call_sandbox(self, sandbox: Sandbox, values: Sequence[Any]) -> RunResult:
        mine = _call_user_code(copy_arguments, values)
        if sandbox.double_precision:
            mine = [map_tensors(to_double, value) for value in mine]
        named = dict(zip(self.plan.names[self.num_positional :], mine[self.num_positional :], strict=True))
        return _call_user_code(sandbox.run, self.method, mine[: self.num_positional], named)

    def _run_parts(
        self, sandbox: Sandbox, sizes: tuple[int, int], start: int
    ) -> tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], list[RunResult]]:
        """The arguments of both parts and of the whole, and what each gave."""
        apart = self._split([start, *sizes, self.batch_size - start - sum(sizes)], 2)
        together = self._split([start, sum(sizes), self.batch_size - start - sum(sizes)], 1)
        inputs, runs = [], []
        places = [(start, sizes[0]), (start + sizes[0], sizes[1]), (start, sum(sizes))]
        for shard, (first, count) in zip((*apart, *together), places, strict=True):
            for slot in self.carried_state:
                sandbox.assign_shard(slot, slot.split([first, count, self.batch_size - first - count])[1])
            inputs.append(dict(zip(self.plan.names, shard, strict=True)))
            runs.append(self._call_sandbox(sandbox, shard))
        return (inputs[0], inputs[1], inputs[2]), runs

    def part_arguments(self, sandbox: Sandbox, sizes: tuple[int, int]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """The arguments of both parts and of the whole; each is to be used before the next is asked for."""
        total, rest = sum(sizes), self.batch_size - sum(sizes)
        shards = [*self._split([0, *sizes, rest], 2), *self._split([0, total, rest], 1)]
        for shard, (first, count) in zip(shards, [(0, sizes[0]), sizes, (0, total)], strict=True):
            for slot in self.carried_state:
                sandbox.assign_shard(slot, slot.split([first, count, self.batch_size - first - count])[1])
            mine = copy_arguments(shard)
            named = dict(zip(self.plan.names[self.num_positional :], mine[self.num_positional :], strict=True))
            yield mine[: self.num_positional], named

    def _split(self, sizes: Sequence[int], wanted: int) -> list[list[Any]]:
        """The first `wanted` parts after the samples that are skipped."""
        present = [size for size in sizes if size]
        skipped = 1 if sizes[0] else 0
        plan = SplitPlan(self.batch_size, tuple(present), self.plan.names, self.plan.placements)
        with torch.no_grad():
            shards = apply_plan(plan, self.values)[skipped : skipped + wanted]
            return [list(self.place(shard)) for shard in shards]


class _TrialFailed(Exception):
    """The module, or an argument, has something against a trial; the call itself may be fine."""


def _call_user_code(work: Callable[..., T], *args: Any) -> T:
    """What some work gives that runs code of the user's."""
    try:
        return work(*args)
    except Exception as error:
        raise _TrialFailed(f"{type(error).__name__}: {error}".strip().splitlines()[0]) from error


def _may_be_running_total(old: Any, said: Findings) -> bool:
    """Whether an attribute may be a running total, which looks like a sum only as long as it starts from zero."""
    verdict = said.outputs.get(())
    if not isinstance(verdict, Partial) or verdict.rules != ("sum",):
        return False
    return old == 0 if isinstance(old, (int, float)) else isinstance(old, Tensor) and not bool(old.any())
