"""The last batch leaves a replica with one sample: "Expected more than 1 value per channel when training"."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    """Batch normalization, and a `.squeeze()` that removes the batch dimension of a shard of one sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize(("size", "replicas"), [(4, 3), (2, 2), (3, 4)])
def test_a_shard_of_one_sample_trains(engine: str, size: int, replicas: int) -> None:
    net = Net().double()
    plain, x = copy.deepcopy(net), torch.randn(size, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        copy.deepcopy(plain)(x[-1:])  # what a replica of nn.DataParallel or DDP would run
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine) as model:
        out, expected = model(x), plain(x)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        out.square().mean().backward()
        expected.square().mean().backward()
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_min_shard_avoids_shards_of_one_without_sync_batchnorm(engine: str) -> None:
    net = nn.BatchNorm1d(3).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    options = {"engine": engine, "sync_batchnorm": False}
    with instep.DataParallel(net, ["cpu"] * 3, **options, min_shard=2) as model:
        with pytest.warns(UserWarning, match="sync_batchnorm=False"):
            model(x)
        assert net.num_batches_tracked.item() == 1
    with (
        instep.DataParallel(net, ["cpu"] * 3, **options) as model,
        pytest.warns(UserWarning, match="sync_batchnorm=False"),
        pytest.raises(ValueError, match="more than 1 value per channel"),
    ):
        model(x)
    assert net.num_batches_tracked.item() == 1
