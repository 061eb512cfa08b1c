"""weight_norm, sparse gradients, complex parameters, and buffers that need a gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from .common import on_each_engine, train_both


@on_each_engine
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
def test_weight_norm(engine: str, norm: object) -> None:
    net = nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh())  # type: ignore[operator]
    plain = nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh())  # type: ignore[operator]
    plain.load_state_dict(net.state_dict())
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for module in (model, plain):
            module(x).square().mean().backward()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@on_each_engine
def test_sparse_gradients(engine: str) -> None:
    net = nn.Embedding(10, 3, sparse=True)
    plain, ids = copy.deepcopy(net), torch.tensor([1, 2, 2, 5, 1])
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for module in (model, plain):
            module(ids).square().sum().backward()
    assert net.weight.grad is not None
    assert plain.weight.grad is not None
    assert net.weight.grad.is_sparse
    torch.testing.assert_close(net.weight.grad.to_dense(), plain.weight.grad.to_dense())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(3, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs() + self.offset


@on_each_engine
def test_complex_parameters_and_buffers_that_need_a_gradient(engine: str) -> None:
    net = Complex()
    plain = copy.deepcopy(net)
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for module in (model, plain):
            module(x).square().mean().backward()
    torch.testing.assert_close(net.phase.grad, plain.phase.grad)
    torch.testing.assert_close(net.offset.grad, plain.offset.grad)
    assert net.offset.grad is not None


def run_rank(rank: int) -> list[float]:
    """The gradient of a buffer on a rank of `DistributedDataParallel`."""
    module = Complex()
    module.phase = nn.Parameter(module.phase.detach().real)  # Gloo of torch 2.8 cannot send complex tensors
    net = nn.parallel.DistributedDataParallel(module)
    net(torch.full((2, 3), 1.0 + rank)).sum(0).mul(1.0 + rank).sum().backward()
    return [float(value) for value in net.module.offset.grad]


def test_ddp_does_not_reduce_gradients_of_buffers(two_ranks: dict[str, list[Any]]) -> None:
    assert two_ranks["test_47_uncommon_parameters"] == [[2.0] * 3, [4.0] * 3]  # neither is the mean of both


@on_each_engine
def test_complex_parameters_and_buffers_train(engine: str) -> None:
    train_both(Complex(), [torch.randn(5, 3)] * 3, lambda model, x: model(x).square().mean(), engine)
