"""Random sequences of collectives have the same gradients in every engine mode.

The modes are: collectives in the backward (`threads`), one backward over all replicas (`joint`), and one joint graph
(`serial`).

All replicas run the same sequence of collectives. Each replica chooses the input, whether to detach it, and whether to
use the result. The outputs are then used together, one after the other, in part, or more than once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from ..replica_helpers import replicated, weighted_loss

pytestmark = pytest.mark.usefixtures("one_core")


class Program(nn.Module):
    """A random program, determined by a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.seed = seed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        common = random.Random(self.seed)
        own = random.Random(1000 * self.seed + instep.replica().index)
        values = [x, self.layers[0](x)]
        for _ in range(common.randint(2, 7)):
            kind = common.choice(["layer", "gather", "list", "sum", "mean", "max"])
            layer = common.choice(self.layers)
            value = own.choice(values[-3:]) if common.random() < 0.5 else values[-1]
            value = value.detach() if own.random() < 0.2 else value
            values.append(self.step(kind, layer, value, own.random() < 0.7))
        return values[-2], values[-1]

    def step(self, kind: str, layer: nn.Module, value: Tensor, used: bool) -> Tensor:
        if kind == "layer":
            return torch.tanh(layer(value))
        if kind == "gather":
            got = instep.all_gather(value).mean(0)
        elif kind == "list":
            got = torch.stack(instep.all_gather(list(value))).sum(0) / 10
        else:
            got = instep.all_reduce(value.amax(0) if kind == "max" else value.mean(0), kind)
        return value * torch.sigmoid(got) if used else value * 1


def run(mode: str, seed: int) -> list[Tensor | None]:
    """Run a program; return its outputs and all gradients."""
    torch.default_generator.manual_seed(seed)
    net = Program(seed).double()
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    with replicated(net, mode) as (_, model):
        outs = model(x)
        one, two = map(weighted_loss, outs)
        backwards: Any = {
            0: [(one + two, False)],
            1: [(one, True), (two, False)],
            2: [(two, False)],
            3: [(two, True), (two, True), (one, False)],
        }[seed % 4]
        for loss, retain in backwards:
            if loss.requires_grad:
                loss.backward(retain_graph=retain)
        return [*(out.detach() for out in outs), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("seed", range(16))
def test_every_engine_mode_gives_the_same_outputs_and_gradients(seed: int) -> None:
    expected = run("serial", seed)
    for mode in ("threads", "joint"):
        for mine, theirs in zip(run(mode, seed), expected, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
