"""What a caller can write around an argument to say how it is shared out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from instep.errors import StructureError
from instep.structure.tree import open_node

T = TypeVar("T")


@dataclass(frozen=True)
class Whole:
    """A value that every replica gets as it is."""

    value: Any

    def __post_init__(self) -> None:
        _note_use()


class Shards:
    """A value that is already split: one entry for each replica, in order.

    >>> Shards([[1, 2], [3]])
    Shards([[1, 2], [3]])
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)
        if not self.parts:
            raise StructureError("Shards without an entry: give one entry for each replica.")
        _note_use()

    def __repr__(self) -> str:
        return f"Shards({self.parts!r})"


def whole(value: T) -> T:
    """Hand `value` to every replica as it is, whatever its size: `model(x, instep.whole(class_weights))`."""
    return Whole(value)  # type: ignore[return-value]


_used = False


def _note_use() -> None:
    global _used
    _used = True


def bare(value: Any) -> Any:
    """A value without its marks, for a call that is not split; free for programs that never use one."""
    return _strip(value) if _used else value


def _strip(value: Any) -> Any:
    if isinstance(value, Whole):
        return value.value
    if isinstance(value, Shards):
        if len(value.parts) != 1:
            raise StructureError(
                f"Shards of {len(value.parts)} entries were given to a call that runs on one replica: give one entry."
            )
        return value.parts[0]
    node = open_node(value)
    if node is None:
        return value
    children = [_strip(child) for child in node.children]
    unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
    return value if unchanged else node.close(children)
