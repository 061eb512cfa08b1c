"""A call in words: what is split, what is whole, and how the outputs came together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from instep.engines.choose import Choice
from instep.structure.merge import Merger
from instep.structure.messages import summary
from instep.structure.plan import SplitPlan
from instep.structure.roles import Inside, Role, describe
from instep.structure.tree import Path, open_node, show_path


@dataclass(frozen=True)
class Explanation:
    """Rows of (leaf, value, what happens); `str()` is a table."""

    heading: str
    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    trial: str = ""
    """What the probe did for the last call."""

    def __str__(self) -> str:
        lines = [self.heading, "inputs:"]
        lines += _aligned(self.inputs)
        if self.outputs:
            lines += ["outputs, as they were merged last:", *_aligned(self.outputs)]
        else:
            lines.append("outputs: known after the first call")
        if self.trial:
            lines.append(f"probe: {self.trial}")
        return "\n".join(lines)

    __repr__ = __str__


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def explain(
    plan: SplitPlan,
    values: Sequence[Any],
    devices: Sequence[torch.device],
    choice: Choice,
    merger: Merger,
    trial: str = "",
) -> Explanation:
    """The explanation of a plan."""
    if plan.batch is None:
        heading = f"nothing is batched: the call runs on {devices[0]} alone"
    elif plan.parts == 1:
        heading = f"a batch of {plan.batch} runs on {devices[0]} alone"
    else:
        shares = ", ".join(f"{size} on {device}" for size, device in zip(plan.sizes, devices, strict=False))
        heading = f"a batch of {plan.batch}: {shares} ({choice.name}: {choice.why})"
    rows = [
        row
        for name, value, role in zip(plan.names, values, plan.roles, strict=True)
        for row in _rows(role, value, (name,))
    ]
    outputs = tuple((show_path(path) or "(output)", _why(path, what, merger)) for path, what in merger.seen.items())
    return Explanation(heading, tuple(rows), outputs, trial)


def _why(path: Path, what: str, merger: Merger) -> str:
    """What was done at a path, and whether it was the probe that said so."""
    verdict = merger.found.get(path)
    if verdict is None:
        return what
    return f"{what} (the probe)" if verdict.words == what else f"{what} (the probe: {verdict.words})"


def _rows(role: Role, value: Any, path: Path) -> Iterator[tuple[str, str, str]]:
    node = open_node(value) if isinstance(role, Inside) else None
    if node is None:
        yield show_path(path), summary(value), describe(role)
        return
    assert isinstance(role, Inside)
    for key, child, below in zip(node.keys, node.children, role.roles, strict=True):
        yield from _rows(below, child, (*path, key))
