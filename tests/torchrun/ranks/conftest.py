"""Tests that run on every rank at the same time (see `test_on_ranks`), and are not collected elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.runtime.launcher import is_started_by_torchrun

from ..in_ranks import DEVICE, TIMEOUT

collect_ignore_glob = [] if is_started_by_torchrun() else ["test_*.py"]

Wrap = Callable[..., instep.DataParallel]


@pytest.fixture
def wrap() -> Wrap:
    """A wrapper of a copy of a module, on all ranks."""

    def make(module: nn.Module, **options: Any) -> instep.DataParallel:
        if DEVICE.type == "cuda":
            options = {"device_ids": [DEVICE], **options}
        return instep.DataParallel(copy.deepcopy(module).to(DEVICE), timeout=TIMEOUT, **options)

    return make


def batches(*sizes: int, features: int = 3, classes: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, the same on every rank."""
    generator = torch.Generator().manual_seed(len(sizes))
    return [
        (
            torch.randn(size, features, generator=generator, dtype=torch.float64).to(DEVICE),
            torch.randint(classes, (size,), generator=generator).to(DEVICE),
        )
        for size in sizes
    ]


def assert_same_training(
    model: nn.Module,
    plain: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    tolerance: float = 1e-10,
) -> None:
    """Train both and compare losses, gradients and states after every step."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in (model, plain)]
    for x, y in data:
        losses = []
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(module, x, y)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
        gradients = [[p.grad for p in module.parameters()] for module in (model, plain)]
        for ours, expected in zip(*gradients, strict=True):
            assert (ours is None) == (expected is None)
            if ours is not None:
                torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    ours, expected = model.state_dict(), plain.state_dict()
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
