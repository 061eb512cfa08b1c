"""Batches smaller than the number of devices, and 36 samples on 7 devices, which torch splits into 6 chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep

from .common import on_each_engine


class Counts(nn.Module):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * scale, torch.full((len(x),), len(x))


@on_each_engine
@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_replicas_without_samples_stay_idle(engine: str, batch: int) -> None:
    x = torch.randn(batch, 2)
    with instep.DataParallel(Counts(), ["cpu"] * 4, engine=engine, probe=False) as model:
        assert torch.equal(model(x, scale=2.0)[0], x * 2)


@on_each_engine
def test_shards_are_balanced(engine: str) -> None:
    with instep.DataParallel(Counts(), ["cpu"] * 7, engine=engine, probe=False) as model:
        _, sizes = model(torch.randn(36, 2))
    assert sorted(set(sizes.tolist())) == [5, 6]
    assert len(torch.randn(36, 2).chunk(7)) == 6  # torch leaves one device idle
