"""Row 24: attributes that forward sets vanish with the replicas of `torch.nn.DataParallel`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Keeps a count, a log, a loss and its features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls, self.samples = 0, 0
        self.log: list[str] = []
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.calls += 1
        self.samples += len(x)
        self.log.append("forward")
        self.features = y
        self.loss = y.square().mean()
        return y


def test_a_replica_that_is_thrown_away_keeps_nothing() -> None:
    """What `torch.nn.parallel.replicate` makes of the module, for one call."""
    net: Any = Net()
    replica = net._replicate_for_data_parallel()
    replica(torch.randn(3, 3))
    assert (replica.calls, replica.samples) == (1, 3)
    assert (net.calls, net.samples, net.loss) == (0, 0, None)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_attributes_are_the_whole_batchs(engine: str) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    with instep.DataParallel(
        net, ["cpu"] * 2, engine=engine, state={"samples": "sum"}, merge={"loss": "mean"}
    ) as model:
        for size in (7, 4, 5):
            x = torch.randn(size, 3)
            for module in (model, plain):
                module.zero_grad()
                module(x)
                (module.loss + module.features.sin().mean()).backward()
            assert (net.calls, net.samples, net.log) == (plain.calls, plain.samples, plain.log)
            torch.testing.assert_close(net.loss, plain.loss)
            torch.testing.assert_close(net.features, plain.features)
            torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_without_a_rule_it_is_said(engine: str) -> None:
    net = Net()
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge={"loss": "mean"}) as model,
        pytest.raises(instep.StateError, match=r"state=\{'samples': 'sum'\}"),
    ):
        model(torch.randn(8, 3))
    assert (net.calls, net.samples, net.log, net.loss) == (0, 0, [], None)
