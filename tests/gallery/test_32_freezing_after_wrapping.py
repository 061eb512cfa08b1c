"""Row 32: DDP does not notice requires_grad_ after wrapping, and cannot wrap a module without trainable parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import instep

from .common import one_rank


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_requires_grad_is_read_at_each_call(engine: str, private: bool) -> None:
    mine, plain = net(), net()
    x = torch.randn(5, 3)
    with instep.DataParallel(mine, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        for first, last in ((True, True), (False, True), (True, False), (False, True), (True, True)):
            for module in (model, plain):
                module.zero_grad()
                module[0].requires_grad_(first)
                module[2].requires_grad_(last)
                module(x).square().mean().backward()
            for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if other.grad is not None:
                    torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_fully_frozen_module(engine: str) -> None:
    mine = net().requires_grad_(False)
    x = torch.randn(5, 3, requires_grad=True)
    with instep.DataParallel(mine, ["cpu"] * 2, engine=engine) as model:
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(mine(x).sum(), x)[0])
        mine.requires_grad_(True)
        assert model(x.detach()).requires_grad


def test_ddp_refuses_a_fully_frozen_module(tmp_path: Path) -> None:
    with one_rank(tmp_path), pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        nn.parallel.DistributedDataParallel(net().requires_grad_(False))
