"""Pitfall: the same dropout mask on every rank.

Scripts for several ranks seed each of them alike, and then every rank draws the same mask: a batch over N ranks has the
noise of one over a single rank, N times.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep


def rank(seed: int, shard: Tensor) -> Tensor:
    """What one rank of a script that seeds every rank alike does with its shard."""
    torch.manual_seed(seed)
    return nn.Dropout()(shard)


def test_ranks_that_are_seeded_alike_share_a_mask() -> None:
    shards = torch.ones(8, 64).chunk(2)
    first, second = (rank(0, shard) for shard in shards)
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
