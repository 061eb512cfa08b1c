"""`model.module(...)` skips DDP's reduction, so ranks diverge. Here it is the plain module with the right gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import instep

from .common import on_each_engine


def run_rank(rank: int) -> list[Tensor]:
    """The gradients of a rank after a call of the wrapper, and after a call of the wrapped module."""
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), torch.randn(4, 3).split(2)[rank]
    model = DistributedDataParallel(net)
    gradients = []
    for run in (model, model.module):
        net.zero_grad()
        run(x).sum().backward()
        assert net.weight.grad is not None
        gradients.append(net.weight.grad.clone())
    return gradients


def test_ddp_ranks_diverge(two_ranks: dict[str, list[Any]]) -> None:
    (first, first_alone), (second, second_alone) = two_ranks["test_27_the_module_itself"]
    torch.testing.assert_close(first, second)
    assert (first_alone - second_alone).norm() > 0.1 * first_alone.norm()


@on_each_engine
def test_a_call_of_the_plain_module_adds_to_the_same_gradients(engine: str) -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        model(x).sum().backward()
        assert net.weight.grad is not None
        once = net.weight.grad.clone()
        model.module(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, 2 * once)
