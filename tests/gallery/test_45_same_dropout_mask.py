"""Pitfall: the same dropout mask on every rank.

Scripts usually set the same seed on every rank. Then every rank draws the same mask, so the noise repeats N times in a
batch on N ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import instep


def run_rank(rank: int) -> Tensor:
    """The dropout mask of a rank, in a script that sets the same seed on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout())
    model, halves = DistributedDataParallel(net), torch.randn(8, 64).chunk(2)
    out: Tensor = model(halves[rank])
    return out == 0


def test_ddp_ranks_with_the_same_seed_have_the_same_mask(two_ranks: dict[str, list[Any]]) -> None:
    first, second = two_ranks["test_45_same_dropout_mask"]
    assert first.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_have_different_masks_that_the_seed_determines(engine: str, count: int) -> None:
    with instep.DataParallel(nn.Dropout(), ["cpu"] * count, engine=engine) as model:
        torch.manual_seed(0)
        out = model(torch.ones(8, 64))
        assert len({tuple(row) for row in out.tolist()}) == 8
        torch.manual_seed(0)
        assert torch.equal(model(torch.ones(8, 64)), out)
