"""Attributes that outputs have beside what they hold, on classes derived from lists, numbers and the like."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Level(int):
    seen: Any


class Row(tuple[Tensor, ...]):
    seen: Any


class Rows(list[Tensor]):
    seen: Any


class Table(dict[str, Tensor]):
    seen: Any


class Shown(dict[str, Tensor]):
    """A dictionary whose items are attributes too."""

    def __init__(self, **items: Tensor) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


class Grade(enum.IntEnum):
    LOW = 1


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda y: Level(3),
    "a tuple": lambda y: Row((y,)),
    "a list": lambda y: Rows([y, y]),
    "a dictionary": lambda y: Table(y=y),
}


class Net(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any], see: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.make, self.see = make, see

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        made = self.make(y)
        if self.see is not None:
            made.seen = self.see(y)
        return {"y": y, "made": made}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("see", [lambda y: float(y.detach().sum()), lambda y: [y]], ids=["a number", "a tensor"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_what_differs_is_refused(probe: bool, make: Callable[[Tensor], Any], see: Callable[[Tensor], Any]) -> None:
    words = r"(?s)the output 'made': the attributes \['seen'\] of \w+ differ.*merge=\{'made': \.\.\.\}.*as entries"
    with (
        instep.DataParallel(Net(make, see), ["cpu"] * 2, engine="serial", probe=probe) as model,
        pytest.raises(instep.MergeError, match=words),
    ):
        model(torch.randn(5, 3))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_what_is_the_same_is_kept(engine: str, make: Callable[[Tensor], Any]) -> None:
    net, x = Net(make, lambda y: ["as it is", 1.5]), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(2):
            mine, plain = model(x)["made"], net(x)["made"]
            assert mine.seen == plain.seen
            assert type(mine) is type(plain)
            assert mine == plain if isinstance(plain, int) else torch.testing.assert_close(mine, plain) is None


@pytest.mark.parametrize("make", [lambda y: Shown(y=y), lambda y: Grade.LOW], ids=["shown", "a member"])
def test_what_is_no_attribute_of_its_own_is_no_hindrance(make: Callable[[Tensor], Any]) -> None:
    net, x = Net(make, None), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
        mine, plain = model(x)["made"], net(x)["made"]
        assert mine is plain if isinstance(plain, Grade) else torch.testing.assert_close(mine, plain) is None


def test_a_rule_decides() -> None:
    net, x = Net(MAKERS["a number"], lambda y: float(len(y))), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", merge={"made": "first"}) as model:
        assert model(x)["made"].seen == 3.0
