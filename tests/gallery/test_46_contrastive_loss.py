"""A contrastive loss needs every sample of the batch; gathered without gradients, or not at all, it is another."""

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
    """The loss of each sample against the whole batch; as it would be written for one device, but for three calls."""

    def __init__(self, gather: str = "instep") -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)
        self.gather = gather

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = normalize(self.left(x), dim=1), normalize(self.right(y), dim=1)
        if self.gather == "ranks":  # torch.distributed.all_gather, and one's own put back in its place
            parts = [torch.empty_like(two) for _ in range(2)]
            dist.all_gather(parts, two.detach())
            parts[dist.get_rank()] = two
            everyone, labels = torch.cat(parts), dist.get_rank() * len(x) + torch.arange(len(x))
        elif self.gather == "instep":
            everyone = instep.all_gather(two)
            labels = instep.replica().offset + torch.arange(len(x))
        elif self.gather == "without gradient":  # the same on replicas
            labels = instep.replica().offset + torch.arange(len(x))
            everyone = instep.all_gather(two.detach()).index_copy(0, labels, two)
        else:  # each shard for itself: what nn.DataParallel gives
            everyone, labels = two, torch.arange(len(x))
        return cross_entropy(5 * one @ everyone.T, labels, reduction="none")


def gradient(net: nn.Module, run: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    net.zero_grad()
    run(x, y).mean().backward()
    return net.right.weight.grad.clone()


def seeded() -> tuple[Pairs, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 3, dtype=torch.float64)
    return Pairs().double(), x, y


def on_a_rank(rank: int) -> Tensor:
    """The gradient that DistributedDataParallel leaves of a loss over samples that were gathered without theirs."""
    net, x, y = seeded()
    net.gather = "ranks"
    return gradient(net, DistributedDataParallel(net), x.chunk(2)[rank], y.chunk(2)[rank])


def test_ranks_that_gather_without_gradients(two_ranks: dict[str, list[Any]]) -> None:
    net, x, y = seeded()
    expected = gradient(net, net, x, y)
    first, second = two_ranks["test_46_contrastive_loss"]
    torch.testing.assert_close(first, second)
    assert (first - expected).norm() > 0.1 * expected.norm()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        torch.testing.assert_close(gradient(net, model, x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_the_loss_and_its_gradient_are_those_of_one_device(engine: str) -> None:
    net = Pairs().double()
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    expected, loss = gradient(net, net, x, y), net(x, y)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        torch.testing.assert_close(model(x, y), loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient(net, model, x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gather", ["without gradient", "not at all"])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_what_is_usually_done_gives_another_gradient(engine: str, gather: str) -> None:
    net = Pairs().double()
    x, y = torch.randn(2, 7, 3, dtype=torch.float64)
    expected = gradient(net, net, x, y)
    wrong = copy.deepcopy(net)
    wrong.gather = gather
    with instep.DataParallel(wrong, ["cpu"] * 3, engine=engine, probe=False) as model:
        got = gradient(wrong, model, x, y)
    assert (got - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_samples_that_meet_without_a_gather_are_an_error(engine: str) -> None:
    with (
        instep.DataParallel(Pairs("not at all"), ["cpu"] * 3, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"depend on other samples.*[\s\S]*instep\.all_gather"),
    ):
        model(*torch.randn(2, 7, 3))
