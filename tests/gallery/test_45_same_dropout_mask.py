"""Pitfall: the same dropout mask on every rank.

Scripts for several ranks seed each of them alike, and then every rank draws the same mask: a batch over N ranks has the
noise of one over a single rank, N times.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import instep


def on_a_rank(rank: int) -> Tensor:
    """What a rank drops of its half of a batch, in a script that seeds every rank alike."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout())
    model, halves = DistributedDataParallel(net), torch.randn(8, 64).chunk(2)
    out: Tensor = model(halves[rank])
    return out == 0


def test_ranks_that_are_seeded_alike_share_a_mask(two_ranks: dict[str, list[Any]]) -> None:
    first, second = two_ranks["test_45_same_dropout_mask"]
    assert first.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_have_a_mask_each_and_the_seed_still_decides(engine: str, count: int) -> None:
    with instep.DataParallel(nn.Dropout(), ["cpu"] * count, engine=engine) as model:
        torch.manual_seed(0)
        out = model(torch.ones(8, 64))
        assert len({tuple(row) for row in out.tolist()}) == 8
        torch.manual_seed(0)
        assert torch.equal(model(torch.ones(8, 64)), out)
