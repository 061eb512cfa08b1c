"""Where capabilities meet: carried state and the probe, compiled code and batch normalisation, losses and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import instep

ENGINES = pytest.mark.parametrize("engine", ["serial", "threads"])


class Carries(nn.Module):
    """Keeps a hidden state from call to call; `out` says what it makes of it, `read` how it reads it."""

    def __init__(self, out: Callable[..., Any], read: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.h: Tensor | None = None
        self.kl: Tensor | None = None
        self.out, self.read = out, read

    def forward(self, x: Tensor, mode: str = "a") -> Any:
        h = torch.tanh(self.layer(x) + (torch.zeros_like(x) if self.h is None else self.read(self.h)))
        before, self.h = self.h, h.detach()
        self.kl = h.square().mean()
        return self.out(h, mode, before)


def mean_or_sum(h: Tensor, mode: str, before: Any) -> Tensor:
    return h.square().mean() if mode == "a" else h.square().sum()


def roll(h: Tensor) -> Tensor:
    return h.roll(1, 0)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "another meaning in another mode": (mean_or_sum, lambda h: h),
    "numbers only": (lambda h, mode, before: {"score": float(h.detach().sum())}, lambda h: h),
    "nothing but an attribute": (lambda h, mode, before: None, lambda h: h),
    "read as a whole": (lambda h, mode, before: h, lambda h: h.mean(0)),
    "the row of a neighbour": (lambda h, mode, before: h, roll),
    "small numbers": (lambda h, mode, before: h * 1e-7, roll),
    "seen one call late": (lambda h, mode, before: h * 0 if before is None else before, roll),
}


@ENGINES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:forward may read:UserWarning")
def test_carried_state_and_the_probe(case: str, engine: str) -> None:
    net = Carries(*CASES[case]).double()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for mode in "aaabbab":
            x = torch.randn(6, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x, mode), plain(x, mode), rtol=1e-8, atol=1e-15)
            torch.testing.assert_close(net.h, plain.h)
            torch.testing.assert_close(net.kl, plain.kl)


@ENGINES
def test_samples_that_meet_beside_carried_state(engine: str) -> None:
    net = Carries(lambda h, mode, before: h if mode == "a" else h.softmax(0))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            model(torch.randn(6, 3))
        with pytest.raises(instep.MergeError, match="depend on other samples"):
            model(torch.randn(6, 3), "b")


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


@ENGINES
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_batch_normalisation_meets_once_and_is_one_break(engine: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = Normalised().double()
    net = copy.deepcopy(plain)
    net.compile(backend="eager")
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            x = torch.randn(7, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x), plain(x))
        assert counters["stats"]["unique_graphs"] <= 2 * 2
    torch.testing.assert_close(net.norm.running_var, plain.norm.running_var)
    torch._dynamo.reset()


def test_explain_speaks_of_the_call_it_is_asked_about() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, how: str) -> Tensor:
            return x.square().mean() if how == "mean" else x.square().sum()

    with instep.DataParallel(Net(), ["cpu"] * 2) as model:
        x = torch.randn(5, 3)
        model(x, "mean")
        assert "tried on" in str(model.explain(x, "mean"))
        assert "not tried yet" in str(model.explain(x, "sum"))
