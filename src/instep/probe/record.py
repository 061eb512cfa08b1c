"""Probe results for one call structure, and when to probe it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from instep.errors import MergeError
from instep.probe.judge import Findings
from instep.probe.window import Trait
from instep.runtime.backoff import Backoff
from instep.structure.merge_messages import conflicting_trials
from instep.structure.placements import Partial, Ragged, Replicate
from instep.structure.tree import Path
from instep.structure.verdicts import Undetermined, Verdict, Verdicts

MAX_TRIALS, MAX_FAILED_MERGES = 6, 4
EAGER_CHECKS, MAX_CHECKS = 3, 9
EAGER_NUMBERS = 3
"""How many values of a number among the arguments are tried when they first appear."""


@dataclass
class ProbeRecord:
    """What trials have shown about the outputs and state of calls with one structure."""

    outputs: dict[Path, Verdict] = field(default_factory=dict)
    attributes: dict[str, Verdicts] = field(default_factory=dict)
    """Verdicts for tensors that `forward` assigns to attributes, by dotted name."""
    unmergeable: frozenset[str] = frozenset()
    """Attributes whose whole-batch value cannot be computed from the parts' values."""
    sample_dependent: frozenset[str] = frozenset()
    """State whose new value depends on the samples."""
    constant: frozenset[str] = frozenset()
    """Attributes that got the same value for all samples tried."""
    status: Literal["untried", "tried", "failed"] = "untried"
    """Whether a trial ran to its end, or the module failed in every trial."""
    graph_checked: bool = False
    """Whether the autograd graph was searched for custom `torch.autograd.Function`s."""
    draws_randomly: bool = False
    """Whether the last trial compared only shapes, because `forward` draws random numbers that cannot be replaced."""
    calls_batch_norm: bool = False
    """Whether `forward` calls the functional batch norm in training, other than by torch's own layers."""
    summary: str = ""
    """What was tried, for `explain`."""
    error: str = ""
    """Why outputs cannot be merged; later samples that happen to fit do not clear it."""
    seen_traits: set[Trait] = field(default_factory=set)
    """Integer arguments on which a mean has been tested with unequal counts."""
    trials: Backoff = field(default_factory=lambda: Backoff(limit=MAX_TRIALS))
    integer_checks: Backoff = field(default_factory=lambda: Backoff(limit=MAX_CHECKS, eager=EAGER_CHECKS))
    """When to search a call for integers on which its means have not been tested."""
    readings_tried: bool = False
    """Whether other readings of the arguments were tried because the module failed in the first trial."""
    failed_merges: int = 0
    """How many calls had outputs that did not fit the verdicts and were probed again."""

    numbers: tuple[Any, ...] = ()
    """The numbers among the arguments of the last call."""
    tried_numbers: dict[int, list[Any]] = field(default_factory=dict)
    """The first values of each number."""
    number_trials: Backoff = field(default_factory=lambda: Backoff(limit=MAX_CHECKS))
    """When to run a trial for further values. Counts calls in which a number has changed."""

    def __post_init__(self) -> None:
        self.integer_checks.stop()  # until a trial finds a mean

    def count_call(self) -> None:
        """Advance both schedules by one call."""
        self.trials.advance()
        self.integer_checks.advance()

    @property
    def is_due_next(self) -> bool:
        """Whether a trial or a search is due at the next call."""
        return self.trials.is_due_next or self.integer_checks.is_due_next

    def count_numbers(self, numbers: tuple[Any, ...]) -> bool:
        """Count a call with other numbers than the last one. Returns whether to run a trial with them."""
        self.numbers = numbers
        new = [
            (tried, number) for tried, number in zip(self._tried(numbers), numbers, strict=True) if number not in tried
        ]
        if not new:
            return False
        self.number_trials.advance()
        eager = [(tried, number) for tried, number in new if len(tried) < EAGER_NUMBERS]
        for tried, number in eager:
            tried.append(number)
        if not eager and not self.number_trials.is_due:
            return False
        self.number_trials.record()
        return self.status != "untried"

    def _tried(self, numbers: tuple[Any, ...]) -> list[list[Any]]:
        return [self.tried_numbers.setdefault(index, []) for index in range(len(numbers))]

    def schedule_trial(self, useful: bool) -> None:
        """Count a trial. Schedule the next one if another may show more."""
        self.trials.record()
        if not useful:
            self.trials.stop()

    def schedule_check(self) -> None:
        """Schedule the next search for untested integers, if any verdict is a mean."""
        if has_mean(self.outputs, *self.attributes.values()):
            self.integer_checks.reschedule()
        else:
            self.integer_checks.stop()

    def ambiguous(self) -> list[Verdict]:
        """Verdicts that more than one merge rule still fits."""
        tables = (self.outputs, *self.attributes.values()) if self.attributes else (self.outputs,)
        return [v for table in tables for v in table.values() if v.alternatives]


def common_record(records: Sequence[ProbeRecord]) -> ProbeRecord | None:
    """A record for a further plain argument value, from the records of other values; None if they do not agree.

    Records agree if none contradicts a proven verdict of another, or if the module failed in the trials of all.
    """
    last = records[-1]
    if any(record.status != last.status or record.error for record in records) or last.status == "untried":
        return None
    proven: dict[Path, Verdict] = {}
    for record in records:
        for path, verdict in record.outputs.items():
            if verdict.proven and proven.setdefault(path, verdict) != verdict:
                return None
    record = ProbeRecord(
        {**last.outputs, **proven},
        last.attributes,
        last.unmergeable,
        last.sample_dependent,
        last.constant,
        status=last.status,
        summary=f"the verdicts of {len(records)} calls with other plain arguments, which agree",
        calls_batch_norm=last.calls_batch_norm,
        readings_tried=last.readings_tried,
        trials=Backoff(limit=MAX_TRIALS, count=1),
    )
    record.trials.stop()
    return record


def has_mean(*tables: Verdicts) -> bool:
    """Whether any verdict is a mean."""
    return any(verdict.is_mean for table in tables for verdict in table.values())


def is_proven(verdict: Verdict | None) -> bool:
    """Whether there is a verdict and a trial proved it."""
    return verdict is not None and verdict.proven


def is_settled(verdict: Verdict | None) -> bool:
    """Whether no later trial can overturn a verdict. A mean can be: the samples tried may have had equal weights."""
    return verdict is not None and verdict.proven and not verdict.is_mean


def combine(first: Findings, second: Findings) -> Findings:
    """Findings of two trials of the same call. Proven verdicts win; unresolved paths are those unresolved in both."""
    outputs, conflicts = refine(first.outputs, second)
    return Findings(
        outputs,
        {path for path in first.unresolved & second.unresolved if not is_proven(outputs.get(path))},
        {**first.errors, **second.errors, **conflicts},
        first.mismatched_integers | second.mismatched_integers,
        first.needs_reordering | second.needs_reordering,
    )


def refine(before: Verdicts, findings: Findings) -> tuple[dict[Path, Verdict], dict[Path, MergeError]]:
    """Update verdicts with a new trial. Of competing merge rules, keep those that fit every trial.

    Also returns an error for each proven reduction that the new trial contradicts.
    """
    outputs, conflicts = dict(before), {}
    for path, new in findings.outputs.items():
        old = outputs.get(path)
        if old is not None and old.ops and new.ops:
            remaining = old.intersect(new)
            if remaining is None and old.proven:
                conflicts[path] = conflicting_trials(path, old.description, new.description)
            else:
                outputs[path] = remaining or new
        elif old is None or not (
            old.proven or (isinstance(new.placement, Undetermined) and isinstance(old.placement, (Replicate, Partial)))
        ):
            outputs[path] = new
    return outputs, conflicts


def contradict(first: Verdict, second: Verdict) -> bool:
    """Whether two proven verdicts exclude each other."""
    if not (first.proven and second.proven):
        return False
    if first.ops and second.ops:
        return first.intersect(second) is None
    return first.placement != second.placement


def is_inconclusive(verdict: Verdict) -> bool:
    """Whether the values were nonzero but could not distinguish a sum from a mean."""
    return isinstance(verdict.placement, Undetermined) and not verdict.placement.all_zero


def needs_more_samples(verdict: Verdict) -> bool:
    """Whether other samples may tell more: for a weighted mean, and for a verdict that the values did not prove."""
    if verdict.ops:
        return verdict.is_mean and verdict.ops != ("mean",)
    return is_inconclusive(verdict) or (isinstance(verdict.placement, Ragged) and not verdict.proven)


def has_undetermined(findings: Findings) -> bool:
    """Whether some values were zero, or equal for all samples, so that a few samples prove nothing."""
    verdicts = [findings.outputs.get(path) for path in findings.unresolved]
    return any(verdict is None or isinstance(verdict.placement, (Replicate, Undetermined)) for verdict in verdicts)
