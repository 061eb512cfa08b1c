"""Can't pickle local object; and training in the workers is lost in the parent."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

import instep

from .common import on_each_engine


def make(scale: float) -> nn.Module:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.activation = lambda x: torch.tanh(x) * scale

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.activation(self.layer(x))
            return out

    return Local()


@on_each_engine
def test_local_classes_and_lambdas_train_in_place(engine: str) -> None:
    net = make(2.0)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    plain = make(2.0)
    plain.load_state_dict(net.state_dict())
    optimizer, expected = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (net, plain))
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for module, steps in ((model, optimizer), (plain, expected)):
            module(x).square().mean().backward()
            steps.step()
    for mine, other, old in zip(net.parameters(), plain.parameters(), before, strict=True):
        torch.testing.assert_close(mine, other)
        assert not torch.equal(mine, old)


def test_pickle_refuses_them() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="local object"):
        pickle.dumps(make(2.0))
