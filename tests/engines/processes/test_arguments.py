"""Arguments that `forward` changes in place: tensors are copied back from workers, other objects raise an error."""

from __future__ import annotations

import functools
import logging
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
    """A user-defined object, one per sample."""

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


class ChangesArgument(nn.Module):
    """Changes one of its arguments with a given function, on all replicas or only in workers."""

    def __init__(self, change: Callable[[Any], Any], only_workers: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.change, self.only_workers = change, only_workers

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out: Tensor = self.layer(x)
        if inside_worker() or not self.only_workers:
            self.change(given)
        return out


def each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change_all(items: Any) -> None:
        for item in items:
            change(item)

    return change_all


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


PRIVATE_WITH_GRAD = {"dictionaries", "lists", "queues", "entries"}
"""Objects that each replica has a copy of when gradients are enabled."""


CASES = pytest.mark.parametrize(
    ("case", "grad"),
    [(case, grad) for case in COLUMNS for grad in (True, False) if not (grad and case in PRIVATE_WITH_GRAD)],
)


@CASES
def test_threads_change_the_callers_objects(wrap: Any, case: str, grad: bool) -> None:
    make, change = COLUMNS[case]
    net = ChangesArgument(change)
    model = wrap(net, 3, engine="threads", probe=False)
    mine, plain = make(7), make(7)
    kept = list(mine)
    for _ in range(2):
        x = torch.randn(7, 4)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x, mine), net(x, plain))
    assert mine == plain if case == "sets" else repr(mine) == repr(plain)
    assert isinstance(mine, np.ndarray) or all(a is b for a, b in zip(mine, kept, strict=True))


@pytest.mark.usefixtures("workers")
@CASES
def test_changing_a_callers_object_in_a_worker_raises(wrap: Any, case: str, grad: bool) -> None:
    make, change = COLUMNS[case]
    given, before = make(7), make(7)
    kept = list(given)
    model = wrap(ChangesArgument(change), 3, engine="processes", probe=False)
    message = r"forward changes argument 'given\b[\s\S]*worker process, where it is a copy[\s\S]*engine='threads'"
    with torch.set_grad_enabled(grad), pytest.raises(instep.StructureError, match=message):
        model(torch.randn(7, 4), given)
    # Replica 0 runs in this process and changed the caller's objects; the change is rolled back.
    assert given == before if case == "sets" else repr(given) == repr(before)
    assert isinstance(given, np.ndarray) or all(a is b for a, b in zip(given, kept, strict=True))


@pytest.mark.usefixtures("workers")
def test_the_error_names_the_object_inside_the_argument(wrap: Any) -> None:
    model = wrap(
        ChangesArgument(each(lambda one: one.log.update(number=1)), only_workers=True),
        3,
        engine="processes",
        probe=False,
    )
    with torch.no_grad(), pytest.raises(instep.StructureError, match=r"argument 'given\.2\.log' on replica 1"):
        model(torch.randn(6, 4), [Entry(i) for i in range(6)])


@pytest.mark.usefixtures("workers")
def test_caching_a_property_is_not_a_change(wrap: Any) -> None:
    samples = [Sample(i) for i in range(6)]
    net = ChangesArgument(each(lambda sample: sample.text))
    x = torch.randn(6, 4)
    torch.testing.assert_close(wrap(net, 3, engine="processes", probe=False)(x, samples), net(x, samples))


@pytest.mark.usefixtures("workers")
def test_logging_is_not_a_change(wrap: Any) -> None:
    sample = Sample(0)
    sample.notes.append(logging.getLogger("instep-test"))
    net = ChangesArgument(lambda given: given.notes[0].debug("unseen"))
    x = torch.randn(6, 4)
    logging.getLogger("instep-test").setLevel(logging.WARNING)  # clears the caches of loggers
    torch.testing.assert_close(wrap(net, 3, engine="processes", probe=False)(x, sample), net(x, sample))


@pytest.mark.usefixtures("workers")
def test_auto_falls_back_to_threads(wrap: Any) -> None:
    net = ChangesArgument(each(note))
    model = wrap(net, 3, engine="processes", probe=False)
    model._instep_choice = model._instep_choice._replace(automatic=True)
    given, plain = [Sample(i) for i in range(7)], [Sample(i) for i in range(7)]
    x = torch.randn(7, 4)
    with pytest.warns(UserWarning, match="forward changes argument 'given"):
        torch.testing.assert_close(model(x, given), net(x, plain))
    assert repr(given) == repr(plain)


REPLICATED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an object": (lambda: Sample(1), note),
    "inside an object": (lambda: Sample(1), lambda given: given.notes.append(1)),
    "a list": (lambda: instep.whole([1]), lambda given: given.append(2)),
    "an array": (lambda: instep.whole(np.zeros(2)), add),
}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("case", REPLICATED)
def test_changing_a_replicated_argument_in_a_worker_raises(wrap: Any, case: str) -> None:
    make, change = REPLICATED[case]
    given = make()
    inside = getattr(given, "value", given)
    before = repr(inside)
    model = wrap(ChangesArgument(change, only_workers=True), 3, engine="processes", probe=False)
    with pytest.raises(instep.StructureError, match="forward changes argument 'given") as caught:
        model(torch.randn(6, 4), given)
    assert "threads" not in str(caught.value)
    assert repr(inside) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_each_replica_has_its_own_container(wrap: Any, engine: str) -> None:
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


@pytest.mark.parametrize("engine", ENGINES)
def test_writes_through_data_reach_the_caller(wrap: Any, engine: str) -> None:
    net = ChangesArgument(lambda given: given.data.mul_(2))
    model = wrap(net, 3, engine=engine, probe=False)
    mine = torch.arange(7.0)
    plain = mine.clone()
    for _ in range(6):
        x = torch.randn(7, 4)
        torch.testing.assert_close(model(x, mine), net(x, plain))
    torch.testing.assert_close(mine, plain)


@pytest.mark.usefixtures("workers")
def test_a_worker_death_after_forward_wrote_its_arguments_is_not_recovered(wrap: Any) -> None:
    model = wrap(ChangesArgument(add), 2, engine="processes", probe=False)
    out = model(torch.randn(6, 4), torch.zeros(6))
    os.kill(model._instep_engine._pool.get(1).pid, signal.SIGKILL)
    with pytest.raises(instep.WorkerFailure, match="the arguments changed since"):
        out.sum().backward()
