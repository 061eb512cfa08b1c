"""A call of one worker whose graph may still be needed, and how it is run again if the worker dies.

The worker's forward can be repeated exactly: its arguments, its seed and what the other replicas said in the middle of
it are kept here, and of the module's state what has changed since. Only weights that were changed since cannot be had
back: then the gradient is lost, and that is said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from instep.engines.processes.desk import Desk
from instep.engines.processes.met import Met
from instep.engines.processes.orders import Run
from instep.engines.processes.shadow import Shadow, keep, outstanding
from instep.engines.processes.talk import of_answer
from instep.engines.processes.told import Told, counted
from instep.errors import WorkerFailure
from instep.replicas.contents import Contents, contents_of, put
from instep.replicas.equal import equal_tensors
from instep.replicas.memory import version_of
from instep.replicas.opaque import is_opaque
from instep.replicas.watch import MISSING, Changes
from instep.structure.tree import map_tensors, tensors_in

Attribute = tuple[nn.Module, str, bool]
"""A module, the name of an attribute, and whether it is a buffer."""


@dataclass(eq=False)
class Call:
    """What is kept of a call until nobody can ask for its gradient any longer: then its worker may forget it too.

    It does not hold the stand-in that it was made with: that leads to tensors which earlier calls left on the module,
    and so to these calls.
    """

    number: int
    desk: Desk
    told: Told
    name: str
    recipe: Callable[[], Shadow]
    """Makes a stand-in of the module as it is then."""
    owned: list[str]
    """Containers of the module of which each replica has its own."""
    modules: list[nn.Module]
    look: Callable[[], Callable[[], Changes | None] | None]
    """What says what has changed on the module since its replicas were last ready, as long as that exists."""
    run: Run
    met: Met
    arguments: list[Tensor]
    outputs: dict[int, int] = field(default_factory=dict)
    """By the id of an output's tensor here: its number."""
    looked: dict[int, int] = field(default_factory=dict)
    """By the number of an output's tensor: its version when it came."""
    inputs: list[int] = field(default_factory=list)
    """The numbers of the arguments that a gradient is wanted for."""
    before: dict[Attribute, Any] = field(default_factory=dict)
    """What attributes and buffers were that have changed since."""
    inside: dict[int, tuple[Any, Contents]] = field(default_factory=dict)
    """By their ids: containers of the module that were changed since, and what was in them."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a tensor of the source: its value before it was written."""
    exact: bool = True
    """Whether the module's state before the call can be had back."""
    spent: list[list[int]] = field(default_factory=list)
    """Tokens of meetings that backwards have used up, one after another."""
    spoilt: bool = False
    """Whether `forward` changed its arguments: they are no longer what it was given."""

    def keep(self, places: Sequence[int]) -> None:
        """Want the gradients of the arguments at these places only: no others were used."""
        self.inputs = [self.inputs[place] for place in places]

    def __post_init__(self) -> None:
        weakref.finalize(self, self.desk.gone.append, ("call", self.number))
        self._sources, self._places = self.told.sources, self.told.places
        self.note()
        self._again: Shadow | None = None  # held: a worker forgets the module of a stand-in that is gone
        keep(self.modules[0], self)

    def note(self) -> None:
        """What is written to the arguments and to the module from now on comes after the forward."""
        self._given = Versions(*counted(self.arguments))
        self._module = Versions(*self.told.counted)

    def numbers_of(self, leaves: Sequence[Tensor]) -> list[int | None]:
        """The numbers that the worker knows leaves of the stand-in by; None for one that it was not told of."""
        return list(map(self._places.get, map(id, leaves)))

    def written(self) -> tuple[list[int], list[int]]:
        """The arguments, and the tensors of the module, that were written to since the forward."""
        return self._given.moved(), self._module.moved()

    def remember(self, changes: Changes) -> None:
        """What attributes and containers of the module were that were changed since."""
        for change in changes.attributes:
            key = self.modules[change.module], change.name, change.buffer
            self.before.setdefault(key, _alone(change.old))
        for container, before, _ in changes.contents:
            if id(container) in self.inside:
                continue
            if any(map(_leads_back, before.items)):
                self.exact = False
            else:
                self.inside[id(container)] = container, Contents(before.keys, tuple(map(_tensor_alone, before.items)))
        self.exact = self.exact and not changes.structure

    def at(self, desk: Desk, outputs: Sequence[Tensor]) -> list[list[int]]:
        """See to it that a worker has the graph; the tokens of it that were used up already and are there again.

        The `outputs` are those that somebody has got of the forward.
        """
        if desk is self.desk:
            return []
        self._again_at(desk, outputs)
        return self.spent

    def _again_at(self, desk: Desk, outputs: Sequence[Tensor]) -> None:
        """Run the forward again on a worker that does not have its graph."""
        given, sources = self.written()
        look = self.look()
        changes = None if look is None else look()
        if changes is not None:
            self.remember(changes)
        elif not all(map(self._is_as_it_came, outputs)):  # nobody has watched: only the outputs tell of changes
            self.exact = False
        spoilt = self.spoilt or bool(given)
        if spoilt or sources or not self.exact or not self._same_structure():
            raise self._lost("weights" if sources else "arguments" if spoilt else "module")
        with self._as_before():
            shadow = self._again = self.recipe()
            shadow.owned = self.owned
            told = desk.tell(shadow, self.run.method)
        state = {told.numbers[key]: value for key, value in self.values.items() if key in told.numbers}
        run = self.run
        told.renew(self, follow=True)
        run.number, run.follow, run.fresh, run.ticket = shadow.number, True, told.fresh() | state, 0
        states = {id(self.told.generators[number]): state for number, state in run.generators.items()}
        numbered = [(number, states.get(id(source))) for number, source in enumerate(told.generators)]
        run.generators = {number: state for number, state in numbered if state is not None}
        box, _ = desk.ask_forward(run)
        _, tensors = desk.talk.take(desk.answer(box, self.met), of_answer(self.arguments, told.counterparts))
        if not all(self._is_again(output, tensors) for output in outputs):
            desk.gone.append(("call", box.number))
            raise self._lost("weights, or something else that it reads,")
        self.number, self.desk, self.told = box.number, desk, told
        self._places = {made: told.numbers[source] for made, source in self._sources.items() if source in told.numbers}
        weakref.finalize(self, desk.gone.append, ("call", box.number))

    def _is_again(self, output: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether an output came out the same: writes that move no version (`.data`, fused optimizers) show in that.

        One that the caller has written to since says nothing.
        """
        number = self.outputs[id(output)]
        if not self._is_as_it_came(output):
            return True
        return number < len(tensors) and equal_tensors(output, tensors[number].to(output.device))

    def _is_as_it_came(self, output: Tensor) -> bool:
        return output._version == self.looked[self.outputs[id(output)]]

    def _lost(self, what: str) -> WorkerFailure:
        return WorkerFailure(
            f"the worker of {self.name} ended between a forward and its backward, and the {what} changed since, so "
            f"that its part cannot be run again exactly.\n"
            f"Call backward() before the module is changed, or run the step again."
        )

    def _same_structure(self) -> bool:
        known = set(map(id, self.modules))
        tensors = set(map(id, self.told.table))
        root = self.modules[0]
        return all(id(module) in known for module in root.modules()) and all(
            id(parameter) in tensors for parameter in root.parameters()
        )

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """The module with the attributes that it had before the call, and with what was in its containers."""
        now = {key: _holder(key).get(key[1], MISSING) for key in self.before}
        held = [(container, contents_of(container)) for container, _ in self.inside.values()]
        try:
            for container, contents in self.inside.values():
                put(container, contents)
            for key, value in self.before.items():
                _set(key, value)
            yield
        finally:
            for container, contents in held:
                put(container, contents)
            for key, value in now.items():
                _set(key, value)


def remember_values(root: nn.Module, written: Iterable[Tensor]) -> None:
    """Before state of a module is written: what it was, for calls that may have to be run again."""
    values: dict[int, Tensor] = {}
    for call in outstanding(root):
        values = values or {id(source): source.detach().clone() for source in written}
        for number, copy in values.items():
            call.values.setdefault(number, copy)


def _alone(value: Any) -> Any:
    """A value without the graphs that its tensors come from, which may lead to earlier calls and so on."""
    return map_tensors(lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), value)


def _tensor_alone(item: Any) -> Any:
    return _alone(item) if isinstance(item, Tensor) else item


def _leads_back(item: Any) -> bool:
    """Whether something else than a tensor holds graphs: it cannot be had without them and as it is."""
    if isinstance(item, Tensor) or is_opaque(item):
        return False
    return any(not tensor.is_leaf for tensor in tensors_in(item))


def _holder(key: Attribute) -> dict[str, Any]:
    module, _, buffer = key
    held: dict[str, Any] = module._buffers if buffer else module.__dict__
    return held


def _set(key: Attribute, value: Any) -> None:
    holder, name = _holder(key), key[1]
    if value is MISSING:
        holder.pop(name, None)
    else:
        holder[name] = value


class Versions:
    """How many times tensors were written to when this was made."""

    def __init__(self, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
        self._places, self._tensors = places, tensors
        self._then = self._read()

    def _read(self) -> list[int]:
        return list(map(version_of, self._tensors))

    def moved(self) -> list[int]:
        """The places of those that were written to since."""
        now = self._read()
        if now == self._then:
            return []
        return [n for n, then, later in zip(self._places, self._then, now, strict=True) if then != later]
