"""The variables of closures that cross with functions: whether they are still what was sent, and how they are set."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from instep.engines.processes.reducers import contents
from instep.engines.processes.spaces import ABSENT, Seen, Watch, seen

_BETWEEN = ":"
"""Stands between the name of a method and that of a variable."""


class Variables(Mapping[str, Any]):
    """The variables that the methods of a class read from the function around it."""

    def __init__(self, cls: type) -> None:
        self.cells: dict[str, types.CellType] = {}
        for name, held in vars(cls).items():
            for function in _functions(held):
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                self.cells.update((f"{name}{_BETWEEN}{word}", cell) for word, cell in cells if word != "__class__")

    def __getitem__(self, name: str) -> Any:
        held = contents(self.cells[name])
        if not held:
            raise KeyError(name)
        return held[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


def _functions(held: Any) -> Iterator[types.FunctionType]:
    parts = (held.fget, held.fset, held.fdel) if isinstance(held, property) else (getattr(held, "__func__", held),)
    return (part for part in parts if isinstance(part, types.FunctionType))


def is_variable(name: str) -> bool:
    """Whether this is the name of a variable, and not of an attribute."""
    return _BETWEEN in name


def set_variable(cls: type, name: str, value: Any) -> None:
    """Set a variable that methods of a class read."""
    cell = Variables(cls).cells.get(name)
    if cell is not None:
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value


def look_at(cell: types.CellType) -> Seen:
    """A variable as it is now: modules and tensors by identity, other things by what they hold."""
    value = (*contents(cell), ABSENT)[0]
    return Seen(value, None) if isinstance(value, (nn.Module, Tensor)) else seen(value)


def is_still(cell: types.CellType, before: Seen) -> bool:
    """Whether a variable is what was sent."""
    return before.still((*contents(cell), ABSENT)[0])


class Classes:
    """What the other side was told of the attributes of our classes that crossed by value."""

    def __init__(self) -> None:
        self._watches: dict[int, tuple[type, Watch, Watch]] = {}

    def tell(self, number: int, cls: type, attributes: dict[str, Seen]) -> None:
        """The other side has been sent a class."""
        if not issubclass(cls, enum.Enum):
            variables = Variables(cls)
            looks = {name: look_at(cell) for name, cell in variables.cells.items()}
            watches = Watch(vars(cls), attributes, also_new=True), Watch(variables, looks, also_new=False)
            self._watches[number] = (cls, *watches)

    def changed(self) -> list[tuple[int, type, dict[str, Any]]]:
        """The classes with attributes, or variables of methods, that are no longer what the other side was told."""
        watches = ((number, cls, pair) for number, (cls, *pair) in self._watches.items())
        changes = ((number, cls, {**pair[0].changed(), **pair[1].changed()}) for number, cls, pair in watches)
        return [change for change in changes if change[2]]
