"""A parameter that a step does not use: "Expected to have finished reduction in the prior iteration"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from .common import on_each_engine, one_rank, train_both


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(torch.tanh(self.body(x)))
        return out


@on_each_engine
def test_the_gradient_of_an_unused_parameter_is_none(engine: str) -> None:
    net, _ = train_both(TwoHeads(), [torch.randn(5, 3)] * 3, lambda model, x: model(x).square().mean(), engine)
    assert isinstance(net, TwoHeads)
    assert net.unused.weight.grad is None


class Sorted(TwoHeads):
    """The sign of a sample selects its head. A head without samples is not called."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, positive = torch.tanh(self.body(x)), x[:, 0] > 0
        out = hidden.new_zeros(len(x), 1)
        for head, mine in ((self.used, positive), (self.unused, ~positive)):
            if bool(mine.any()):
                out = out.index_put((mine,), head(hidden[mine]))
        return out


@on_each_engine
def test_a_parameter_that_only_some_replicas_use(engine: str) -> None:
    batch = torch.cat([torch.rand(3, 3) + 0.5, -torch.rand(2, 3) - 0.5])  # one head for each of the two shards
    net, _ = train_both(Sorted(), [batch, batch], lambda model, x: model(x).square().mean(), engine)
    assert isinstance(net, Sorted)
    assert net.used.weight.grad is not None
    assert bool(net.used.weight.grad.any())
    assert net.unused.weight.grad is not None
    assert bool(net.unused.weight.grad.any())


def test_ddp_raises(tmp_path: Path) -> None:
    with one_rank(tmp_path):
        model = nn.parallel.DistributedDataParallel(TwoHeads())
        model(torch.randn(5, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(torch.randn(5, 3))
