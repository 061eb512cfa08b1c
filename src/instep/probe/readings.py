"""Choose between readings of the arguments: the one under which parts and whole agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from instep.errors import MergeError, StructureError
from instep.probe.probe import Probe
from instep.probe.record import ProbeRecord
from instep.probe.trial import TrialCall
from instep.structure.infer import DimReading
from instep.structure.placements import Nested, PerSample, Placement, Replicate, Shard
from instep.structure.plan import SplitPlan
from instep.structure.tree import Path, format_path

MAX_LINES_SHOWN = 8


def find_agreeing(
    probe: Probe, groups: Sequence[Sequence[SplitPlan]], trial_call: Callable[[SplitPlan], TrialCall | None]
) -> list[SplitPlan]:
    """The plans of the first group with any under which the outputs of parts merge to those of the whole.

    `trial_call` returns None for a plan that cannot be tried.
    """
    for group in groups:
        calls = [(plan, trial_call(plan)) for plan in group]
        agreeing = [plan for plan, call in calls if call is not None and _agrees(probe, call)]
        if agreeing:
            return agreeing
    return []


def has_sequence_first_layers(module: nn.Module) -> bool:
    """Whether a module has recurrent or attention layers whose inputs are `[T, B, F]`, or cells, which run in loops."""
    layers = (nn.RNNBase, nn.MultiheadAttention)
    return any(isinstance(m, nn.RNNCellBase) or (isinstance(m, layers) and not m.batch_first) for m in module.modules())


def _agrees(probe: Probe, call: TrialCall) -> bool:
    """Whether trials on few and on more samples show that the outputs of parts merge to those of the whole."""
    record = ProbeRecord()
    try:
        for use_large_parts in (False, True):
            probe.try_call(call, record, use_large_parts=use_large_parts)
    except (MergeError, StructureError):
        return False
    return record.status == "tried" and _is_conclusive(record)


def _is_conclusive(record: ProbeRecord) -> bool:
    """Whether values show how each output is merged, and one follows the batch. Zeros and shapes show nothing."""
    verdicts = [v for v in record.outputs.values() if not isinstance(v.placement, (Replicate, Nested))]
    return bool(verdicts) and all(v.proven or v.ops for v in verdicts)


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
    dims = {placement.dim for placement in _shards(plan.placements)}
    table = {format_path(path): spec for path, spec in specs.items()}
    line = "dim=1" if dims == {1} == set(specs.values()) else f"in_dims={table!r}"
    return f"{line}   # a batch of {plan.batch_size}"


def _shards(placements: Sequence[Placement]) -> Iterator[Shard]:
    for placement in placements:
        if isinstance(placement, Shard):
            yield placement
        elif isinstance(placement, Nested):
            yield from _shards(placement.placements)


def with_readings(
    error: StructureError | MergeError, groups: Sequence[Sequence[SplitPlan]], agreeing: Sequence[SplitPlan]
) -> StructureError | MergeError:
    """The error with the readings of the arguments that were tried, or with those that agree if several do."""
    if not agreeing and isinstance(error, MergeError):
        return error
    if agreeing:
        lines = [f"  {reading_line(plan)}" for plan in agreeing[:MAX_LINES_SHOWN]]
        heading = "A trial on a few samples gave the outputs of one device with each of these:"
    else:
        shown = {_option(line) for line in str(error).splitlines()}
        found = [f"  {reading_line(plan)}" for group in groups for plan in group]
        lines = [line for line in found if _option(line) not in shown][:MAX_LINES_SHOWN]
        heading = "These fit the sizes too, but a trial on a few samples did not confirm them:"
    return type(error)("\n".join([f"{error}", heading, *lines])) if lines else error


def _option(line: str) -> str:
    """The option in an offered line, without its comment."""
    return line.partition("   #")[0].strip()
