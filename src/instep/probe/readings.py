"""Choose between readings of the arguments: the one under which parts and whole agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from instep.errors import MergeError, StructureError
from instep.probe.probe import Outcome, Probe
from instep.probe.trial_call import TrialCall
from instep.structure.infer import BROADCAST, DimReading
from instep.structure.placements import Nested, PerSample, Placement, Shard
from instep.structure.plan import SplitPlan
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


def with_readings(
    error: StructureError | MergeError,
    groups: Sequence[Sequence[SplitPlan]],
    tried: TriedReadings,
    is_refuted: Callable[[str], bool],
    note: str = "",
) -> StructureError | MergeError:
    """The error without lines that trials refuted, and with the readings that agree, or that no trial decided.

    `is_refuted` tries another option that the error offers. `note` is added if no reading agrees.
    """
    if not tried.agreeing and isinstance(error, MergeError):
        return error
    refuted = {_option(reading_line(plan)) for plan in tried.refuted}
    offered = [option for line in str(error).splitlines() if (option := _option(line)).startswith("in_dims=")]
    refuted.update(option for option in offered if option not in refuted and is_refuted(option))
    text = [line for line in str(error).splitlines() if _option(line) not in refuted]
    if text[-1].endswith(":"):  # no line is left of those that it introduced
        text[-1] = "No reading of the arguments that fits their sizes gave the outputs of one device on a few samples."
    if tried.agreeing:
        plans = tried.agreeing
        heading = "A trial on a few samples gave the outputs of one device with each of these:"
    else:
        plans = [plan for group in groups for plan in group]
        heading = "These fit the sizes too, but a trial on a few samples did not confirm them:"
    shown = refuted.union(map(_option, text))
    lines = [f"  {reading_line(plan)}" for plan in plans]
    lines = [line for line in lines if tried.agreeing or _option(line) not in shown][:MAX_LINES_SHOWN]
    return type(error)(
        "\n".join([*text, *([heading, *lines] if lines else []), *([note] if note and not tried.agreeing else [])])
    )


def _option(line: str) -> str:
    """The option in an offered line, without its comment."""
    return line.partition("   #")[0].strip()
