"""Differentiable outputs that are not plain tensors: jagged ones are returned, strided nested and sparse ones raise."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.select import EngineChoice

pytestmark = [
    pytest.mark.usefixtures("workers"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

ENGINES = ("threads", "processes")


class Net(nn.Module):
    """A layer, and a function that computes the output with it."""

    def __init__(self, make: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(3, 2).double(), make

    def forward(self, x: Any) -> Any:
        return self.make(self.layer, x)


def from_rows(layer: nn.Module, x: Any) -> Any:
    return torch.nested.as_nested_tensor([layer(row) for row in x.unbind()], layout=torch.jagged)


def from_values(layer: nn.Module, x: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(layer(x.values()), x.offsets())


def on_nested(layer: nn.Module, x: Any) -> Any:
    return layer(x)


def transposed(layer: nn.Module, x: Any) -> Any:
    return layer(x).transpose(1, 2)


def in_a_dictionary(layer: nn.Module, x: Any) -> Any:
    y = layer(x)
    return {"both": (y, y * 2), "rows": torch.stack([row.sum(0) for row in y.unbind()])}


def sparse(layer: nn.Module, x: Any) -> Any:
    return {"a": [x, layer(x).to_sparse()]}


def strided(layer: nn.Module, x: Any) -> Any:
    return torch.nested.as_nested_tensor([layer(row[None]) for row in x])


def loss_of(output: Any) -> Tensor:
    if isinstance(output, dict):
        first, second = output["both"]
        return loss_of(first + second) + output["rows"].cos().sum()
    return sum((torch.sin(row).sum() * (1 + i) for i, row in enumerate(output.unbind())), torch.zeros(()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [from_rows, from_values, on_nested, transposed, in_a_dictionary])
def test_jagged_outputs_train_as_on_one_device(make: Callable[[nn.Module, Any], Any], engine: str) -> None:
    net = Net(make)
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        runs = [(run, torch.optim.SGD(run.parameters(), 0.05, momentum=0.9)) for run in (plain, model)]
        for step in range(3):
            rows = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 5, 1, 4, 3, 3, 2 + step)]
            x = torch.nested.nested_tensor(rows, layout=torch.jagged)
            losses = []
            for run, optimizer in runs:
                optimizer.zero_grad()
                losses.append(loss_of(run(x)))
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(dict(net.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (strided, r"forward's output is a nested tensor.*layout=torch\.jagged"),
        (sparse, r"forward's output 'a\.1' is a sparse tensor.*to_dense"),
    ],
)
def test_outputs_whose_gradient_would_be_lost_raise(make: Callable[[nn.Module, Any], Any], words: str) -> None:
    net, x = Net(make), torch.randn(5, 3, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False) as model:
        with pytest.raises(instep.errors.BridgeError, match=re.compile(words + ".*engine='threads'", re.DOTALL)):
            model(x)
        assert net.layer.weight.grad is None
        with torch.no_grad():
            model(x)  # works without gradients


def test_auto_falls_back_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "instep.parallel.choose_engine", lambda *_: EngineChoice("processes", "chosen by the test", automatic=True)
    )
    net, x = Net(sparse), torch.randn(5, 3, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        with pytest.warns(UserWarning, match="falling back to engine=.threads."):
            out = model(x)
        out["a"][1].to_dense().sum().backward()
        torch.testing.assert_close(net.layer.bias.grad, torch.full((2,), 5.0, dtype=torch.float64))
