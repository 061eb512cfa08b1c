"""The probe: a few samples in two parts and together, on a copy of the module, before the first call of its kind.

It knows nothing by itself: `structure.judge` says what the numbers mean, `replicas.sandbox` sees to it that nobody
notices. Where a trial cannot be made, outputs are merged by the tables.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from instep.attempt import Attempt, Check, Place
from instep.attempt_backward import adds_up
from instep.errors import MergeError
from instep.known import MOST_FAILED, MOST_TRIALS, Known, is_proven
from instep.replicas.carry import Slot
from instep.structure.judge import Named
from instep.structure.merge import Merger
from instep.structure.merge_messages import losses_meet
from instep.structure.outline import outline
from instep.structure.plan import SplitPlan
from instep.structure.roles import Inside, Keep, Ready, Role, has_role
from instep.structure.rules import Scene, WeightedBy
from instep.structure.split import apply_plan
from instep.structure.tree import SCALARS, Path, open_node
from instep.structure.verdicts import Reduced, Verdict, Verdicts

MOST_STRUCTURES = 32


class Probe:
    """What trials said about the calls of one method; its merger follows it."""

    def __init__(
        self, method: str, merger: Merger, least: int = 1, *, adds_up: str | None = None, check: Check | None = None
    ) -> None:
        self.method = method
        self.check = check
        """Says what is wrong with the outputs of a trial, where more is known of them than numbers alone tell."""
        self.adds_up = adds_up
        """The output that has to be the sum of what the parts give, if it is known already what outputs are."""
        self.least = least
        self.merger = merger
        self.named = Named(merger.named, merger.general, merger.declared)
        self.last = Known(words="nothing was tried yet")
        self._structures: dict[Any, Known] = {}
        self._loosely: dict[Any, list[Known]] = {}
        self._by_plan: dict[Any, tuple[SplitPlan, Known]] = {}
        self._plain: dict[int, tuple[SplitPlan, list[bool]]] = {}

    def before(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        kind: int,
        place: Place,
        carried: Sequence[Slot] = (),
    ) -> dict[str, Verdicts]:
        """See to it that this call's outputs are known, as far as they can be; `MergeError` for what nothing explains.

        `kind` tells apart what the module has been: its modes and settings. Gives what is known of the attributes that
        `forward` sets.
        """
        known = self._known(plan, values, kind)
        if known.refused:
            raise MergeError(known.refused)
        due = known.is_due()
        rivals = [] if due else self._in_doubt(known, plan, values)
        looks = known.calls >= known.look
        if due or rivals or looks:
            attempt = Attempt(self.method, self.named, plan, values, positional, place, self.least, carried, self.check)
            try:
                if due or rivals or attempt.is_telling(known):
                    attempt.make(source, device, known, rivals)
                    known.asked += looks and not due
            except MergeError as error:
                raise self._why(error, attempt) from error
            known.look_again()
        if self.adds_up is not None and _is_other(known.found.get((self.adds_up,))):
            raise losses_meet()
        self.last = known
        self.merger.use(known.found)
        return known.attributes

    def again(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: Place,
        carried: Sequence[Slot] = (),
    ) -> bool:
        """After outputs that what is known does not fit: whether another trial, on this batch, says something else.

        Rows that were all selected look like the samples themselves, and what was zero so far like anything.
        """
        known = self.last
        if known.failed >= MOST_FAILED or not known.trials:
            return False
        known.failed += 1
        before = known.found
        known.found = {path: verdict for path, verdict in before.items() if isinstance(verdict, Reduced)}
        attempt = Attempt(self.method, self.named, plan, values, positional, place, self.least, carried, self.check)
        attempt.wide = True
        try:
            attempt.make(source, device, known, ())
        except MergeError as error:
            raise self._why(error, attempt) from error
        finally:
            known.found = {**before, **known.found}
        self.merger.use(known.found)
        return known.found != before

    def _why(self, error: MergeError, attempt: Attempt) -> MergeError:
        return error if self.adds_up is None or error is attempt.refusal else losses_meet()

    def gradients_add_up(
        self,
        source: nn.Module,
        device: torch.device,
        plan: SplitPlan,
        values: Sequence[Any],
        positional: int,
        place: Place,
        carried: Sequence[Slot],
    ) -> bool:
        """Whether, in a call like the last one, gradients of parts were seen to add up to those of the whole."""
        attempt = Attempt(self.method, self.named, plan, values, positional, place, self.least, carried)
        ready = attempt.batch < 2 or any(has_role(Ready, role) for role in plan.roles)
        return ready or adds_up(attempt, source, device, self.last.found)

    def is_new(self) -> bool:
        """Whether the graph of a call like the last one was not looked at yet; it is from now on."""
        before, self.last.looked = self.last.looked, True
        return not before

    def recall(self, plan: SplitPlan, values: Sequence[Any], kind: int) -> Known | None:
        """What is known about such a call, if one was tried."""
        known = self._known(plan, values, kind)
        return known if known.words else None

    def _known(self, plan: SplitPlan, values: Sequence[Any], kind: int) -> Known:
        pairs = zip(plan.roles, values, self._plain_in(plan), strict=True)
        flags = (kind, *[flag for role, value, plain in pairs if plain for flag in _flags(role, value)])
        key = (id(plan), flags)
        entry = self._by_plan.get(key)
        if entry is not None:
            return entry[1]
        loose = (plan.names, tuple([outline(value) for value in values]))
        known = self._structures.get((flags, loose))
        if known is None and len(self._structures) < MOST_STRUCTURES:
            known = self._structures[flags, loose] = Known()
            self._loosely.setdefault(loose, []).append(known)
        elif known is None:
            known = _agreed(self._loosely.get(loose, ()))
        if len(self._by_plan) >= 512:
            self._by_plan.clear()
        self._by_plan[key] = plan, known
        return known

    def _plain_in(self, plan: SplitPlan) -> list[bool]:
        """Which of the arguments hold plain values that every replica is given."""
        entry = self._plain.get(id(plan))
        if entry is None or entry[0] is not plan:
            if len(self._plain) >= 512:
                self._plain.clear()
            entry = self._plain[id(plan)] = plan, [has_role(Keep, role) for role in plan.roles]
        return entry[1]

    def _in_doubt(self, known: Known, plan: SplitPlan, values: Sequence[Any]) -> list[Any]:
        """The weights among which this call would have to choose."""
        rivals = known.rivals()
        if not rivals or known.trials > 4 * MOST_TRIALS:
            return []
        shards = apply_plan(plan, values)
        inputs = tuple([dict(zip(plan.names, shard, strict=True)) for shard in shards])
        scene = Scene(plan.sizes, (None,) * plan.parts, inputs)
        torn = [verdict for verdict in rivals if not verdict.agree(scene)]
        return [rule.weight for verdict in torn for rule in verdict.rules if isinstance(rule, WeightedBy)]


def _is_other(verdict: Verdict | None) -> bool:
    """Whether numbers showed that an output is something else than a sum."""
    return verdict is not None and verdict.proven and not (isinstance(verdict, Reduced) and "sum" in verdict.rules)


def _flags(role: Role, value: Any) -> Iterator[Any]:
    """Plain values that every replica is given, and that may decide what the outputs mean: words, numbers, switches."""
    if isinstance(role, Keep):
        if isinstance(value, (*SCALARS, enum.Enum)):
            yield type(value), value
    elif isinstance(role, Inside):
        node = open_node(value)
        assert node is not None
        for below, child in zip(role.roles, node.children, strict=True):
            yield from _flags(below, child)


def _agreed(others: Sequence[Known]) -> Known:
    """What calls that differ only in their words have in common: then words are just texts."""
    said: dict[Path, set[Verdict]] = {}
    for other in others:
        for path, verdict in other.found.items():
            if is_proven(verdict):
                said.setdefault(path, set()).add(verdict)
    found = {path: next(iter(verdicts)) for path, verdicts in said.items() if len(verdicts) == 1}
    last = others[-1] if others else Known()
    words = "as other calls of this structure were found to be"
    return Known(found, last.attributes, last.doubted, last.varied, last.constant, words=words, next=1 << 62)
