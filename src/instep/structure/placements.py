"""Placements: how a value is distributed over the replicas. One vocabulary for arguments and outputs.

`Shard`, `Replicate` and `Partial` have the meaning that they have in `torch.distributed.tensor`. Batches also contain
lists, rows of varying number and types with their own rules, which have placements of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from instep.structure.merge_rules import MergeRule
from instep.structure.types import TypeHandler


@dataclass(frozen=True)
class Shard:
    """A tensor or array with the batch in `dim`. Every replica has its samples."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every replica has the same value."""

    reason: str = ""


@dataclass(frozen=True)
class Partial:
    """An output that is a reduction over the replicas' values: a sum, or a mean that may be weighted."""

    op: MergeRule


@dataclass(frozen=True)
class PerSample:
    """A list or tuple with one entry per sample."""


@dataclass(frozen=True)
class Ragged:
    """An output with any number of rows per sample, such as selected rows or detected boxes."""

    dim: int | None
    """The dim in which the replicas' rows are concatenated; None for lists."""


@dataclass(frozen=True)
class Nested:
    """A container whose entries have their own placements.

    For an output, `keys` and `placements` are empty: the verdicts of its entries are listed by path.
    """

    keys: tuple[Any, ...] = ()
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class CustomSplit:
    """An argument that is split by the handler of its type."""

    handler: TypeHandler


@dataclass(frozen=True)
class PreSplit:
    """An argument that the caller has split. `sizes` has None for parts of unknown size."""

    sizes: tuple[int | None, ...]


Placement: TypeAlias = Shard | Replicate | Partial | PerSample | Ragged | Nested | CustomSplit | PreSplit
Reading: TypeAlias = type[PerSample] | type[Nested] | type[Replicate]
"""How a list or tuple is interpreted: one entry per sample, a structure, or a value that every replica gets."""


def is_batched(placement: Placement) -> bool:
    """Whether any leaf is split."""
    if isinstance(placement, Nested):
        return any(is_batched(child) for child in placement.placements)
    return not isinstance(placement, Replicate)


def describe(placement: Placement) -> str:
    """A short description of an argument's placement for `explain`."""
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
