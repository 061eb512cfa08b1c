"""What `DataParallel.explain` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from instep.engines.select import EngineChoice
from instep.structure.graph_arguments import GraphArgument
from instep.structure.merge import Merger
from instep.structure.placements import Nested, Placement, Shard, describe
from instep.structure.plan import SplitPlan
from instep.structure.spec import strip_marks
from instep.structure.split_messages import summarize
from instep.structure.tree import Path, flatten_one_level, format_path, is_sequence

_AS_RETURNED = "as the module returns them"


@dataclass(frozen=True)
class Explanation:
    """What happens to each leaf of a call. ``str()`` formats it as a table."""

    heading: str
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    trial: str = ""
    """How the probe tried such calls."""
    unmerged: str = "known after the first call"
    """Shown instead of outputs if none have been merged yet."""
    unused: tuple[str, ...] = ()
    """Rules for outputs that the last call did not return."""
    readings: tuple[str, ...] = ()
    """The lines that select each reading of the arguments, likely ones first, if the first call has to choose one."""

    def __str__(self) -> str:
        lines = [self.heading, "inputs:" if self.inputs else "inputs: none"]
        lines += _align_columns(self.inputs)
        if self.readings:
            lines += ["readings that fit; the first call tries them on a few samples, in this order:"]
            lines += [f"  {line}" for line in self.readings]
        if self.outputs:
            lines += ["outputs, as last merged:", *_align_columns(self.outputs), *self.unused]
        else:
            lines.append(f"outputs: {self.unmerged}")
        if self.trial:
            lines.append(f"probe: {self.trial}")
        return "\n".join(lines)

    __repr__ = __str__


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def explain(
    plan: SplitPlan,
    values: Sequence[Any],
    devices: Sequence[torch.device],
    choice: EngineChoice,
    merger: Merger,
    trial: str = "",
    readings: Sequence[str] = (),
) -> Explanation:
    """Explain a call that runs on the replicas.

    `trial` says how the probe tried such calls, `readings` which readings it will try if the plan is undecided.
    """
    if plan.undecided is not None:
        rows = [row for name, value in zip(plan.names, values, strict=True) for row in _whole_rows(value, (name,), "?")]
        heading = "the sizes of the arguments do not say which dim is the batch"
        return Explanation(heading, tuple(rows), (), readings=tuple(readings))
    shards = ", ".join(f"{size} on {device}" for size, device in zip(plan.sizes, devices, strict=False))
    heading = f"a batch of {plan.batch_size}: {shards} ({choice.name}: {choice.reason})"
    rows = [
        row
        for name, value, placement in zip(plan.names, values, plan.placements, strict=True)
        for row in _rows(placement, value, (name,), dict(plan.reading))
    ]
    outputs = tuple(
        (format_path(path) or "(output)", _with_verdict(path, action, merger))
        for path, action in merger.actions.items()
    )
    return Explanation(heading, tuple(rows), outputs, trial, unused=tuple(_unused(merger)))


def explain_one_device(
    names: Sequence[str], values: Sequence[Any], device: torch.device, reason: str, batch_size: int | None = None
) -> Explanation:
    """Explain a call that runs on one device."""
    batch = "the call" if batch_size is None else f"a batch of {batch_size}"
    rows = [row for name, value in zip(names, values, strict=True) for row in _whole_rows(strip_marks(value), (name,))]
    return Explanation(f"{batch} runs on {device} alone: {reason}", tuple(rows), (), unmerged=_AS_RETURNED)


def _with_verdict(path: Path, action: str, merger: Merger) -> str:
    """How an output was merged, and what the probe found about it."""
    verdict = merger.verdicts.get(path)
    if verdict is None:
        return action
    return f"{action} (the probe)" if verdict.description == action else f"{action} (the probe: {verdict.description})"


def _unused(merger: Merger) -> Iterator[str]:
    """Rules and dims that match no output of the last call."""
    paths = {format_path(path[:depth]) for path in merger.actions for depth in range(len(path) + 1)}
    dims = merger.out_dims if isinstance(merger.out_dims, Mapping) else {}
    for option, patterns in (("merge", merger.path_rules), ("out_dims", dims)):
        for pattern in patterns:
            if not any(fnmatchcase(path, str(pattern)) for path in paths):
                yield f"  {option}={{{pattern!r}: ...}} matches no output"


def _whole_rows(value: Any, path: Path, action: str = "as it is") -> Iterator[tuple[str, str, str]]:
    """One row per leaf; a list is one row."""
    node = None if is_sequence(value) else flatten_one_level(value)
    if node is None or not node.keys:
        yield format_path(path), summarize(value), action
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _whole_rows(child, (*path, key), action)


def _rows(
    placement: Placement, value: Any, path: Path, readings: Mapping[Path, object]
) -> Iterator[tuple[str, str, str]]:
    """One row per leaf of a value: path, summary, placement."""
    node = flatten_one_level(value) if isinstance(placement, Nested) else None
    if isinstance(value, GraphArgument):
        yield format_path(path), summarize(value.value), "split between graphs"
        return
    if node is None:
        found = " (found by the probe)" if isinstance(placement, Shard) and path in readings else ""
        yield format_path(path), summarize(value), describe(placement) + found
        return
    assert isinstance(placement, Nested)
    for key, child, below in zip(node.keys, node.children, placement.placements, strict=True):
        yield from _rows(below, child, (*path, key), readings)
