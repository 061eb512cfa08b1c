"""Running statistics of batch normalization come from the first shard only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


def batch() -> Tensor:
    """Samples whose mean changes along the batch, so that shards have different statistics."""
    return torch.randn(9, 4, dtype=torch.float64) + torch.arange(9.0, dtype=torch.float64)[:, None]


def statistics_of_the_first_shard(net: nn.BatchNorm1d, x: Tensor, replicas: int) -> nn.BatchNorm1d:
    """The statistics after a call of `nn.DataParallel`: only its first replica shares the module's buffers."""
    first = copy.deepcopy(net)
    first(x.chunk(replicas)[0])
    return first


def run_rank(rank: int) -> list[float]:
    """The running mean after two steps of `DistributedDataParallel` on half of the batch."""
    net = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(1))
    for _ in range(2):
        net(torch.arange(8.0)[:, None].chunk(2)[rank])
    return [float(value) for value in net.module.running_mean]


def test_ddp_ranks_have_different_statistics(two_ranks: dict[str, list[Any]]) -> None:
    plain = nn.BatchNorm1d(1)
    for _ in range(2):
        plain(torch.arange(8.0)[:, None])
    mine, other = (values[0] for values in two_ranks["test_24_batchnorm_statistics"])
    assert mine < float(plain.running_mean) < other  # each rank has those of its shard


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_running_statistics_are_those_of_the_whole_batch(engine: str) -> None:
    net = nn.BatchNorm1d(4).double()
    plain, x = copy.deepcopy(net), batch()
    partial = statistics_of_the_first_shard(net, x, 3)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    assert (partial.running_mean - plain.running_mean).abs().min() > 0.1


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_running_mean_covers_all_shards_without_sync_batchnorm(engine: str) -> None:
    net = nn.BatchNorm1d(4).double()
    plain, x = copy.deepcopy(net), batch()
    plain(x)
    with (
        instep.DataParallel(net, ["cpu"] * 3, engine=engine, sync_batchnorm=False) as model,
        pytest.warns(UserWarning, match="sync_batchnorm=False"),
    ):
        model(x)
    torch.testing.assert_close(net.running_mean, plain.running_mean, rtol=1e-12, atol=1e-12)
