"""Buckets of gradients that are reduced while the backward runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import instep
from instep.collectives import buckets
from instep.engines.torchrun.engine import TorchrunEngine
from instep.engines.torchrun.reduction import BucketAllReduce

from ..in_ranks import DEVICE
from .conftest import Wrap, assert_same_training, batches

pytestmark = pytest.mark.skipif(dist.get_world_size() == 1, reason="one rank reduces nothing")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several buckets for a small network."""
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 60)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 60)
    buckets._make_buckets.cache_clear()
    yield
    buckets._make_buckets.cache_clear()


def loss_of(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(module(x), y)


def engine_of(model: instep.DataParallel) -> TorchrunEngine:
    engine = model._instep_engine
    assert isinstance(engine, TorchrunEngine)
    return engine


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(DEVICE)


def test_only_the_last_gradient_of_a_bucket_is_watched(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[int] = []
    mark_ready = BucketAllReduce.mark_ready

    def record(reducer: BucketAllReduce, index: int) -> None:
        reported.append(index)
        mark_ready(reducer, index)

    monkeypatch.setattr(BucketAllReduce, "mark_ready", record)
    plain = layers()
    model = wrap(plain)
    assert_same_training(model, plain, batches(6, 7), loss_of)
    plan = engine_of(model)._bucket_plan
    assert plan is not None
    assert len(plan.buckets) > 2
    reported.clear()
    assert_same_training(model, plain, batches(8), loss_of)
    assert reported == [plan.last[number] for number in range(len(plan.buckets))]


class Order(nn.Module):
    """Its layers run in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)
        self.swapped = self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        if self.skips:
            return self.last(self.second(x))
        one, two = (self.second, self.first) if self.swapped else (self.first, self.second)
        return self.last(two(one(x).tanh()))


def test_an_order_that_changes(wrap: Wrap) -> None:
    torch.manual_seed(0)
    plain = Order().double().to(DEVICE)
    model = wrap(plain)
    for swapped, skips in [(False, False)] * 3 + [(True, False)] * 2 + [(False, True), (True, False), (False, False)]:
        for module in (plain, model.module):
            module.swapped, module.skips = swapped, skips
        plain.zero_grad(), model.zero_grad()
        assert_same_training(model, plain, batches(6), loss_of)


class Reentrant(nn.Module):
    """Uses a layer inside a reentrant checkpoint and outside: its gradient arrives twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.shared, x * self.scale, use_reentrant=True)
        return self.last(self.shared(inner).tanh())


def test_a_gradient_that_grows_after_its_bucket_was_reduced(wrap: Wrap) -> None:
    torch.manual_seed(0)
    plain = Reentrant().double().to(DEVICE)
    assert_same_training(wrap(plain), plain, batches(6, 7, 6, 8, 6), loss_of)


def test_parameters_of_another_size(wrap: Wrap) -> None:
    plain = layers()
    model = wrap(plain)
    assert_same_training(model, plain, batches(6, 6, 6), loss_of)
    for module in (plain, model.module):
        module[4] = nn.Linear(8, 2, bias=False).double().to(DEVICE)
        with torch.no_grad():
            module[4].weight.fill_(0.1)
    assert_same_training(model, plain, batches(6, 6, 6), loss_of)


def test_memory_for_the_buckets(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine that have no NCCL sum through memory, if they can share it."""
    plain = layers()
    model = wrap(plain)
    assert_same_training(model, plain, batches(6, 7), loss_of)
    engine = engine_of(model)
    is_local = engine.channel.sends_by_host and engine.channel.is_local
    assert [memory is not None for memory in engine._local_buckets.values()] == [True] * is_local
    for frozen in (True, False, True):  # the memory for each set of trainable parameters is kept
        for module in (plain, model.module):
            module[0].requires_grad_(not frozen)
        plain.zero_grad(), model.zero_grad()
        assert_same_training(model, plain, batches(6, 8), loss_of)
    assert len(engine._local_buckets) == 2 * is_local
    monkeypatch.setattr(engine.channel, "share_memory", lambda *_: None)
    other = wrap(plain)
    assert_same_training(other, plain, batches(6, 7), loss_of)
    assert list(engine_of(other)._local_buckets.values()) == [None] * is_local


def test_a_second_backward_without_a_forward(wrap: Wrap) -> None:
    """Other ranks may still read the gradients of the first one."""
    plain = layers()
    model = wrap(plain)
    x, y = batches(6)[0]
    for _ in range(5):
        gradients = []
        for module in (plain, model):
            module.zero_grad()
            loss = loss_of(module, x, y)
            for _ in range(4):
                loss.backward(retain_graph=True)
            gradients.append([parameter.grad for parameter in module.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0])
