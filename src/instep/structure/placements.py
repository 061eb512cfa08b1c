"""How inputs are split over replicas and how outputs are merged: shard, replicate, partial, per-sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from instep.structure.types import TypeHandler


@dataclass(frozen=True)
class Replicate:
    """Handed to every replica as it is."""

    reason: str


@dataclass(frozen=True)
class Shard:
    """A tensor or array, split along `dim`."""

    dim: int


@dataclass(frozen=True)
class PerSample:
    """A list or tuple with one entry a sample: sliced."""


@dataclass(frozen=True)
class CustomSplit:
    """A type that is split by its own rule."""

    handler: TypeHandler


@dataclass(frozen=True)
class PreSplit:
    """Already split by the caller, into parts of these sizes; None for one that cannot be measured."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class Nested:
    """A container: each child has a role of its own."""

    keys: tuple[Any, ...]
    placements: tuple[Placement, ...]


Placement: TypeAlias = Replicate | Shard | PerSample | CustomSplit | PreSplit | Nested


def is_batched(role: Placement) -> bool:
    """Whether any leaf below is shared out rather than handed over whole."""
    if isinstance(role, Nested):
        return any(is_batched(child) for child in role.placements)
    return not isinstance(role, Replicate)


def describe(role: Placement) -> str:
    """One short phrase for a table."""
    if isinstance(role, Replicate):
        return f"whole ({role.reason})"
    if isinstance(role, Shard):
        return f"split along dim {role.dim}"
    if isinstance(role, PerSample):
        return "one entry a sample"
    if isinstance(role, CustomSplit):
        return "split by its type's rule"
    if isinstance(role, PreSplit):
        return "already split"
    return "structure"


def contains_placement(kind: type[Placement], role: Placement) -> bool:
    """Whether a role, or one inside it, is of a kind."""
    return isinstance(role, kind) or (
        isinstance(role, Nested) and any(contains_placement(kind, below) for below in role.placements)
    )
