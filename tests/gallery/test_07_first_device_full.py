"""The first device holds every output and the loss; it runs out of memory while the others are half empty."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import instep

from .common import on_each_engine

SEEN: list[tuple[int, str]] = []


class RecordingLoss(nn.CrossEntropyLoss):
    """Records the number of samples and the thread of each call."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        SEEN.append((len(input), threading.current_thread().name))
        return super().forward(input, target)


@on_each_engine
def test_with_loss_computes_the_loss_on_the_replicas(engine: str) -> None:
    net, x, y = nn.Linear(4, 1000), torch.randn(5, 4), torch.randint(1000, (5,))
    with instep.DataParallel(instep.with_loss(net, nn.CrossEntropyLoss()), ["cpu"] * 2, engine=engine) as model:
        loss = model(x, y)
        loss.backward()
        gradient, net.weight.grad = net.weight.grad, None
        assert loss.shape == ()  # only the loss is gathered
    expected = nn.functional.cross_entropy(net(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, net.weight.grad)


@pytest.mark.parametrize("engine", ["serial", "threads"])  # workers have their own globals
def test_each_replica_computes_the_loss_of_its_own_samples(engine: str) -> None:
    module = instep.with_loss(nn.Linear(4, 6), RecordingLoss(), weight=lambda output, target: len(target))
    with instep.DataParallel(module, ["cpu"] * 2, engine=engine) as model:
        model(torch.randn(5, 4), torch.randint(6, (5,)))
        SEEN.clear()  # calls of the probe
        model(torch.randn(5, 4), torch.randint(6, (5,)))
    assert sorted(size for size, _ in SEEN) == [2, 3]
    assert engine == "serial" or len({thread for _, thread in SEEN}) == 2
