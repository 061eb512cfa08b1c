"""A worker dies between forward and backward, and containers of the module have changed meanwhile."""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.engines.processes.controller.replay import ReplayableCall

from .test_deaths import pids, wrap


class Counts(nn.Module):
    """Scales by its number of calls, counted in several kinds of containers; keeps the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen: list[int] = []
        self.by_name = {"calls": 0, "inside": {"calls": 0}}
        self.state = SimpleNamespace(calls=0)
        self.outputs: deque[Tensor] = deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        calls = len(self.seen) + self.by_name["calls"] + self.by_name["inside"]["calls"] + self.state.calls
        y: Tensor = self.layer(x) * (1.0 + calls)
        if self.outputs:
            y = y + self.outputs[-1].mean()
        self.seen.append(1)
        self.by_name["calls"] += 1
        self.by_name["inside"]["calls"] += 1
        self.state.calls += 1
        self.outputs.append(self.layer.weight.detach() * calls)
        return y


Between = Callable[[Counts], Any]


def gradients(kill: bool, between: Between) -> Iterator[Tensor]:
    """Gradients of three calls; the last two run forward before either backward."""
    torch.manual_seed(0)
    net, x = Counts(), torch.randn(6, 4)
    with wrap(net, restarts=10) as model:
        model(x).square().sum().backward()
        first, second = model(x), model(x)
        between(net)
        if kill:
            os.kill(pids(model)[0], signal.SIGKILL)
        for out in (second, first):
            net.zero_grad()
            out.square().sum().backward()
            assert net.layer.weight.grad is not None
            yield net.layer.weight.grad.clone()
        counted = len(net.seen), net.by_name, net.state.calls
        net.zero_grad()
        model(x).sum().backward()
        yield net.layer.weight.grad.clone()
    yield torch.tensor([float(counted[0]), counted[1]["calls"], counted[1]["inside"]["calls"], counted[2]])


def _clear(net: Counts) -> None:
    net.seen.clear()
    net.by_name["more"] = 3


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda net: None, id="by forward alone", marks=pytest.mark.slow),
        pytest.param(_clear, id="by the script too"),
    ],
)
@pytest.mark.slow
def test_the_replayed_step_sees_the_original_containers(between: Between) -> None:
    undisturbed, disturbed = (list(gradients(kill, between)) for kill in (False, True))
    assert len(undisturbed) == 4
    for mine, theirs in zip(disturbed, undisturbed, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.slow
def test_graphs_in_a_container_do_not_keep_earlier_calls_alive(packed: bool) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.last: list[Any] = [None]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            self.last[0] = (y,) if packed else y
            return y

    net = Keeps()
    with wrap(net) as model:
        for _ in range(12):
            model(torch.randn(6, 4)).sum().backward()
        gc.collect()
        assert sum(isinstance(thing, ReplayableCall) for thing in gc.get_objects()) <= 4
