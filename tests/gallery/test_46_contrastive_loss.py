"""A contrastive loss needs all samples of the batch: without a gather, or with one without gradients, it is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import instep


class Pairs(nn.Module):
    """The loss of each sample against the whole batch."""

    def __init__(self, gather: str = "instep") -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.gather = gather

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = normalize(self.left(x), dim=1), normalize(self.right(y), dim=1)
        if self.gather == "ranks":  # torch.distributed.all_gather, with the rank's own part put back
            parts = [torch.empty_like(two) for _ in range(2)]
            dist.all_gather(parts, two.detach())
            parts[dist.get_rank()] = two
            candidates, labels = torch.cat(parts), dist.get_rank() * len(x) + torch.arange(len(x))
        elif self.gather == "instep":
            candidates = instep.all_gather(two)
            labels = instep.replica().offset + torch.arange(len(x))
        elif self.gather == "without gradient":  # the same mistake on replicas
            labels = instep.replica().offset + torch.arange(len(x))
            candidates = instep.all_gather(two.detach()).index_copy(0, labels, two)
        else:  # each shard alone, as with nn.DataParallel
            candidates, labels = two, torch.arange(len(x))
        return cross_entropy(5 * one @ candidates.T, labels, reduction="none")


def gradient(net: nn.Module, run: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net.zero_grad()
    run(x, y).mean().backward()
    return net.right.weight.grad.clone()


def seeded() -> tuple[Pairs, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 3, dtype=torch.float64)
    return Pairs().double(), x, y


def run_rank(rank: int) -> Tensor:
    """The gradient that DistributedDataParallel computes if other ranks' samples are gathered without gradients."""
    net, x, y = seeded()
    net.gather = "ranks"
    return gradient(net, DistributedDataParallel(net), x.chunk(2)[rank], y.chunk(2)[rank])


def test_ddp_with_a_gather_without_gradients_is_wrong(two_ranks: dict[str, list[Any]]) -> None:
    net, x, y = seeded()
    expected = gradient(net, net, x, y)
    first, second = two_ranks["test_46_contrastive_loss"]
    torch.testing.assert_close(first, second)
    assert (first - expected).norm() > 0.1 * expected.norm()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        torch.testing.assert_close(gradient(net, model, x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_loss_and_gradient_equal_those_of_one_device(engine: str) -> None:
    net = Pairs().double()
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    expected, loss = gradient(net, net, x, y), net(x, y)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x, y), loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient(net, model, x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gather", ["without gradient", "not at all"])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_common_mistakes_give_wrong_gradients(engine: str, gather: str) -> None:
    net = Pairs().double()
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    expected = gradient(net, net, x, y)
    wrong = copy.deepcopy(net)
    wrong.gather = gather
    with instep.DataParallel(wrong, ["cpu"] * 3, engine=engine, probe=False) as model:
        got = gradient(wrong, model, x, y)
    assert (got - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_loss_across_samples_without_a_gather_raises(engine: str) -> None:
    with (
        instep.DataParallel(Pairs("not at all"), ["cpu"] * 3, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"depend on other samples.*[\s\S]*instep\.all_gather"),
    ):
        model(*torch.randn(2, 7, 3))
