"""What is known about calls of one structure, and how it grows with every trial."""

from __future__ import annotations

from dataclasses import dataclass, field

from instep.errors import MergeError
from instep.structure.judge import Findings
from instep.structure.merge_messages import contradicted
from instep.structure.telling import Trait
from instep.structure.tree import Path
from instep.structure.verdicts import Constant, Listed, Reduced, Unclear, Verdict, Verdicts

MOST_TRIALS, MOST_FAILED = 6, 4
SOON_ASKED, MOST_ASKED = 3, 9
"""Trials that come of other integers than those that a mean was tried on: some at once, the others far apart."""


@dataclass
class Known:
    """What is known about calls of one structure."""

    found: dict[Path, Verdict] = field(default_factory=dict)
    attributes: dict[str, Verdicts] = field(default_factory=dict)
    """By dotted name: what was said of the tensors that `forward` sets on the module."""
    doubted: frozenset[str] = frozenset()
    """Names of attributes of which the whole has something that cannot be made from what the parts have."""
    varied: frozenset[str] = frozenset()
    """Places of state that came to be another for other samples."""
    constant: frozenset[str] = frozenset()
    """Names of attributes that were set to the same for any samples."""
    looked: bool = False
    """Whether its graph was looked at for a backward of the user's own."""
    words: str = ""
    trials: int = 0
    calls: int = 0
    next: int = 1
    """The call before which another trial is worth its cost."""
    told: set[Trait] = field(default_factory=set)
    """Of the integers among the arguments, what parts of a trial have had differently often."""
    look: int = 1 << 62
    """The call before which its integers are looked at, for what means were not tried on."""
    asked: int = 0
    refused: str = ""
    """What was wrong with outputs that nothing explains: samples that happen to fit do not make it right."""
    failed: int = 0
    """How often the outputs of a call could not be merged by what is known, and it was tried once more."""

    def is_due(self) -> bool:
        self.calls += 1
        return self.trials < MOST_TRIALS and self.calls >= self.next

    def ask_again(self, worth: bool) -> None:
        """Plan the next trial: soon, then ever later, as long as something is left to be found out."""
        self.trials += 1
        self.next = self.calls + 2 ** (self.trials - 1) if worth else 1 << 62

    def look_again(self) -> None:
        """Plan the next look at integers: at each of the first calls, then ever later, and more so after trials."""
        if self.asked >= MOST_ASKED or not has_mean(self.found, *self.attributes.values()):
            self.look = 1 << 62
        elif self.asked >= SOON_ASKED:
            self.look = 2 * self.calls
        else:
            self.look = self.calls + 1 + (self.calls // 4 if self.calls >= 16 else 0)

    def rivals(self) -> list[Reduced]:
        """Verdicts that leave more than one rule."""
        tables = (self.found, *self.attributes.values()) if self.attributes else (self.found,)
        return [v for table in tables for v in table.values() if isinstance(v, Reduced) and len(v.rules) > 1]


def has_mean(*tables: Verdicts) -> bool:
    """Whether some verdict is a mean."""
    return any(isinstance(verdict, Reduced) and verdict.is_mean for table in tables for verdict in table.values())


def is_proven(verdict: Verdict | None) -> bool:
    """Whether there is a verdict, and the numbers of a trial have shown it."""
    return verdict is not None and verdict.proven


def stands(verdict: Verdict | None) -> bool:
    """Whether a verdict is not shaken by a later trial; that of a mean may have rested on samples that weigh alike."""
    return is_proven(verdict) and not (isinstance(verdict, Reduced) and verdict.is_mean)


def both(first: Findings, second: Findings) -> Findings:
    """Two trials of one call: what either proved."""
    found, clashes = joined(first.found, second)
    errors = {**first.errors, **second.errors, **clashes}
    open_still = {path for path in first.open & second.open if not is_proven(found.get(path))}
    return Findings(found, open_still, errors, first.turned | second.turned, first.ordered | second.ordered)


def joined(before: Verdicts, findings: Findings) -> tuple[dict[Path, Verdict], dict[Path, MergeError]]:
    """Verdicts after another trial, and errors for means that it contradicts.

    What is proven stays; of rules that compete those stay that fit every time.
    """
    found, clashes = dict(before), {}
    for path, new in findings.found.items():
        old = found.get(path)
        if isinstance(old, Reduced) and isinstance(new, Reduced):
            left = old.with_more(new)
            if left is None and old.proven:
                clashes[path] = contradicted(path, old.words, new.words)
            else:
                found[path] = left or new
        elif old is None or not (old.proven or (isinstance(new, Unclear) and isinstance(old, (Constant, Reduced)))):
            found[path] = new
    return found, clashes


def is_close(verdict: Verdict) -> bool:
    """Whether there were numbers, but none that tell a sum from a mean."""
    return isinstance(verdict, Unclear) and not verdict.zeros


def is_doubtful(verdict: Verdict) -> bool:
    """Whether other samples may say more of it: a mean over labels, or what told nothing."""
    if isinstance(verdict, Reduced):
        return verdict.is_mean and verdict.rules != ("mean",)
    return is_close(verdict) or (isinstance(verdict, Listed) and not verdict.proven)


def is_unclear(findings: Findings) -> bool:
    """Whether there are values of which a few samples show nothing: zeros, or the same for all."""
    return any(isinstance(findings.found.get(path), (Constant, Unclear, type(None))) for path in findings.open)
