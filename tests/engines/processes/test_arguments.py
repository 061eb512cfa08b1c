"""What `forward` does to its arguments in a worker: the caller sees it as in threads, or is told."""

from __future__ import annotations

import functools
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.runtime.process_role import inside_worker

ENGINES = ["threads", "processes"]


class Sample:
    """An object of the user's, one a sample."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.notes: list[Any] = []

    @functools.cached_property
    def text(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return f"{self.number} {self.notes} {sorted(vars(self))}"


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0

    def __repr__(self) -> str:
        return f"seen {self.seen}"


@dataclass
class Entry:
    number: int
    log: dict[str, Any] = field(default_factory=dict)


class Does(nn.Module):
    """Does something to one of its arguments; where only workers do, the first replica does nothing."""

    def __init__(self, deed: Callable[[Any], Any], only_workers: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.deed, self.only_workers = deed, only_workers

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out: Tensor = self.layer(x)
        if inside_worker() or not self.only_workers:
            self.deed(given)
        return out


def each(deed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def all_of_them(given: Any) -> None:
        for one in given:
            deed(one)

    return all_of_them


def note(sample: Any) -> None:
    sample.notes.append(len(sample.text))
    sample.number += 10


def add(array: Any) -> None:
    array += 1


COLUMNS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "objects": (lambda n: [Sample(i) for i in range(n)], each(note)),
    "objects with slots": (lambda n: [Slotted() for _ in range(n)], each(lambda one: setattr(one, "seen", 5))),
    "dictionaries": (
        lambda n: [{"id": str(i)} for i in range(n)],
        each(lambda one: one.update(id=one["id"] * 2, new=1)),
    ),
    "lists": (lambda n: [[str(i)] for i in range(n)], each(lambda one: one.append(len(one)))),
    "sets": (
        lambda n: [{str(i), "a", "b", "c"} for i in range(n)],
        each(lambda one: (one.add("more"), one.discard("b"))),
    ),
    "queues": (lambda n: [deque([str(i)], maxlen=3) for i in range(n)], each(lambda one: one.appendleft("first"))),
    "entries": (lambda n: [Entry(i) for i in range(n)], each(lambda one: one.log.update(number=one.number))),
    "an array": (lambda n: np.arange(float(n * 2)).reshape(n, 2), add),
    "arrays": (lambda n: [np.full(2, float(i)) for i in range(n)], each(add)),
}


OWN_IN_A_GRAPH = {"dictionaries", "lists", "queues", "entries"}
"""What each replica has for itself where gradients are wanted."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "grad"),
    [(case, grad) for case in COLUMNS for grad in (True, False) if not (grad and case in OWN_IN_A_GRAPH)],
)
def test_what_one_replica_is_given_is_changed_as_on_one_device(wrap: Any, case: str, engine: str, grad: bool) -> None:
    make, deed = COLUMNS[case]
    net = Does(deed)
    model = wrap(net, 3, engine=engine, probe=False)
    mine, plain = make(7), make(7)
    kept = list(mine)
    for _ in range(2):
        x = torch.randn(7, 4)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x, mine), net(x, plain))
    assert mine == plain if case == "sets" else repr(mine) == repr(plain)
    assert isinstance(mine, np.ndarray) or all(a is b for a, b in zip(mine, kept, strict=True))


WHOLE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an object": (lambda: Sample(1), note),
    "inside an object": (lambda: Sample(1), lambda given: given.notes.append(1)),
    "a list": (lambda: instep.whole([1]), lambda given: given.append(2)),
    "an array": (lambda: instep.whole(np.zeros(2)), add),
}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", WHOLE)
def test_what_all_are_given_is_not_changed_by_a_worker_alone(wrap: Any, case: str) -> None:
    make, deed = WHOLE[case]
    given = make()
    inside = getattr(given, "value", given)
    before = repr(inside)
    model = wrap(Does(deed, only_workers=True), 3, engine="processes", probe=False)
    with pytest.raises(instep.StructureError, match="forward changes the argument 'given"):
        model(torch.randn(6, 4), given)
    assert repr(inside) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_a_structure_is_each_replicas_own(wrap: Any, engine: str) -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, batch: dict[str, Any]) -> Any:
            batch["h"] = self.layer(batch["x"])
            return batch["h"] * 2

    net = Fills()
    model, batch = wrap(net, 3, engine=engine), {"x": torch.randn(6, 4)}
    torch.testing.assert_close(model(batch), net(dict(batch)))
    assert list(batch) == ["x"]


@pytest.mark.usefixtures("workers")
def test_a_graph_put_into_an_argument_is_an_error(wrap: Any) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor, samples: list[Sample]) -> Tensor:
            out: Tensor = self.layer(x)
            samples[0].notes.append(out)
            return out

    samples = [Sample(i) for i in range(6)]
    model = wrap(Keeps(), 2, engine="processes", probe=False)
    with pytest.raises(instep.EngineError, match=r"needs a gradient into an argument[\s\S]*detach"):
        model(torch.randn(6, 4), samples)
    with torch.no_grad():
        x = torch.randn(6, 4)
        model(x, samples)
    torch.testing.assert_close(samples[3].notes[-1], model.module.layer(x[3:]).detach())


@pytest.mark.parametrize("engine", ENGINES)
def test_writes_that_no_version_tells_of_come_back(wrap: Any, engine: str) -> None:
    net = Does(lambda given: given.data.mul_(2))
    model = wrap(net, 3, engine=engine, probe=False)
    mine = torch.arange(7.0)
    plain = mine.clone()
    for _ in range(6):
        x = torch.randn(7, 4)
        torch.testing.assert_close(model(x, mine), net(x, plain))
    torch.testing.assert_close(mine, plain)


@pytest.mark.usefixtures("workers")
def test_a_death_after_forward_has_written_its_arguments_is_a_failure(wrap: Any) -> None:
    model = wrap(Does(add), 2, engine="processes", probe=False)
    out = model(torch.randn(6, 4), torch.zeros(6))
    os.kill(model._instep_engine._pool.get(1).pid, signal.SIGKILL)
    with pytest.raises(instep.WorkerFailure, match="the arguments changed since"):
        out.sum().backward()
