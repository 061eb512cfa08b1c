"""Attributes on numbers, texts and tuples of classes of their own: `class Level(int)`, and `self.level.seen += 1`."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep

from .test_shared_containers import Holds, Tagged, count, shift


class Level(int):
    """A number that knows more; it is made with another argument than the number."""

    calls = 0.0

    def __new__(cls, name: str, number: int = 3) -> Level:
        made = super().__new__(cls, number)
        made.name = name
        return made

    name: str
    shift: Tensor

    def __int__(self) -> int:
        raise AssertionError("nobody asks for a plain number")


class Factor(float):
    calls = 0.0


class Turn(complex):
    calls = 0.0


class Word(str):
    calls = 0.0
    shift: Tensor


class Raw(bytes):
    calls = 0.0


class Exact(float):
    """A number with slots."""

    __slots__ = ("calls",)
    calls: float


class Slotted:
    """No number at all, and no dictionary."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0.0


class Row(tuple[float, ...]):
    """A tuple with attributes."""

    calls = 0.0
    shift: Tensor


class Point(collections.namedtuple("Point", ["x", "y"])):
    """A tuple with names and, since it has no slots of its own, with attributes."""

    calls = 0.0


class Day(datetime.date):
    calls = 0.0


class Fixed(frozenset[float]):
    calls = 0.0


class Grid(np.ndarray[Any, Any]):
    calls = 0.0


class Share(fractions.Fraction):
    calls = 0.0


class Price(decimal.Decimal):
    calls = 0.0


class Tally(collections.Counter[str]):
    calls = 0.0


class Table(collections.defaultdict[str, float]):
    calls = 0.0


def function() -> Any:
    made: Any = lambda: None  # noqa: E731
    made.calls = 0.0
    return made


def within(held: Any) -> Any:
    held.inner = Level("low")
    return held


def with_shift(held: Any) -> Any:
    held.shift = torch.zeros(2)
    return held


def exact() -> Exact:
    made = Exact(0.5)
    made.calls = 0.0
    return made


def inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda held: change(held["level"][0])


def of_a_key(held: Any) -> Any:
    return count(next(iter(held)))


VALUES: dict[str, Callable[[], Holds]] = {
    "an int": lambda: Holds(Level("low"), count),
    "a tensor on an int": lambda: Holds(with_shift(Level("low")), shift),
    "a float": lambda: Holds(Factor(0.5), count),
    "a float with slots": lambda: Holds(exact(), count),
    "a complex": lambda: Holds(Turn(1, 2), count),
    "a str": lambda: Holds(Word("text"), count),
    "a tensor on a str": lambda: Holds(with_shift(Word("text")), shift),
    "bytes": lambda: Holds(Raw(b"raw"), count),
    "a tuple": lambda: Holds(Row((1.0, 2.0)), count),
    "a tensor on a tuple": lambda: Holds(with_shift(Row((1.0, 2.0))), shift),
    "a tuple with names": lambda: Holds(Point(1, 2), count),
    "a tuple of tensors": lambda: Holds(Point(torch.zeros(1), torch.ones(1)), count),
    "an int deeper inside": lambda: Holds({"level": [Level("low")]}, inside(count)),
    "a tuple deeper inside": lambda: Holds({"level": [Row((1.0,))]}, inside(count)),
    "a key": lambda: Holds({Word("text"): 1.0}, of_a_key),
    "in a set": lambda: Holds({Word("text")}, of_a_key),
    "in a set that stays": lambda: Holds(frozenset({Word("text")}), of_a_key),
    "a set that stays": lambda: Holds(Fixed({1.0}), count),
    "an array": lambda: Holds(np.zeros(2).view(Grid), count),
    "a fraction": lambda: Holds(Share(1, 2), count),
    "a counter": lambda: Holds(Tally("aab"), count),
    "a dictionary with a default": lambda: Holds(Table(float, a=1.0), count),
    "a function": lambda: Holds(function(), count),
    "a tensor on a function": lambda: Holds(with_shift(function()), shift),
    "on what is on a tuple": lambda: Holds(within(Row((1.0,))), lambda held: count(held.inner)),
    "on what is on a list": lambda: Holds(within(Tagged()), lambda held: count(held.inner)),
}


def bare(held: Any) -> Any:
    """The value itself, out of what holds it."""
    while type(held) in (dict, list, set, frozenset):
        held = held["level"] if type(held) is dict and "level" in held else next(iter(held))
    return getattr(held, "inner", held)


USERS: list[Callable[[], Any]] = [
    lambda: Level("low"),
    lambda: Day(2020, 1, 1),
    lambda: Share(1, 2),
    lambda: Price(1),
    lambda: Tally("aab"),
    lambda: Table(float, a=1.0),
    lambda: np.zeros(2).view(Grid),
    lambda: Row((1.0,)),
]


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_attributes_set_on_a_container_match_the_plain_module(
    wrap: Callable[..., Any], make: Callable[[], Holds]
) -> None:
    plain, net = make(), make()
    net.load_state_dict(plain.state_dict())
    held, model = net.held, wrap(net)
    for size in (7, 4, 1, 6):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), plain(x))
        mine, theirs = bare(held), bare(plain.held)
        assert mine.calls == theirs.calls
        torch.testing.assert_close(getattr(mine, "shift", None), getattr(theirs, "shift", None))
    assert net.held is held
    assert type(bare(held)) is type(bare(plain.held))


@pytest.mark.parametrize("make", USERS, ids=lambda make: type(make()).__name__)
def test_a_change_by_the_user_reaches_every_replica(wrap: Callable[..., Any], make: Callable[[], Any]) -> None:
    net = Holds(make(), lambda held: held.calls)
    model, x = wrap(net), torch.randn(5, 3)
    for calls in (0.0, 2.0, 5.0):
        net.held.calls = calls
        torch.testing.assert_close(model(x), net.layer(x) + calls)


class Sums(nn.Module):
    """Adds up on a number what it saw."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        self.held.calls += float(x.sum())
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("make", [lambda: Level("low"), lambda: Word("text")], ids=["int", "str"])
def test_different_attribute_values_need_a_rule(wrap: Callable[..., Any], make: Callable[[], Any]) -> None:
    held, x = make(), torch.arange(15.0).view(5, 3)
    net = Sums(held)
    with pytest.raises(instep.StateError, match=r"forward changed 'held\.calls'.*\n.*\n  state=\{'held\.calls': 'sum'"):
        wrap(net)(x)
    assert held.calls == 0.0
    wrap(net, state={"held.calls": "sum"})(x)
    assert held.calls == 105.0


class Mode(enum.Enum):
    LOW = "low"

    def __init__(self, _: str) -> None:
        self.calls = 0.0


class Grade(enum.IntEnum):
    LOW = 1


class Sort(str, enum.Enum):
    LOW = "low"


MEMBERS = {"enum": Mode.LOW, "int": Grade.LOW, "str": Sort.LOW}


@pytest.mark.parametrize("held", [*MEMBERS.values(), Day(2020, 1, 1)], ids=[*MEMBERS, "date"])
def test_changing_an_object_that_cannot_be_copied_is_an_error(wrap: Callable[..., Any], held: Any) -> None:
    held.calls = 0.0
    net = Holds((held,), lambda now: count(now[0]))
    words = r"forward changes 'held\.0', which all replicas share.*\nChange it outside forward\."
    with pytest.raises(instep.StateError, match=words):
        wrap(net)(torch.randn(5, 3))
    assert held.calls == 0.0


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("held", MEMBERS.values(), ids=MEMBERS.keys())
def test_enum_members_are_shared(engine: str, held: Any) -> None:
    """Whatever it holds: `forward` may ask whether it is this one."""
    held.shift = torch.ones(2)
    net = Holds(held, lambda now: now.shift if now is type(now).LOW else -1.0)
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        torch.testing.assert_close(model(x), net.layer(x) + 1.0)
    del held.shift


class Remakes(nn.Module):
    """Makes the value anew at each call, with a number of its samples beside it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.make, self.held = make, make()

    def forward(self, x: Tensor) -> Tensor:
        self.held = self.make()
        self.held.calls = float(x.sum())
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("make", [lambda: Factor(0.5), lambda: Row((1.0, 2.0))], ids=["float", "tuple"])
def test_values_that_differ_in_their_attributes_are_not_equal(
    wrap: Callable[..., Any], make: Callable[[], Any]
) -> None:
    net = Remakes(make)
    before = net.held
    with pytest.raises(instep.StateError, match="forward changed 'held' to a different value on each replica"):
        wrap(net)(torch.arange(15.0).view(5, 3))
    assert net.held is before


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("make", [lambda: Level("low"), lambda: Word("w"), exact, lambda: Row((1.0, 2.0)), Slotted])
def test_an_argument_is_not_written(engine: str, make: Callable[[], Any]) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, given: Any) -> Tensor:
            given.calls += 1.0
            out: Tensor = self.layer(x) * given.calls
            return out

    given = make()
    wrapped = instep.DataParallel(Counts(), ["cpu"] * 2, engine=engine)
    with wrapped as model, pytest.raises(instep.StructureError, match="forward changes argument 'given'"):
        model(torch.randn(5, 3), given if make is Slotted else instep.whole(given))
    assert given.calls == 0.0
