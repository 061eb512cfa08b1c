"""A call that is run a second time does not write to its arguments twice: it raises, and says what to write."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

pytestmark = pytest.mark.usefixtures("one_core")


class Net(nn.Module):
    """Doubles its argument in place, and does something else."""

    def __init__(self, also: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.also = nn.Linear(4, 3), also
        self.log: list[str] = []
        self.count = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        out: Tensor = self.layer(x)
        self.also(self, out)
        return out


AGAIN: dict[str, Callable[[Any, Tensor], Any]] = {
    "a list that replicas share": lambda self, out: self.log.append("a"),
    "a hook on a tensor": lambda self, out: out.requires_grad and out.register_hook(lambda g: g / g.norm()),
    "an iterator": lambda self, out: next(self.count),
}


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("also", AGAIN.values(), ids=AGAIN.keys())
@pytest.mark.filterwarnings("ignore:.*one device")
def test_an_argument_is_not_written_to_twice(engine: str, also: Callable[[Any, Tensor], Any]) -> None:
    net = Net(also)
    x = torch.ones(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        with pytest.raises(instep.StateError, match=r"writes to its argument 'x'[\s\S]*x = x\.clone\(\)"):
            model(x)
        assert not net.log
        y = torch.ones(6, 4)
        torch.testing.assert_close(model(y), net.layer(torch.full((6, 4), 2.0)))
        assert torch.equal(y, torch.full((6, 4), 2.0))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_one_that_is_run_once_may_write(engine: str) -> None:
    net = Net(lambda self, out: None)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        x = torch.ones(6, 4)
        torch.testing.assert_close(model(x), net.layer(torch.full((6, 4), 2.0)))
        assert torch.equal(x, torch.full((6, 4), 2.0))
