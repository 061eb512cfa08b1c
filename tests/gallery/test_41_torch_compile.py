"""torch.compile with data parallelism: an error, or a graph compiled again at every call."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import instep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_each_replica_is_compiled_once(engine: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    net, x = Net(), torch.randn(5, 3)
    with instep.DataParallel(torch.compile(net, backend="eager"), ["cpu"] * 2, engine=engine) as model:  # type: ignore[arg-type]
        first = model(x)
        graphs = counters["stats"]["unique_graphs"]
        for _ in range(3):
            assert torch.equal(model(x), first)
        assert counters["stats"]["unique_graphs"] == graphs <= 2
    torch.testing.assert_close(first, net(x))
    torch._dynamo.reset()
