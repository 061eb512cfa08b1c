"""Probe results for one call structure, and when to probe it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from instep.errors import MergeError
from instep.probe.judge import Findings
from instep.probe.window import Trait
from instep.structure.merge_messages import conflicting_trials
from instep.structure.output_placements import (
    OutputPerSample,
    OutputReplicate,
    Partial,
    Undetermined,
    Verdict,
    Verdicts,
)
from instep.structure.tree import Path

MAX_TRIALS, MAX_FAILED_MERGES = 6, 4
EAGER_CHECKS, MAX_CHECKS = 3, 9
"""Trials that come of other integers than those that a mean was tried on: some at once, the others far apart."""


@dataclass
class ProbeRecord:
    """What is known about calls of one structure."""

    outputs: dict[Path, Verdict] = field(default_factory=dict)
    attributes: dict[str, Verdicts] = field(default_factory=dict)
    """By dotted name: what was said of the tensors that `forward` sets on the module."""
    unmergeable: frozenset[str] = frozenset()
    """Names of attributes of which the whole has something that cannot be made from what the parts have."""
    sample_dependent: frozenset[str] = frozenset()
    """Places of state that came to be another for other samples."""
    constant: frozenset[str] = frozenset()
    """Names of attributes that were set to the same for any samples."""
    graph_checked: bool = False
    """Whether its graph was looked at for a backward of the user's own."""
    summary: str = ""
    trials: int = 0
    calls: int = 0
    next_trial: int = 1
    """The call before which another trial is worth its cost."""
    seen_traits: set[Trait] = field(default_factory=set)
    """Of the integers among the arguments, what parts of a trial have had differently often."""
    next_check: int = 1 << 62
    """The call before which its integers are looked at, for what means were not tried on."""
    checks: int = 0
    error: str = ""
    """What was wrong with outputs that nothing explains: samples that happen to fit do not make it right."""
    failed_merges: int = 0
    """How often the outputs of a call could not be merged by what is known, and it was tried once more."""

    def is_trial_due(self) -> bool:
        self.calls += 1
        return self.trials < MAX_TRIALS and self.calls >= self.next_trial

    def schedule_trial(self, useful: bool) -> None:
        """Plan the next trial: soon, then ever later, as long as something is left to be found out."""
        self.trials += 1
        self.next_trial = self.calls + 2 ** (self.trials - 1) if useful else 1 << 62

    def schedule_check(self) -> None:
        """Plan the next look at integers: at each of the first calls, then ever later, and more so after trials."""
        if self.checks >= MAX_CHECKS or not has_mean(self.outputs, *self.attributes.values()):
            self.next_check = 1 << 62
        elif self.checks >= EAGER_CHECKS:
            self.next_check = 2 * self.calls
        else:
            self.next_check = self.calls + 1 + (self.calls // 4 if self.calls >= 16 else 0)

    def ambiguous(self) -> list[Partial]:
        """Verdicts that leave more than one rule."""
        tables = (self.outputs, *self.attributes.values()) if self.attributes else (self.outputs,)
        return [v for table in tables for v in table.values() if isinstance(v, Partial) and len(v.rules) > 1]


def has_mean(*tables: Verdicts) -> bool:
    """Whether some verdict is a mean."""
    return any(isinstance(verdict, Partial) and verdict.is_mean for table in tables for verdict in table.values())


def is_proven(verdict: Verdict | None) -> bool:
    """Whether there is a verdict, and the numbers of a trial have shown it."""
    return verdict is not None and verdict.proven


def is_settled(verdict: Verdict | None) -> bool:
    """Whether a verdict is not shaken by a later trial; that of a mean may have rested on samples that weigh alike."""
    return is_proven(verdict) and not (isinstance(verdict, Partial) and verdict.is_mean)


def combine(first: Findings, second: Findings) -> Findings:
    """Two trials of one call: what either proved."""
    found, clashes = refine(first.outputs, second)
    errors = {**first.errors, **second.errors, **clashes}
    open_still = {path for path in first.unresolved & second.unresolved if not is_proven(found.get(path))}
    return Findings(
        found,
        open_still,
        errors,
        first.mismatched_integers | second.mismatched_integers,
        first.needs_reordering | second.needs_reordering,
    )


def refine(before: Verdicts, findings: Findings) -> tuple[dict[Path, Verdict], dict[Path, MergeError]]:
    """Verdicts after another trial, and errors for means that it contradicts.

    What is proven stays; of rules that compete those stay that fit every time.
    """
    found, clashes = dict(before), {}
    for path, new in findings.outputs.items():
        old = found.get(path)
        if isinstance(old, Partial) and isinstance(new, Partial):
            left = old.intersect(new)
            if left is None and old.proven:
                clashes[path] = conflicting_trials(path, old.description, new.description)
            else:
                found[path] = left or new
        elif old is None or not (
            old.proven or (isinstance(new, Undetermined) and isinstance(old, (OutputReplicate, Partial)))
        ):
            found[path] = new
    return found, clashes


def is_inconclusive(verdict: Verdict) -> bool:
    """Whether there were numbers, but none that tell a sum from a mean."""
    return isinstance(verdict, Undetermined) and not verdict.all_zero


def needs_more_samples(verdict: Verdict) -> bool:
    """Whether other samples may say more of it: a mean over labels, or what told nothing."""
    if isinstance(verdict, Partial):
        return verdict.is_mean and verdict.rules != ("mean",)
    return is_inconclusive(verdict) or (isinstance(verdict, OutputPerSample) and not verdict.proven)


def has_undetermined(findings: Findings) -> bool:
    """Whether there are values of which a few samples show nothing: zeros, or the same for all."""
    return any(
        isinstance(findings.outputs.get(path), (OutputReplicate, Undetermined, type(None)))
        for path in findings.unresolved
    )
