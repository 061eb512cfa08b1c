"""Collectives of calls like the last ones: ranks gather rows without messages before them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import instep
from instep.engines.torchrun.channel import Message, RankChannel
from instep.errors import CollectiveError

from ..in_ranks import DEVICE
from .conftest import Wrap, assert_same_training, batches

RANK, COUNT = dist.get_rank(), dist.get_world_size()
LAST = COUNT - 1
WARM_UP = 6

pytestmark = pytest.mark.skipif(COUNT == 1, reason="one rank has no collectives")


class Branches(nn.Module):
    """A network whose collectives depend on the first sample of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        choice = self.choose(x)
        if choice == "fail early":
            raise KeyError("in the middle")
        x = self.first(x)
        if choice == "fail":
            raise KeyError("in the middle")
        if choice == "mean":
            x = x + instep.all_reduce(x.mean(), "mean")
        if choice != "short":
            x = self.second(x)
        return self.last(x)

    def choose(self, x: Tensor) -> str:
        return {0: "plain", 1: "short", 2: "fail", 3: "fail early", 4: "mean"}[int(x[0, 0] // 100)]


def sample(choice: int = 0, rank: int | None = None) -> Tensor:
    """A batch in which the samples of one rank, or of all, lead to a choice."""
    x = torch.rand(2 * COUNT, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    firsts = range(0, len(x), 2) if rank is None else [2 * rank]
    x[list(firsts), 0] += 100 * choice
    return x.to(DEVICE)


@pytest.fixture
def model(wrap: Wrap) -> Iterator[instep.DataParallel]:
    torch.manual_seed(0)
    module = Branches().double()
    wrapped = wrap(module)
    for _ in range(WARM_UP):
        wrapped(sample()).sum().backward()
    yield wrapped
    expected = copy.deepcopy(wrapped.module)
    torch.testing.assert_close(wrapped(sample()), expected(sample()))
    wrapped(sample()).sum().backward()


class ExchangeLog:
    """The steps at which this rank exchanges messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        exchange = RankChannel.exchange

        def record(channel: RankChannel, message: Message) -> Any:
            self.steps.append(message.step)
            return exchange(channel, message)

        monkeypatch.setattr(RankChannel, "exchange", record)


def test_training(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
    model = wrap(plain)
    data = batches(*[4 * COUNT + size for size in (0, 1, 2, 3)] * 3)
    log = ExchangeLog(monkeypatch)
    assert_same_training(model, plain.to(DEVICE), data, lambda module, x, y: nn.functional.cross_entropy(module(x), y))
    del log.steps[:]
    model(data[0][0]).sum().backward()
    assert log.steps == ["the beginning", "the end"] * 2


def test_all_ranks_do_something_else(model: instep.DataParallel) -> None:
    for choice in (1, 4, 0, 1):
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        model.zero_grad()
        x = sample(choice)
        torch.testing.assert_close(model(x), plain(x))
        model(x).sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(
            [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
            [parameter.grad for parameter in plain.parameters() if parameter.grad is not None],
        )


@pytest.mark.parametrize("choice", [1, 4])
def test_one_rank_does_something_else(model: instep.DataParallel, choice: int) -> None:
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(CollectiveError, match=f"rank .*{LAST}|replica"):
        model(sample(choice, LAST))
    torch.testing.assert_close(model.state_dict(), state)


@pytest.mark.parametrize("choice", [2, 3])
def test_one_rank_fails(model: instep.DataParallel, choice: int) -> None:
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError, match="in the middle"):
        model(sample(choice, LAST))
    torch.testing.assert_close(model.state_dict(), state)


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.fails = bool((x > 50).any())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if ctx.fails:
            raise KeyError("in the backward")
        return grad


def test_one_rank_fails_in_backward(wrap: Wrap) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(_FailInBackward.apply(self.first(x) + x))

    torch.manual_seed(0)
    model = wrap(Net().double())
    for _ in range(WARM_UP):
        model(sample()).sum().backward()
    model.zero_grad()
    output = model(sample(1, LAST))
    with pytest.raises(KeyError, match="in the backward"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(WARM_UP):
        model(sample()).sum().backward()


def test_an_argument_that_is_written(wrap: Wrap) -> None:
    """Such a call cannot run twice: its collectives are always checked."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.norm(x)

    plain = Net().double().to(DEVICE)
    model = wrap(plain)
    for step in range(WARM_UP):
        if step == WARM_UP - 2:
            for module in (plain, model.module):
                module.norm.eval()
        ours, expected = sample(), sample()
        torch.testing.assert_close(model(ours), plain(expected))
        torch.testing.assert_close(ours, expected)


def test_too_few_values_on_another_rank(wrap: Wrap) -> None:
    """The error is that of the rank that has failed, not one that its zeros lead to."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise KeyError("in the middle")
            return self.norm(x)

    model = wrap(Net().double())
    for _ in range(WARM_UP):
        model(sample()[:COUNT])
    x = sample()[:COUNT]
    x[LAST] += 100
    with pytest.raises(KeyError, match="in the middle"):
        model(x)


def test_backward_calls_other_collectives(model: instep.DataParallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of a backward that is not the known one is an error, and is then learned anew."""
    orders = model._instep_engine.row_orders
    known = next(order for key, order in orders._orders.items() if key[0] == "backward")
    model.zero_grad()
    monkeypatch.setattr(known, "rows", known.rows[::-1])
    with pytest.raises(CollectiveError, match=r"made other collective calls .* than earlier backwards"):
        model(sample()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(WARM_UP):
        model(sample()).sum().backward()
