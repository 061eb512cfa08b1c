"""What happens to a leaf: the vocabulary of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from instep.structure.types import Kind


@dataclass(frozen=True)
class Keep:
    """Handed to every replica as it is."""

    why: str


@dataclass(frozen=True)
class Cut:
    """A tensor or array, split along `dim`."""

    dim: int


@dataclass(frozen=True)
class Column:
    """A list or tuple with one entry a sample: sliced."""


@dataclass(frozen=True)
class Custom:
    """A type that is split by its own rule."""

    kind: Kind


@dataclass(frozen=True)
class Ready:
    """Already split by the caller, into parts of these sizes; None for one that cannot be measured."""

    sizes: tuple[int | None, ...]


@dataclass(frozen=True)
class Inside:
    """A container: each child has a role of its own."""

    keys: tuple[Any, ...]
    roles: tuple[Role, ...]


Role: TypeAlias = Keep | Cut | Column | Custom | Ready | Inside


def is_batched(role: Role) -> bool:
    """Whether any leaf below is shared out rather than handed over whole."""
    if isinstance(role, Inside):
        return any(is_batched(child) for child in role.roles)
    return not isinstance(role, Keep)


def describe(role: Role) -> str:
    """One short phrase for a table."""
    if isinstance(role, Keep):
        return f"whole ({role.why})"
    if isinstance(role, Cut):
        return f"split along dim {role.dim}"
    if isinstance(role, Column):
        return "one entry a sample"
    if isinstance(role, Custom):
        return "split by its type's rule"
    if isinstance(role, Ready):
        return "already split"
    return "structure"


def has_role(kind: type[Role], role: Role) -> bool:
    """Whether a role, or one inside it, is of a kind."""
    return isinstance(role, kind) or (isinstance(role, Inside) and any(has_role(kind, below) for below in role.roles))
