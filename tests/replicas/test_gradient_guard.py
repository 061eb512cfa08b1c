"""Gradients that would be lost: a replica's leaves refuse them while no call and no backward of it is at work."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import BridgeError

ENGINES = ["threads", "processes"]


class Keeps(nn.Module):
    """Stores tensors of forward in a list, and reads gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, kept: Callable[[Any], None] | None = None) -> Tensor:
        if any(p.grad is not None for p in self.parameters()):
            raise AssertionError("there is a gradient inside of forward")
        if copy.deepcopy(self.first).weight.grad is not None:
            raise AssertionError("a copy has a gradient")
        hidden = self.first(x)
        if kept is not None:
            kept(hidden)
        return self.second(hidden)


@pytest.mark.parametrize("between", ["nothing", "no_grad", "inference", "another", "backward"])
def test_backward_through_a_stored_tensor_is_an_error(between: str) -> None:
    torch.manual_seed(0)
    plain = Keeps()
    net = copy.deepcopy(plain)
    x, kept = torch.randn(6, 3), []
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", in_dims={"kept": None}) as model:
        out = model(x, kept.append)
        if between == "no_grad":
            with torch.no_grad():
                model(x)
        elif between == "inference":
            with torch.inference_mode():
                model(x)
        elif between == "another":
            model(x)
        elif between == "backward":
            out.sum().backward(retain_graph=True)
            net.zero_grad()
        with pytest.raises(BridgeError, match="a tensor of forward was stored in a list"):
            kept[-1].sum().backward(retain_graph=True)  # the first ones came of trials
        out.sum().backward()
        plain(x).sum().backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        net.zero_grad()
        model(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_and_backward_of_several_threads(engine: str) -> None:
    """Gradients that are being collected are not taken for strays because another thread's forward is over."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30)))
    batches = [torch.randn(6, 4) for _ in range(3)]
    wanted = [torch.autograd.grad(net(x).square().sum(), list(net.parameters())) for x in batches]
    errors: list[BaseException] = []
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:

        def work(x: Tensor, want: tuple[Tensor, ...]) -> None:
            try:
                for _ in range(15):
                    found = torch.autograd.grad(model(x).square().sum(), list(net.parameters()))
                    for one, other in zip(found, want, strict=True):
                        torch.testing.assert_close(one, other)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, wanted, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [2, 3])
def test_many_weights(engine: str, count: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    net = copy.deepcopy(plain)
    with instep.DataParallel(net, ["cpu"] * count, engine=engine) as model:
        for step in range(3):
            x = torch.randn(7, 3)
            for run, module in ((plain, plain), (model, net)):
                run(x).square().sum().backward()
                with torch.no_grad():
                    for weight in module.parameters():
                        weight -= 0.01 * weight.grad
                        weight.grad = None if step else weight.grad.zero_()
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other)


KEPT: list[Tensor] = []


class Secretly(nn.Linear):
    """Builds a graph where nobody asked for one."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            KEPT.append(super().forward(x.clone()).sum())
        return x


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_graph_that_forward_builds_under_no_grad(around: Any) -> None:
    with instep.DataParallel(Secretly(3, 3), ["cpu"] * 2, engine="threads", probe=False) as model:
        for _ in range(2):
            KEPT.clear()
            with around():
                model(torch.randn(4, 3))
            with pytest.raises(BridgeError, match="a tensor of forward was stored in a list"):
                KEPT[-1].backward()


class Carries(nn.Module):
    """Holds what it made of its weights in earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sum = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        norm = self.layer.weight.norm()
        self.sum = norm if self.sum is None else self.sum + norm
        return self.layer(x) * self.sum


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backward_through_calls_whose_tensors_were_replaced(engine: str) -> None:
    torch.manual_seed(0)
    plain = Carries()
    net, x = copy.deepcopy(plain), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for run in (plain, model):
            sum(run(x).sum() for _ in range(3)).backward()
        torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)
