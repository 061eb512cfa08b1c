"""`model.module(...)` skips the reduction, so that ranks drift apart. Here it is the plain module, and right."""

from __future__ import annotations

import torch
from torch import nn

import instep

from .beside import on_each_engine


@on_each_engine
def test_the_plain_module_learns_into_the_same_gradients(engine: str) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        model(x).sum().backward()
        assert net.weight.grad is not None
        once = net.weight.grad.clone()
        model.module(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, 2 * once)
