"""A call of one worker whose graph may still be needed, and how it is run again if the worker dies.

The worker's forward can be repeated exactly: its arguments, its seed and what the other replicas said in the middle of
it are kept here, and of the module's state what has changed since. Only weights that were changed since cannot be had
back: then the gradient is lost, and that is said.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from instep.engines.processes.desk import Desk, Met, Told
from instep.engines.processes.orders import Run
from instep.engines.processes.shadow import Shadow
from instep.errors import WorkerFailure
from instep.replicas.watch import MISSING, Changes
from instep.structure.tree import map_tensors

Attribute = tuple[int, str, bool]
"""The index of a module, the name of an attribute, and whether it is a buffer."""


@dataclass(eq=False)
class Call:
    """What is kept of a call until nobody can ask for its gradient any longer."""

    number: int
    desk: Desk
    told: Told
    shadow: Shadow
    run: Run
    met: Met
    arguments: list[Tensor]
    outputs: dict[int, int]
    """By the id of an output's tensor here: its number."""
    inputs: list[int]
    """The numbers of the arguments that a gradient is wanted for."""
    before: dict[Attribute, Any] = field(default_factory=dict)
    """What attributes and buffers were that have changed since."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a tensor of the source: its value before it was written."""
    exact: bool = True
    """Whether the module's state before the call can be had back."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.desk.gone.append, ("call", self.number))
        self.shadow.calls.add(self)
        self.versions = _versions(self._watched())

    def _watched(self) -> list[Tensor | None]:
        """What must not be written to before the backward."""
        return [*self.arguments, *self.told.counterparts(self.shadow)]

    def written(self) -> tuple[list[int], list[int]]:
        """The arguments, and the tensors of the module, that were written to since the forward."""
        now = _versions(self._watched())
        moved = [number for number, pair in enumerate(zip(now, self.versions, strict=True)) if pair[0] != pair[1]]
        given = len(self.arguments)
        return [n for n in moved if n < given], [n - given for n in moved if n >= given]

    def remember(self, changes: Changes) -> None:
        """Attributes of the module that the user has set since."""
        for change in changes.attributes:
            self.before.setdefault((change.module, change.name, change.buffer), _alone(change.old))
        self.exact = self.exact and not changes.structure and not changes.contents

    def again(self, desk: Desk) -> None:
        """Run the forward again on a worker that does not have its graph."""
        _, sources = self.written()
        if sources or not self.exact or not self._same_structure():
            what = "weights" if sources else "module"
            raise WorkerFailure(
                f"the worker of {self.shadow.name} died between a forward and its backward, and the {what} changed "
                f"since, so that its part cannot be run again exactly.\n"
                f"Call backward() before the module is changed, or run the step again."
            )
        self.shadow.stale = True
        with self._as_before():
            told = desk.tell(self.shadow)
        numbers = told.numbers
        run = self.run
        run.follow, run.fresh = (
            True,
            told.fresh() | {numbers[key]: v for key, v in self.values.items() if key in numbers},
        )
        desk.run(self.number, run, self.met)
        self.desk, self.told = desk, told
        self.shadow.stale = True  # the worker has the state of that call, and memory of its own for it
        self.versions = _versions(self._watched())

    def _same_structure(self) -> bool:
        root = self.shadow.source_modules[0]
        known = set(map(id, self.shadow.source_modules))
        tensors = set(map(id, self.told.table))
        return all(id(module) in known for module in root.modules()) and all(
            id(parameter) in tensors for parameter in root.parameters()
        )

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """The module with the attributes that it had before the call."""
        modules = self.shadow.source_modules
        now = {key: _holder(modules, key).get(key[1], MISSING) for key in self.before}
        try:
            for key, value in self.before.items():
                _set(_holder(modules, key), key[1], value)
            yield
        finally:
            for key, value in now.items():
                _set(_holder(modules, key), key[1], value)


def remember_state(
    calls: Sequence[Call], shadow: Shadow, sets: Sequence[tuple[int, str, bool]], written: Mapping[int, Tensor]
) -> None:
    """Before what a call changed is set on the module: what it was, for calls that may have to be run again."""
    if not calls or not (sets or written):
        return
    modules = shadow.source_modules
    old = {key: _alone(_holder(modules, key).get(key[1], MISSING)) for key in sets}
    copies = {key: source.detach().clone() for key, source in written.items()}
    for call in calls:
        for place, value in old.items():
            call.before.setdefault(place, value)
        for number, copy in copies.items():
            call.values.setdefault(number, copy)


def _alone(value: Any) -> Any:
    """A value without the graphs that its tensors come from, which may lead to earlier calls and so on."""
    return map_tensors(lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), value)


def _holder(modules: Sequence[nn.Module], key: Attribute) -> dict[str, Any]:
    index, _, buffer = key
    held: dict[str, Any] = modules[index]._buffers if buffer else modules[index].__dict__
    return held


def _set(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]
