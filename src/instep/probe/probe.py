"""Runs a few samples as two parts and as one batch, before the first call of a structure, to find out how outputs merge."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from instep.errors import MergeError
from instep.probe.gradients import are_gradients_additive
from instep.probe.judge import UserRules
from instep.probe.record import MAX_FAILED_MERGES, MAX_TRIALS, ProbeRecord, is_proven
from instep.probe.trial import OutputCheck, PlaceFunction, Trial
from instep.replicas.state.carried import CarriedValue
from instep.structure.merge import Merger
from instep.structure.merge_messages import loss_not_additive
from instep.structure.merge_rules import MergeContext, WeightedBy
from instep.structure.output_placements import Partial, Verdict, Verdicts
from instep.structure.placements import Nested, Placement, PreSplit, Replicate, contains_placement
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan
from instep.structure.tree import SCALARS, Path, flatten_one_level, structure_key

MAX_RECORDS = 32


class Probe:
    """What trials said about the calls of one method; its merger follows it."""

    def __init__(
        self,
        method: str,
        merger: Merger,
        least: int = 1,
        *,
        additive_output: str | None = None,
        check: OutputCheck | None = None,
    ) -> None:
        self.method = method
        self.check = check
        """Says what is wrong with the outputs of a trial, where more is known of them than numbers alone tell."""
        self.additive_output = additive_output
        """The output that has to be the sum of what the parts give, if it is known already what outputs are."""
        self.min_part = least
        self.merger = merger
        self.user_rules = UserRules(merger.path_rules, merger.default_rule, merger.dim_spec)
        self.last_record = ProbeRecord(summary="nothing was tried yet")
        self._records: dict[Any, ProbeRecord] = {}
        self._records_by_outline: dict[Any, list[ProbeRecord]] = {}
        self._by_plan: dict[Any, tuple[SplitPlan, ProbeRecord]] = {}
        self._plain_by_plan: dict[int, tuple[SplitPlan, list[bool]]] = {}

    def prepare(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        kind: int,
        place: PlaceFunction,
        carried: Sequence[CarriedValue] = (),
    ) -> dict[str, Verdicts]:
        """See to it that this call's outputs are known, as far as they can be; `MergeError` for what nothing explains.

        `kind` tells apart what the module has been: its modes and settings. Gives what is known of the attributes that
        `forward` sets.
        """
        known = self._record_for(plan, values, kind)
        if known.error:
            raise MergeError(known.error)
        due = known.is_trial_due()
        rivals = [] if due else self._ambiguous_weights(known, plan, values)
        looks = known.calls >= known.next_check
        if due or rivals or looks:
            attempt = Trial(
                self.method, self.user_rules, plan, values, positional, place, self.min_part, carried, self.check
            )
            try:
                if due or rivals or attempt.has_untested_traits(known):
                    attempt.run(source, device, known, rivals)
                    known.checks += looks and not due
            except MergeError as error:
                raise self._user_error(error, attempt) from error
            known.schedule_check()
        if self.additive_output is not None and _is_proven_not_sum(known.outputs.get((self.additive_output,))):
            raise loss_not_additive()
        self.last_record = known
        self.merger.set_verdicts(known.outputs)
        return known.attributes

    def retry(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: PlaceFunction,
        carried: Sequence[CarriedValue] = (),
    ) -> bool:
        """After outputs that what is known does not fit: whether another trial, on this batch, says something else.

        Rows that were all selected look like the samples themselves, and what was zero so far like anything.
        """
        known = self.last_record
        if known.failed_merges >= MAX_FAILED_MERGES or not known.trials:
            return False
        known.failed_merges += 1
        before = known.outputs
        known.outputs = {path: verdict for path, verdict in before.items() if isinstance(verdict, Partial)}
        attempt = Trial(
            self.method, self.user_rules, plan, values, positional, place, self.min_part, carried, self.check
        )
        attempt.use_large_parts = True
        try:
            attempt.run(source, device, known, ())
        except MergeError as error:
            raise self._user_error(error, attempt) from error
        finally:
            known.outputs = {**before, **known.outputs}
        self.merger.set_verdicts(known.outputs)
        return known.outputs != before

    def _user_error(self, error: MergeError, attempt: Trial) -> MergeError:
        return error if self.additive_output is None or error is attempt.check_error else loss_not_additive()

    def gradients_add_up(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: PlaceFunction,
        carried: Sequence[CarriedValue],
    ) -> bool:
        """Whether, in a call like the last one, gradients of parts were seen to add up to those of the whole."""
        attempt = Trial(self.method, self.user_rules, plan, values, positional, place, self.min_part, carried)
        ready = attempt.batch_size < 2 or any(contains_placement(PreSplit, role) for role in plan.placements)
        return ready or are_gradients_additive(attempt, source, device, self.last_record.outputs)

    def claim_graph_check(self) -> bool:
        """Whether the graph of a call like the last one was not looked at yet; it is from now on."""
        before, self.last_record.graph_checked = self.last_record.graph_checked, True
        return not before

    def find_record(self, plan: SplitPlan, values: Sequence[Any], kind: int) -> ProbeRecord | None:
        """What is known about such a call, if one was tried."""
        known = self._record_for(plan, values, kind)
        return known if known.summary else None

    def _record_for(self, plan: SplitPlan, values: Sequence[Any], kind: int) -> ProbeRecord:
        pairs = zip(plan.placements, values, self._plain_arguments(plan), strict=True)
        flags = (kind, *[flag for role, value, plain in pairs if plain for flag in _plain_values(role, value)])
        key = (id(plan), flags)
        entry = self._by_plan.get(key)
        if entry is not None:
            return entry[1]
        loose = (plan.names, tuple([structure_key(value) for value in values]))
        known = self._records.get((flags, loose))
        if known is None and len(self._records) < MAX_RECORDS:
            known = self._records[flags, loose] = ProbeRecord()
            self._records_by_outline.setdefault(loose, []).append(known)
        elif known is None:
            known = _common_record(self._records_by_outline.get(loose, ()))
        if len(self._by_plan) >= 512:
            self._by_plan.clear()
        self._by_plan[key] = plan, known
        return known

    def _plain_arguments(self, plan: SplitPlan) -> list[bool]:
        """Which of the arguments hold plain values that every replica is given."""
        entry = self._plain_by_plan.get(id(plan))
        if entry is None or entry[0] is not plan:
            if len(self._plain_by_plan) >= 512:
                self._plain_by_plan.clear()
            entry = self._plain_by_plan[id(plan)] = (
                plan,
                [contains_placement(Replicate, role) for role in plan.placements],
            )
        return entry[1]

    def _ambiguous_weights(self, known: ProbeRecord, plan: SplitPlan, values: Sequence[Any]) -> list[Any]:
        """The weights among which this call would have to choose."""
        rivals = known.ambiguous()
        if not rivals or known.trials > 4 * MAX_TRIALS:
            return []
        shards = apply_plan(plan, values)
        inputs = tuple([dict(zip(plan.names, shard, strict=True)) for shard in shards])
        scene = MergeContext(plan.sizes, (None,) * plan.parts, inputs)
        torn = [verdict for verdict in rivals if not verdict.rules_agree(scene)]
        return [rule.weight for verdict in torn for rule in verdict.rules if isinstance(rule, WeightedBy)]


def _is_proven_not_sum(verdict: Verdict | None) -> bool:
    """Whether numbers showed that an output is something else than a sum."""
    return verdict is not None and verdict.proven and not (isinstance(verdict, Partial) and "sum" in verdict.rules)


def _plain_values(role: Placement, value: Any) -> Iterator[Any]:
    """Plain values that every replica is given, and that may decide what the outputs mean: words, numbers, switches."""
    if isinstance(role, Replicate):
        if isinstance(value, (*SCALARS, enum.Enum)):
            yield type(value), value
    elif isinstance(role, Nested):
        node = flatten_one_level(value)
        assert node is not None
        for below, child in zip(role.placements, node.children, strict=True):
            yield from _plain_values(below, child)


def _common_record(others: Sequence[ProbeRecord]) -> ProbeRecord:
    """What calls that differ only in their words have in common: then words are just texts."""
    said: dict[Path, set[Verdict]] = {}
    for other in others:
        for path, verdict in other.outputs.items():
            if is_proven(verdict):
                said.setdefault(path, set()).add(verdict)
    found = {path: next(iter(verdicts)) for path, verdicts in said.items() if len(verdicts) == 1}
    last = others[-1] if others else ProbeRecord()
    words = "as other calls of this structure were found to be"
    return ProbeRecord(
        found,
        last.attributes,
        last.unmergeable,
        last.sample_dependent,
        last.constant,
        summary=words,
        next_trial=1 << 62,
    )
