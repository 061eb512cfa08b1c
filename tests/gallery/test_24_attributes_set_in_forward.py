"""Row 24: attributes that forward sets are lost with the replicas of `torch.nn.DataParallel`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Sets counters, a log, a loss and features in forward."""

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


def test_torchs_replica_does_not_change_the_module() -> None:
    """`torch.nn.parallel.replicate` creates such a replica for each call."""
    net: Any = Net()
    replica = net._replicate_for_data_parallel()
    replica(torch.randn(3, 3))
    assert (replica.calls, replica.samples) == (1, 3)
    assert (net.calls, net.samples, net.loss) == (0, 0, None)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_attributes_are_merged_to_those_of_the_whole_batch(engine: str) -> None:
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
def test_a_missing_state_rule_raises_and_changes_nothing(engine: str) -> None:
    net = Net()
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge={"loss": "mean"}) as model,
        pytest.raises(instep.StateError, match=r"state=\{'samples': 'sum'\}"),
    ):
        model(torch.randn(8, 3))
    assert (net.calls, net.samples, net.log, net.loss) == (0, 0, [], None)
