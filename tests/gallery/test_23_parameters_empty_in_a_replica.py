"""Row 23: `.parameters()` and `ParameterList` are empty inside a replica of `torch.nn.DataParallel`.

There, replicas hold plain tensors under the names of parameters; here they hold real leaf parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Reads its own parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.full((2,), float(i + 1))) for i in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        for scale in self.scales:
            y = y * scale
        penalty = sum(p.square().sum() for p in self.parameters())
        return y, y.sum(1) * 0 + penalty


def test_torchs_replicas_have_no_parameters() -> None:
    """`torch.nn.parallel.replicate` calls this first, and then sets plain tensors."""
    net: Any = Net()
    for module in (net, net.layer, net.scales):
        assert list(module.parameters())
        assert not module._replicate_for_data_parallel()._parameters
    assert not list(net.scales._replicate_for_data_parallel().parameters())


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_every_replica_has_its_parameters(engine: str) -> None:
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for module in (model, plain):
            y, penalty = module(x)
            (y.square().mean() + penalty.mean()).backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
