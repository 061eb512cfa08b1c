"""Pitfall 17: torch gathers scalar losses to a vector; here the loss is a scalar, that of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Linear):
    def __init__(self, reduction: str) -> None:
        super().__init__(3, 2)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return nn.functional.mse_loss(super().forward(x), y, reduction=self.reduction)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", [2, 5, 7])
def test_the_loss_is_a_scalar(engine: str, reduction: str, batch: int) -> None:
    net = Net(reduction)
    plain, x, y = copy.deepcopy(net), torch.randn(batch, 3), torch.randn(batch, 2)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        ours, theirs = model(x, y), plain(x, y)
        assert ours.ndim == 0
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
    torch.testing.assert_close(net.weight.grad, plain.weight.grad)
