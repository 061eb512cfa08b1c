"""Checkpointing: "Expected to mark a variable ready only once"."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .common import on_each_engine, one_rank, train_both


class Twice(nn.Module):
    """One checkpointed layer, used twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=self.reentrant))
        return x


@on_each_engine
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_checkpointed_twice_trains(engine: str, reentrant: bool) -> None:
    train_both(Twice(reentrant), [torch.randn(5, 3)] * 2, lambda model, x: model(x).square().mean(), engine)


@pytest.mark.filterwarnings("ignore")
def test_ddp_raises(tmp_path: Path) -> None:
    with one_rank(tmp_path):
        model = nn.parallel.DistributedDataParallel(Twice(reentrant=True))
        with pytest.raises(RuntimeError, match="mark a variable ready only once"):
            model(torch.randn(5, 3)).sum().backward()
