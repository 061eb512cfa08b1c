"""Placements: how each argument is distributed over the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from instep.structure.types import TypeHandler


@dataclass(frozen=True)
class Replicate:
    """Every replica gets the same value."""

    reason: str


@dataclass(frozen=True)
class Shard:
    """A tensor or array that is split along `dim`."""

    dim: int


@dataclass(frozen=True)
class PerSample:
    """A list or tuple with one entry per sample. It is sliced."""


@dataclass(frozen=True)
class CustomSplit:
    """A value that is split by the handler of its type."""

    handler: TypeHandler


@dataclass(frozen=True)
class PreSplit:
    """A value that the caller has split. `sizes` has None for parts whose size is unknown."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class Nested:
    """A container whose children have their own placements."""

    keys: tuple[Any, ...]
    placements: tuple[Placement, ...]


Placement: TypeAlias = Replicate | Shard | PerSample | CustomSplit | PreSplit | Nested


def is_batched(placement: Placement) -> bool:
    """Whether any leaf is split."""
    if isinstance(placement, Nested):
        return any(is_batched(child) for child in placement.placements)
    return not isinstance(placement, Replicate)


def describe(placement: Placement) -> str:
    """A short description for `explain`."""
    if isinstance(placement, Replicate):
        return f"whole ({placement.reason})"
    if isinstance(placement, Shard):
        return f"split along dim {placement.dim}"
    if isinstance(placement, PerSample):
        return "one entry per sample"
    if isinstance(placement, CustomSplit):
        return "split by its type's handler"
    if isinstance(placement, PreSplit):
        return "already split"
    return "structure"


def contains_placement(cls: type[Placement], placement: Placement) -> bool:
    """Whether a placement is, or contains, an instance of `cls`."""
    return isinstance(placement, cls) or (
        isinstance(placement, Nested) and any(contains_placement(cls, child) for child in placement.placements)
    )
