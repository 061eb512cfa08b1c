"""Choose between readings of the arguments: the one under which parts and whole agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from instep.errors import MergeError, StructureError
from instep.probe.probe import Outcome, Probe
from instep.probe.trial_call import TrialCall
from instep.structure.infer import BROADCAST, DimReading
from instep.structure.placements import Nested, PerSample, Placement, Shard
from instep.structure.plan import SplitPlan
from instep.structure.problems import SplitLine, tried_heading
from instep.structure.tree import Path, format_path

MAX_LINES_SHOWN = 8


class TriedReadings(NamedTuple):
    """What trials of readings have shown."""

    agreeing: list[SplitPlan]
    """Plans under which the outputs of parts merge to those of the whole."""
    refuted: list[SplitPlan]
    """Plans under which they do not, or `forward` raises an error."""


def try_readings(
    probe: Probe,
    groups: Sequence[Sequence[SplitPlan]],
    trial_call: Callable[[SplitPlan], TrialCall | None],
    *,
    accept_unproven: bool,
) -> TriedReadings:
    """Try the plans, group by group, until some agree. `trial_call` returns None for a plan that cannot be tried.

    With `accept_unproven`, a plan of the first group also agrees if all others there are refuted, and an output follows
    the batch by its structure, e.g. a list with an entry for each sample.
    """
    refuted: list[SplitPlan] = []
    only: list[SplitPlan] = []
    for number, group in enumerate(groups):
        calls = [(plan, trial_call(plan)) for plan in group]
        outcomes = [(plan, Outcome.UNPROVEN if call is None else probe.try_reading(call)) for plan, call in calls]
        agreeing = [plan for plan, outcome in outcomes if outcome is Outcome.AGREES]
        if agreeing:
            return TriedReadings(agreeing, refuted)
        refuted += [plan for plan, outcome in outcomes if outcome is Outcome.REFUTED]
        left = [(plan, outcome) for plan, outcome in outcomes if outcome is not Outcome.REFUTED]
        if number == 0 and len(left) == 1 < len(group) and left[0][1] is Outcome.FOLLOWS_BATCH:
            only = [left[0][0]]
    return TriedReadings(only if accept_unproven else [], refuted)


def reading_line(plan: SplitPlan) -> str:
    """The option that selects the reading of a plan, as source code."""
    specs: dict[Path, int | str | None] = {}
    for path, reading in plan.reading:
        if isinstance(reading, DimReading):
            specs[path] = reading.dim
        elif reading is PerSample:
            specs[path] = "samples"
    for path, reading in plan.reading:
        if reading is Nested and not any(below[: len(path)] == path for below in specs):
            specs[path] = 0
    leaves = list(_leaves(plan.placements))
    dims = {leaf.dim for leaf in leaves if isinstance(leaf, Shard)}
    table = {format_path(path): spec for path, spec in specs.items()}
    in_dim_1 = dims == {1} == set(specs.values()) and BROADCAST not in leaves
    line = "dim=1" if in_dim_1 else f"in_dims={table!r}"
    return f"{line}   # a batch of {plan.batch_size}"


def _leaves(placements: Sequence[Placement]) -> Iterator[Placement]:
    for placement in placements:
        if isinstance(placement, Nested):
            yield from _leaves(placement.placements)
        else:
            yield placement


def split_message(
    error: StructureError, agreeing: Sequence[str], outcomes: Mapping[SplitLine, Outcome | None], note: str = ""
) -> StructureError:
    """The error of a call whose reading the trials did not decide, with the lines that they confirmed.

    `agreeing` has the lines of confirmed readings, `outcomes` what trials of the lines of the error have shown, or None
    for one that could not be tried. `note` is shown if nothing else was confirmed. Without it, the message then says
    so, and what to decide, in words.
    """
    problem = error.problem
    confirmed = [line.render() for line, outcome in outcomes.items() if outcome is Outcome.AGREES]
    lines = list({_option(line): line for line in (*confirmed, *agreeing)}.values())[:MAX_LINES_SHOWN]
    if lines:
        headline = str(error) if problem is None else problem.headline
        text = [headline, tried_heading(len(lines), "the outputs"), *(f"  {line}" for line in lines)]
    elif problem is None:
        text = [str(error), *([note] if note else [])]
    elif note:
        text = [problem.headline, note]
    else:
        refuted = [line for line, outcome in outcomes.items() if outcome is Outcome.REFUTED]
        undecided = len(refuted) < len(problem.lines)
        text = [problem.headline, *([_UNDECIDED, problem.render_choice(refuted)] if undecided else _REFUTED)]
    return StructureError("\n".join(text))


_UNDECIDED = (
    "A trial on a few samples did not decide it: no outputs could be compared, or they do not depend on the choice."
)
_REFUTED = (
    "In a trial on a few samples, no choice of dims that fits the sizes gave the outputs of one device.",
    "If samples interact in forward, gather them there with instep.all_gather. If another dim is the batch, say so "
    "with in_dims.",
)


def merge_message(error: MergeError, agreeing: Sequence[str]) -> MergeError:
    """The error of a call whose outputs do not merge, with other readings of its arguments under which they do."""
    if not agreeing:
        return error
    lines = [f"  {line}" for line in agreeing[:MAX_LINES_SHOWN]]
    return MergeError("\n".join([str(error), tried_heading(len(lines), "the outputs"), *lines]))


def _option(line: str) -> str:
    """The option in a line, without its comment."""
    return line.partition("   #")[0].strip()
