"""Joins the batches of ranks that each pass their own (`batches="local"`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instep.call.options import MethodBinding
from instep.engines.base import Engine
from instep.errors import MergeError, StructureError
from instep.structure.spec import Shards
from instep.structure.split import undo_plan


def join_batches(
    engine: Engine, binding: MethodBinding, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any], tuple[int, ...]]:
    """The arguments of a call with the batches of all ranks, and the sizes of these batches."""
    names, values = binding.bind(args, kwargs)
    rows = engine.gather_arguments((names, *values))
    if len(rows) == 1:
        return args, kwargs, ()
    if any(row[0] != names for row in rows):
        described = "; ".join(", ".join(row[0]) for row in rows)
        raise StructureError(f"batches='local': the ranks passed different arguments ({described}).")
    parts = [row[1:] for row in rows]
    plans = [binding.plan(names, part, None) for part in parts]  # on every rank: all raise the same error
    sizes = tuple(plan.batch_size or 0 for plan in plans)
    if not any(sizes):
        return args, kwargs, ()
    if not all(sizes):
        raise StructureError(
            f"batches='local': the ranks passed batches of {', '.join(map(str, sizes))} samples.\n"
            f"Every rank needs at least one sample in every call."
        )
    plan = plans[sizes.index(max(sizes))]  # a single sample says little about what is split
    try:
        joined = undo_plan(plan, parts)
    except (MergeError, RuntimeError, ValueError):  # such as batches that are padded to different lengths
        joined = [Shards(column) for column in zip(*parts, strict=True)]
    return joined[: len(args)], dict(zip(names[len(args) :], joined[len(args) :], strict=True)), sizes
