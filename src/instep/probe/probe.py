"""The probe: finds out how outputs merge by running a few samples as two parts and as one batch.

A trial runs on a private copy of the module before the first call of each structure. `judge` derives the verdicts,
`sandbox` isolates the runs, `record` keeps the results. Where no trial can run, outputs merge by their shapes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from instep.errors import MergeError, StateError, StructureError
from instep.probe.gradients import are_gradients_additive
from instep.probe.judge import UserRules
from instep.probe.lines import add_tried_lines, offer_dim_1
from instep.probe.record import MAX_FAILED_MERGES, MAX_TRIALS, ProbeRecord, common_record, contradict
from instep.probe.trial import OutputCheck, Trial
from instep.probe.trial_call import TrialCall
from instep.probe.window import replicated_scalars
from instep.replicas.state.merge import StateMerger
from instep.structure.host_scalars import Scalar
from instep.structure.merge import Merger
from instep.structure.merge_messages import draws_hide_values, loss_not_additive
from instep.structure.merge_rules import MergeContext, WeightedBy
from instep.structure.placements import Nested, PerSample, Replicate, Shard, contains_placement
from instep.structure.plan import SplitPlan
from instep.structure.problems import keyword_arguments
from instep.structure.tree import structure_key
from instep.structure.verdicts import Verdict
from instep.structure.weights import Weight, WeightTransfer

MAX_STRUCTURES = 32
MAX_RECORDS = 32
"""Records of one structure, which differ in the strings among the arguments, and in the numbers if these matter."""
_MAX_CACHED_PLANS = 512

Values: TypeAlias = tuple[Any, ...]


class Outcome(enum.Enum):
    """What trials on few and on more samples show about a reading of the arguments."""

    AGREES = enum.auto()
    """Values show how each output is merged, and at least one output is not constant."""
    FOLLOWS_BATCH = enum.auto()
    """An output follows the batch by its structure. Zeros and shapes prove nothing."""
    UNPROVEN = enum.auto()
    REFUTED = enum.auto()


class Probe:
    """Probe records for the calls of one method. Keeps the merger's verdicts up to date."""

    def __init__(
        self,
        method: str,
        merger: Merger,
        min_part: int = 1,
        *,
        additive_output: str | None = None,
        check: OutputCheck | None = None,
    ) -> None:
        self.method = method
        self.check = check
        """Validates the outputs of a trial, where the caller knows more about them (`with_loss`)."""
        self.additive_output = additive_output
        """The output that has to be the sum of the parts' outputs, if the caller knows it."""
        self.min_part = min_part
        self.merger = merger
        self.user_rules = UserRules(merger.path_rules, merger.default_rule, merger.dim_spec)
        self.last_record = ProbeRecord(summary="not tried yet")
        self.numbers_matter = False
        """Whether a trial with another number among the arguments contradicted the verdicts."""
        self._records: dict[Any, dict[Values, ProbeRecord]] = {}
        """By structure and mode of the call, then by the strings among its arguments, and numbers if these matter."""
        self._by_plan: dict[Any, tuple[SplitPlan, ProbeRecord]] = {}
        self._plain_by_plan: dict[int, tuple[SplitPlan, list[bool]]] = {}
        self._pending_weights: WeightTransfer | None = None
        """The weights of the call that was prepared, until the replicas have run."""
        self._can_disagree = False
        """Whether they have to be compared then."""

    def prepare(self, call: TrialCall, fingerprint: int, *, compare_weights: bool = False) -> None:
        """Run a trial if one is due, and give the merger the verdicts for this call.

        `fingerprint` identifies the module's modes and settings. With `compare_weights`, a trial is also run if the
        rules that remain for a mean give the shards of this call different weights. That reads from the device of the
        arguments, so `weights_disagree` does it after the replicas have run.

        The verdicts for attributes are in `last_record`. Raises `MergeError` for outputs that no rule explains.
        """
        record, numbers = self._find_or_add_record(call.plan, call.values, fingerprint)
        if numbers != record.numbers and not self._try_numbers(call, record, numbers):
            self.numbers_matter = True
            self._records.clear()
            self._by_plan.clear()
            self.prepare(call, fingerprint, compare_weights=compare_weights)
            return
        if record.error:
            raise MergeError(record.error)
        record.count_call()
        trial_due, check_due = record.trials.is_due, record.integer_checks.is_due
        weights = self._compare_weights(record, call) if compare_weights and not trial_due else []
        if trial_due or weights or check_due:
            trial = self._trial(call)
            if trial_due or weights or trial.has_untested_traits(record):
                self._run_trial(trial, record, weights)
                if check_due and not trial_due:
                    record.integer_checks.record()
            record.schedule_check()
        self._check_additive(record)
        self.last_record = record
        self.merger.set_verdicts(record.outputs)
        self.merger.known_weights = {}
        self._pending_weights = self._start_weights(record, call)
        self._can_disagree = not trial_due and not compare_weights

    def prepare_known(self, plan: SplitPlan, values: Sequence[Any], fingerprint: int) -> bool:
        """Do what `prepare` does for a call that needs no trial and no weights. Returns False for any other call."""
        record, numbers = self._find_or_add_record(plan, values, fingerprint)
        if numbers != record.numbers or record.error or record.is_due_next:
            return False
        if self.merger.weights or record.ambiguous() or (torch.is_grad_enabled() and not record.graph_checked):
            return False
        record.count_call()
        self._check_additive(record)
        self.last_record = record
        self.merger.set_verdicts(record.outputs)
        self.merger.known_weights = {}
        self._pending_weights, self._can_disagree = None, False
        return True

    def _start_weights(self, record: ProbeRecord, call: TrialCall) -> WeightTransfer | None:
        """Start to read the weights that the merge needs, and those that have to be compared; None if there are none.

        The replicas run meanwhile.
        """
        compared = [weight for verdict in record.ambiguous() for weight in verdict.weights]
        weights = list(dict.fromkeys([*self.merger.weights, *compared]))
        return WeightTransfer(weights, call.shards()) if weights else None

    def weights_disagree(self, sizes: tuple[int, ...]) -> bool:
        """Whether the call has to run again, prepared with `compare_weights`. Called when the replicas have run."""
        pending, self._pending_weights = self._pending_weights, None
        if pending is None:
            return False
        self.merger.known_weights = pending.wait()
        return self._can_disagree and bool(_disagreeing_weights(self.last_record, sizes, self.merger.known_weights))

    def _compare_weights(self, record: ProbeRecord, call: TrialCall) -> list[Any]:
        """The weights of those rules that remain for a mean and disagree on this call."""
        pending = self._start_weights(record, call)
        return [] if pending is None else _disagreeing_weights(record, call.plan.sizes, pending.wait())

    def _try_numbers(self, call: TrialCall, record: ProbeRecord, numbers: Values) -> bool:
        """Run a trial with other numbers than in the last call, if one is due. Returns False if it contradicts others.

        Numbers such as a step or a temperature change often and rarely decide how outputs merge.
        """
        if record.error:
            return False
        if not record.count_numbers(numbers):
            return True
        trial, found = self._trial(call), ProbeRecord(seen_traits=record.seen_traits)
        try:
            self._run_trial(trial, found)
        except MergeError:
            return False
        if found.status != "tried":
            return True
        record.schedule_check()
        before = record.outputs
        return not any(contradict(before[path], new) for path, new in found.outputs.items() if path in before)

    def try_reading(self, call: TrialCall) -> Outcome:
        """Run trials of a call with another reading of its arguments, or with split state, into a record of its own."""
        record = ProbeRecord()
        try:
            for use_large_parts in (False, True):
                self._run_trial(self._trial(call, use_large_parts=use_large_parts), record)
                self._check_additive(record)
        except (MergeError, StructureError):
            return Outcome.REFUTED
        if record.status != "tried":
            return Outcome.REFUTED
        verdicts = [v for v in record.outputs.values() if not isinstance(v.placement, (Replicate, Nested))]
        if verdicts and all(v.proven or v.ops for v in verdicts):
            return Outcome.AGREES
        follows = any(isinstance(v.placement, (PerSample, Shard)) for v in verdicts)
        return Outcome.FOLLOWS_BATCH if follows else Outcome.UNPROVEN

    def retry(self, call: TrialCall) -> bool:
        """Probe the last call again because its outputs did not fit the verdicts; returns whether these changed.

        For example, selected rows look like a batch dimension if the samples tried had all their rows selected.
        """
        record = self.last_record
        if record.failed_merges >= MAX_FAILED_MERGES or not record.trials.count:
            return False
        record.failed_merges += 1
        before = record.outputs
        record.outputs = {path: verdict for path, verdict in before.items() if verdict.ops}
        try:
            self._run_trial(self._trial(call, use_large_parts=True), record)
        finally:
            record.outputs = {**before, **record.outputs}
        self.merger.set_verdicts(record.outputs)
        return record.outputs != before

    def explain_failed_merge(self, error: MergeError) -> MergeError:
        """The error of a merge, with the reason if random numbers kept the probe from a verdict."""
        return draws_hide_values(error) if self.last_record.draws_randomly else error

    def add_tried_lines(
        self,
        error: MergeError | StateError,
        call: TrialCall,
        state_merger: StateMerger,
        in_dim_1: TrialCall | None = None,
    ) -> None:
        """Try rules for the problems of a failed call, and add the lines that solve them to its error.

        If none merges an output, the same call with the samples in dim 1 is tried, if there is one.
        """
        before = str(error)
        add_tried_lines(error, self._trial(call), state_merger)
        if isinstance(error, MergeError) and in_dim_1 is not None:
            unsolved = not any(problem.lines for problem in error.problems if problem.keyword == "merge")
            if unsolved and self.try_reading(in_dim_1) is Outcome.AGREES:
                offer_dim_1(error)
            elif unsolved and (rules := self.rules_in_dim_1(in_dim_1, state_merger)):
                offer_dim_1(error, rules)
        for record in (record for records in self._records.values() for record in records.values()):
            if record.error == before:
                record.error = str(error)

    def rules_in_dim_1(self, call: TrialCall, state_merger: StateMerger) -> str:
        """Rules for the outputs of a call with the samples in dim 1 that need one; empty if some have none.

        Also empty for modules without layers for sequences `[T, B]`.
        """
        if not has_sequence_first_layers(call.module):
            return ""
        try:
            self._run_trial(self._trial(call), ProbeRecord())
        except MergeError as error:
            add_tried_lines(error, self._trial(call), state_merger)
            if error.problems and all(problem.lines for problem in error.problems):
                return ", ".join(keyword_arguments([(problem.name, problem.lines[0]) for problem in error.problems]))
        return ""

    def gradients_add_up(self, call: TrialCall) -> bool:
        """Whether the gradients of two parts of the last call's batch add up to the gradients of the whole."""
        trial = self._trial(call)
        return not trial.can_run or are_gradients_additive(trial, self.last_record.outputs)

    def _trial(self, call: TrialCall, *, use_large_parts: bool = False) -> Trial:
        return Trial(self.method, self.user_rules, call, self.min_part, self.check, use_large_parts=use_large_parts)

    def _run_trial(self, trial: Trial, record: ProbeRecord, weights: Sequence[Any] = ()) -> None:
        try:
            trial.run(record, weights)
        except MergeError as error:
            if self.additive_output is None or error is trial.check_error:
                raise
            raise loss_not_additive() from error

    def _check_additive(self, record: ProbeRecord) -> None:
        if self.additive_output is not None and _is_proven_not_sum(record.outputs.get((self.additive_output,))):
            raise loss_not_additive()

    def claim_graph_check(self) -> bool:
        """Returns True once for each record: the caller then searches the autograd graph for custom functions."""
        claimed, self.last_record.graph_checked = self.last_record.graph_checked, True
        return not claimed

    def find_record(self, plan: SplitPlan, values: Sequence[Any], fingerprint: int) -> ProbeRecord | None:
        """The record that such a call would use, if there is one. Changes nothing."""
        group, plain = self._record_keys(plan, values, fingerprint)
        records = self._records.get(group, {})
        record = records.get(plain)
        if record is None and len(records) >= MAX_RECORDS:
            record = common_record(tuple(records.values()))
        return record if record is not None and record.summary else None

    def _find_or_add_record(
        self, plan: SplitPlan, values: Sequence[Any], fingerprint: int
    ) -> tuple[ProbeRecord, Values]:
        """The record of a call, and those numbers among its arguments that are not part of the structure."""
        switches, plain, numbers = self._plain_values(plan, values)
        key = (id(plan), fingerprint, switches, plain)
        entry = self._by_plan.get(key)
        if entry is not None:
            return entry[1], numbers
        group, plain = self._record_keys(plan, values, fingerprint)
        record = self._add_record(group, plain)
        if len(self._by_plan) >= _MAX_CACHED_PLANS:
            self._by_plan.clear()
        self._by_plan[key] = plan, record
        return record, numbers

    def _add_record(self, group: Any, plain: Values) -> ProbeRecord:
        """The record of a call, made if there is none.

        A structure whose records are full gets a common record if they agree. Otherwise the oldest one is dropped and
        the call is tried: a record that is untried is never used without a trial.
        """
        records = self._records.get(group)
        if records is None:
            if len(self._records) >= MAX_STRUCTURES:
                del self._records[next(iter(self._records))]
            records = self._records[group] = {}
        if plain in records:
            return records[plain]
        if len(records) >= MAX_RECORDS:
            common = common_record(tuple(records.values()))
            if common is not None:
                return common
            del records[next(iter(records))]
        record = records[plain] = ProbeRecord()
        return record

    def _record_keys(self, plan: SplitPlan, values: Sequence[Any], fingerprint: int) -> tuple[Any, Values]:
        switches, plain, _ = self._plain_values(plan, values)
        structure = tuple([structure_key(value) for value in values])
        return (fingerprint, switches, plan.names, plan.reading, structure), plain

    def _plain_values(self, plan: SplitPlan, values: Sequence[Any]) -> tuple[Values, Values, Values]:
        """Replicated plain values, which may decide what the outputs mean: switches, strings, numbers.

        Numbers that matter are returned with the strings.
        """
        switches: list[Any] = []
        plain: list[Any] = []
        numbers: list[Any] = []
        for placement, value, has_plain in zip(plan.placements, values, self._has_plain_values(plan), strict=True):
            for leaf in replicated_scalars(placement, value) if has_plain else ():
                if leaf is None or isinstance(leaf, (bool, enum.Enum)):
                    switches.append((type(leaf), leaf))
                elif isinstance(leaf, (int, float)) and not self.numbers_matter:
                    numbers.append((type(leaf), leaf))
                else:
                    plain.append((type(leaf), leaf))
        return tuple(switches), tuple(plain), tuple(numbers)

    def _has_plain_values(self, plan: SplitPlan) -> list[bool]:
        """For each argument, whether it contains replicated values."""
        entry = self._plain_by_plan.get(id(plan))
        if entry is None or entry[0] is not plan:
            if len(self._plain_by_plan) >= _MAX_CACHED_PLANS:
                self._plain_by_plan.clear()
            flags = [contains_placement(Replicate, placement) for placement in plan.placements]
            entry = self._plain_by_plan[id(plan)] = plan, flags
        return entry[1]


def _disagreeing_weights(
    record: ProbeRecord, sizes: tuple[int, ...], known: Mapping[Weight, list[Scalar]]
) -> list[Any]:
    """The weights of those rules that remain for a mean and disagree on shards with these sizes and weights."""
    if record.trials.count > 4 * MAX_TRIALS:
        return []
    context = MergeContext(sizes, weights=dict(known))
    disagreeing = [verdict for verdict in record.ambiguous() if not verdict.ops_agree(context)]
    return [op.weight for verdict in disagreeing for op in verdict.ops if isinstance(op, WeightedBy)]


def _is_proven_not_sum(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.proven and "sum" not in verdict.ops


def has_sequence_first_layers(module: nn.Module) -> bool:
    """Whether a module has recurrent or attention layers whose inputs are `[T, B, F]`, or cells, which run in loops."""
    layers = (nn.RNNBase, nn.MultiheadAttention)
    return any(isinstance(m, nn.RNNCellBase) or (isinstance(m, layers) and not m.batch_first) for m in module.modules())
