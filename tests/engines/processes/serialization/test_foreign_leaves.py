"""Outputs that depend on tensors whose gradients a worker could not send back are errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.select import EngineChoice
from instep.errors import CannotCross

from ..connections import script

SCRIPT = """
import torch
from torch import nn

head = nn.Linear(4, 3)
scale = torch.randn(4, requires_grad=True)
held = {"scale": torch.randn(4, requires_grad=True)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

class Headed(Net):
    def forward(self, x):
        return head(self.layer(x))

class Scaled(Net):
    def forward(self, x):
        return self.layer(x) * scale

class Stored(Net):
    def forward(self, x):
        self.kept = self.layer(x) * held["scale"]
        return x

class Taught(Net):
    def forward(self, x):
        with torch.no_grad():
            wanted = head(x)
        return self.layer(x)[:, :3] - wanted

class Given(Net):
    def forward(self, x, function):
        return function(self.layer(x))

class Holding(Net):
    def __init__(self, function):
        super().__init__()
        self.function = function
    def forward(self, x):
        return self.function(self.layer(x))

def enclosed():
    own = nn.Linear(4, 3)
    class Closed(Net):
        def forward(self, x):
            return own(self.layer(x))
    return Closed()

class Owning(Net):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
    def forward(self, x):
        return last(self.layer(x))

def through_a_global():
    global last
    net = Owning()
    last = net.last
    return net

def through_a_closure():
    net = Owning()
    own = net.last
    class Closed(Owning):
        def forward(self, x):
            return own(self.layer(x))
    net.__class__ = Closed
    return net

def by_tensor():
    factor = torch.randn(4, requires_grad=True)
    return lambda h: h * factor

def by_module():
    own = nn.Linear(4, 3)
    return lambda h: own(h)

def by_global():
    return lambda h: h * scale

def criterion(output, target):
    return (head(output) - target).square().mean()
"""


@pytest.fixture
def defined() -> Any:
    torch.manual_seed(0)
    return script(SCRIPT)


def wrapped(net: nn.Module) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * 2, engine="processes")


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda d: d.Headed(), r"the global 'head' \((weight|bias)\)"),
        (lambda d: d.Scaled(), "the global 'scale'"),
        (lambda d: d.Stored(), r"a tensor of shape \(4,\)"),
        (lambda d: d.enclosed(), r"a tensor of shape \(3"),
        (lambda d: d.Holding(d.by_global()), "the global 'scale'"),
        (lambda d: d.through_a_global(), r"the global 'last' \((weight|bias)\)"),
        (lambda d: d.through_a_closure(), r"a tensor of shape \(3"),
    ],
)
def test_a_gradient_that_would_be_lost_is_an_error(defined: Any, make: Any, what: str) -> None:
    net, x = make(defined), torch.randn(5, 4)
    net.layer.weight.grad = torch.ones(4, 4)
    with wrapped(net) as model:
        with pytest.raises(CannotCross, match=f"computes with {what}.*needs a gradient(?s:.*)engine='threads'"):
            model(x)
        assert net.layer.weight.grad.eq(1).all()
        with torch.no_grad():
            torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
def test_a_global_that_is_frozen_after_the_error(defined: Any) -> None:
    net, x = defined.Headed(), torch.randn(5, 4)
    with wrapped(net) as model:
        with pytest.raises(CannotCross):
            model(x)
        defined.head.requires_grad_(False)
        model(x).square().sum().backward()
        found, net.layer.weight.grad = net.layer.weight.grad, None
        net(x).square().sum().backward()
        torch.testing.assert_close(found, net.layer.weight.grad)
        defined.head.requires_grad_(True)
        with pytest.raises(CannotCross):
            model(x)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("function", ["by_tensor", "by_module"])
def test_a_leaf_in_an_argument_is_an_error(defined: Any, function: str) -> None:
    net, x = defined.Given(), torch.randn(5, 4)
    with wrapped(net) as model:
        with pytest.raises(CannotCross, match="a tensor of shape"):
            model(x, getattr(defined, function)())
        torch.testing.assert_close(model(x, torch.sin), net(x, torch.sin))


@pytest.mark.usefixtures("workers")
def test_a_loss_with_a_global_head_is_an_error(defined: Any) -> None:
    with (
        wrapped(instep.with_loss(nn.Linear(4, 4), defined.criterion)) as model,
        pytest.raises(CannotCross, match="the global 'head'"),
    ):
        model(torch.randn(5, 4), torch.randn(5, 3))


@pytest.mark.usefixtures("workers")
def test_global_modules_can_be_used_without_grad(defined: Any) -> None:
    net, x = defined.Taught(), torch.randn(5, 4)
    with wrapped(net) as model:
        for _ in range(2):
            model(x).square().sum().backward()
            found, net.layer.weight.grad = net.layer.weight.grad, None
            net(x).square().sum().backward()
            torch.testing.assert_close(found, net.layer.weight.grad)
            net.layer.weight.grad = None
            with torch.no_grad():
                defined.head.weight.add_(1)


@pytest.mark.usefixtures("workers")
def test_a_module_in_a_closure_of_the_module_gets_its_gradient(defined: Any) -> None:
    net, x = defined.Holding(defined.by_module()), torch.randn(5, 4)
    own: Any = next(cell.cell_contents for cell in net.function.__closure__)
    with wrapped(net) as model:
        model(x).square().sum().backward()
    found, own.weight.grad = own.weight.grad, None
    net(x).square().sum().backward()
    torch.testing.assert_close(found, own.weight.grad)


@pytest.mark.usefixtures("workers")
def test_auto_falls_back_to_threads(defined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "instep.parallel.choose_engine", lambda *_: EngineChoice("processes", "of the rule", automatic=True)
    )
    net, x = defined.Headed(), torch.randn(5, 4)
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        with pytest.warns(UserWarning, match="falling back to engine='threads': .*the global 'head'"):
            out: Tensor = model(x)
        out.square().sum().backward()
    found, defined.head.weight.grad = defined.head.weight.grad, None
    net(x).square().sum().backward()
    torch.testing.assert_close(found, defined.head.weight.grad)
