"""A parameter that a step does not use: "Expected to have finished reduction in the prior iteration"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from .beside import on_each_engine, one_rank, train_beside


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(torch.tanh(self.body(x)))
        return out


@on_each_engine
def test_a_missing_gradient_is_none_as_on_one_device(engine: str) -> None:
    net, _ = train_beside(TwoHeads(), [torch.randn(5, 3)] * 3, lambda model, x: model(x).square().mean(), engine)
    assert isinstance(net, TwoHeads)
    assert net.unused.weight.grad is None


@on_each_engine
def test_a_parameter_that_only_some_replicas_use(engine: str) -> None:
    class Sometimes(TwoHeads):
        def forward(self, x: Tensor) -> Tensor:
            head = self.used if bool((x > 0).all()) else self.unused
            out: Tensor = head(torch.tanh(self.body(x)))
            return out

    batch = torch.cat([torch.ones(3, 3), torch.ones(2, 3)])
    train_beside(Sometimes(), [batch, batch], lambda model, x: model(x).square().mean(), engine)


def test_ddp_refuses(tmp_path: Path) -> None:
    with one_rank(tmp_path):
        model = nn.parallel.DistributedDataParallel(TwoHeads())
        model(torch.randn(5, 3)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(torch.randn(5, 3))
