"""Pitfall 4: on uneven shards, and over tokens, the mean of the replicas' means is not the mean of the batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import instep


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def padded_batch() -> tuple[Tensor, Tensor]:
    ids = torch.arange(30).view(5, 6) % 9
    labels = ids.clone()
    labels[3:, 1:] = -100
    return ids, labels


def run_rank(rank: int) -> Tensor:
    """The gradient that DistributedDataParallel computes from uneven halves of a padded batch."""
    torch.manual_seed(0)
    net = Tagger()
    shards = [column.split(3)[rank] for column in padded_batch()]
    model = DistributedDataParallel(net)
    model(*shards).backward()
    assert net.head.weight.grad is not None
    return net.head.weight.grad


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_ddp_averages_the_means_of_ranks_and_instep_does_not(engine: str, two_ranks: dict[str, list[Any]]) -> None:
    torch.manual_seed(0)
    plain = Tagger()
    net, batch = copy.deepcopy(plain), padded_batch()
    plain(*batch).backward()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        model(*batch).backward()
    expected = plain.head.weight.grad
    assert expected is not None
    torch.testing.assert_close(net.head.weight.grad, expected)
    first, second = two_ranks["test_04_mean_of_means"]
    torch.testing.assert_close(first, second)
    assert (first - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_is_the_mean_over_the_whole_batch(engine: str, padded: bool) -> None:
    net = Tagger()
    plain, averaged = copy.deepcopy(net), copy.deepcopy(net)
    ids = torch.randint(0, 9, (5, 6))
    labels = ids.clone()
    if padded:
        labels[3:, 1:] = -100
    plain(ids, labels).backward()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        loss = model(ids, labels)
        loss.backward()
    torch.testing.assert_close(loss, plain(ids, labels))
    torch.testing.assert_close(net.head.weight.grad, plain.head.weight.grad)

    # Averaging over replicas, as DistributedDataParallel averages gradients, gives another result.
    shards = zip(ids.split(3), labels.split(3), strict=True)
    torch.stack([averaged(*shard) for shard in shards]).mean().backward()
    assert averaged.head.weight.grad is not None
    assert plain.head.weight.grad is not None
    assert not torch.allclose(averaged.head.weight.grad, plain.head.weight.grad, rtol=1e-2)
