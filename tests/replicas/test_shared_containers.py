"""State in uncommon holders: ordered dictionaries, slots, dictionaries and lists of classes of their own."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Ordered(nn.Module):
    """What was used last is kept at the end, as in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.held: Any = collections.OrderedDict(first=0.0, second=0.75, third=0.25)

    def forward(self, x: Tensor) -> Tensor:
        oldest = next(iter(self.held))
        self.held[oldest] += 1.5
        self.held.move_to_end(oldest)
        out: Tensor = self.layer(x) + self.held[oldest]
        return out


class Tensors(Ordered):
    def __init__(self) -> None:
        super().__init__()
        self.held = collections.OrderedDict(first=torch.zeros(2), second=torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        oldest = next(iter(self.held))
        self.held[oldest] = self.held[oldest] + 1
        self.held.move_to_end(oldest)
        out: Tensor = self.layer(x) + self.held[oldest]
        return out


class Slots:
    __slots__ = ("calls", "shift")

    def __init__(self) -> None:
        self.calls, self.shift = 0.0, torch.zeros(2)


class Both:
    """Slots, and a dictionary for the rest."""

    __slots__ = ("__dict__", "calls")

    def __init__(self) -> None:
        self.calls, self.shift = 0.0, torch.zeros(2)


class Shown(dict[str, Any]):
    """A dictionary whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Tagged(list[float]):
    """A list with an attribute."""

    calls = 0.0


class Window(collections.deque[float]):
    """A deque that knows more."""

    def total(self) -> float:
        return sum(self)


class Counts(collections.defaultdict[str, float]):
    """A dictionary that is made with more than its default."""

    def __init__(self, unit: float) -> None:
        super().__init__(float)
        self.unit = unit

    def __reduce__(self) -> Any:
        return Counts, (self.unit,), None, None, iter(self.items())


class Holds(nn.Module):
    def __init__(self, held: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.held, self.change = held, change

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.change(self.held)
        return out


def count(held: Any) -> Any:
    held.calls += 1.5
    return held.calls


def shift(held: Any) -> Any:
    held.shift = held.shift + 1
    return held.shift


def count_item(held: Any) -> Any:
    held["calls"] += 1.5
    return held["calls"]


def push(held: Any) -> Any:
    held.append(len(held) + 0.5)
    return held.total()


def count_units(held: Any) -> Any:
    held["calls"] += held.unit
    held.unit += 0.25
    return held["calls"]


HOLDERS: dict[str, Callable[[], Holds]] = {
    "slots": lambda: Holds(Slots(), count),
    "a tensor in slots": lambda: Holds(Slots(), shift),
    "slots and more": lambda: Holds(Both(), count),
    "slots and a tensor beside": lambda: Holds(Both(), shift),
    "items shown as attributes": lambda: Holds(Shown(calls=0.0), count),
    "a tensor shown as attribute": lambda: Holds(Shown(shift=torch.zeros(2)), shift),
    "a list with an attribute": lambda: Holds(Tagged(), count),
    "a deque of a class": lambda: Holds(Window([1.0], maxlen=3), push),
    "a default of a class": lambda: Holds(Counts(2.0), count_units),
    "a user dictionary": lambda: Holds(collections.UserDict(calls=0.0), count_item),
    "a chain of dictionaries": lambda: Holds(collections.ChainMap({}, {"calls": 0.0}), count_item),
    "ordered": Ordered,  # type: ignore[dict-item]
    "ordered tensors": Tensors,  # type: ignore[dict-item]
}


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS.keys())
def test_container_contents_match_the_plain_module(wrap: Callable[..., Any], make: Callable[[], Holds]) -> None:
    plain, net = make(), make()
    net.load_state_dict(plain.state_dict())
    held, model = net.held, wrap(net)
    for size in (7, 4, 1, 6):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), plain(x))
        if isinstance(held, dict):
            assert list(held) == list(plain.held)
            assert repr(held) == repr(plain.held)
    assert net.held is held
    assert type(held) is type(plain.held)


class Keeps(nn.Module):
    """Keeps an activation in a dictionary and writes a line a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kept: dict[str, Tensor] = {}
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.kept["out"] = out.detach()
        self.log.append(0)
        return out


def test_tensors_with_a_batch_dim_are_concatenated_whatever_their_old_size(wrap: Callable[..., Any]) -> None:
    """A part may have the shape of what an earlier, smaller batch left; and a shard of one sample is no entry."""
    net = Keeps()
    model = wrap(net, replicas=4)
    for count, size in enumerate((2, 5, 3, 3, 9, 9)):
        net.train(count != 1)
        x = torch.randn(size, 3)
        model(x)
        torch.testing.assert_close(net.kept["out"], net.layer(x).detach())
        assert net.log == [0] * (count + 1)
