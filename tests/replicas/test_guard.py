"""Gradients that would be lost: a replica's leaves refuse them while no call and no backward of it is at work."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import BridgeError
from instep.replicas.guard import Guard

ENGINES = ["threads", "processes"]


class Marked(nn.Parameter):
    """A class of the user's own."""


def leaf_of(kind: str) -> nn.Parameter:
    made = {
        "dense": lambda: nn.Parameter(torch.ones(3, 2)),
        "complex": lambda: nn.Parameter(torch.ones(3, 2, dtype=torch.complex64)),
        "turned": lambda: nn.Parameter(torch.ones(2, 3).t()),
        "empty": lambda: nn.Parameter(torch.ones(0, 2)),
        "own class": lambda: Marked(torch.ones(3, 2)),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["dense", "complex", "turned", "empty", "own class"])
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:.*create_graph.*:UserWarning")
def test_a_gradient_is_refused_while_closed(kind: str, create_graph: bool) -> None:
    leaf, guard = leaf_of(kind), Guard()
    guard.watch(leaf)
    guard.open()
    guard.close()
    with pytest.raises(BridgeError, match="from outside its call"):
        (leaf * 2).abs().sum().backward(create_graph=create_graph)
    assert torch.autograd.grad((leaf * 2).abs().sum(), leaf) if kind != "own class" else True
    guard.open()
    assert leaf.grad is None
    (leaf * 2).abs().sum().backward()
    assert guard.may_have_gradients()
    assert isinstance(leaf.grad, Tensor)
    torch.testing.assert_close(leaf.grad.abs(), torch.full_like(leaf, 2).abs())
    leaf.grad = None
    guard.close()


def test_a_sparse_gradient_is_refused() -> None:
    layer, guard = nn.Embedding(4, 3, sparse=True), Guard()
    guard.watch(layer.weight)
    guard.open()
    guard.close()
    with pytest.raises(BridgeError):
        layer(torch.tensor([1, 2])).sum().backward()


def test_it_is_open_until_the_last_one_closes() -> None:
    leaf, guard = leaf_of("dense"), Guard()
    guard.watch(leaf)
    guard.open()
    guard.open()
    guard.close()
    leaf.sum().backward()
    assert leaf.grad is not None
    guard.open()  # what is there already stays
    guard.close()
    assert torch.equal(leaf.grad, torch.ones(3, 2))
    leaf.grad = None
    guard.close()
    with pytest.raises(BridgeError):
        leaf.sum().backward()


def test_without_a_graph_nothing_lies_on_leaves() -> None:
    leaf, guard = leaf_of("dense"), Guard()
    guard.watch(leaf)
    guard.open()
    guard.close(graph=False)
    assert leaf.grad is None
    guard.open()
    guard.close(graph=True)
    guard.open()
    guard.close(graph=False)  # there may still be the one from before
    with pytest.raises(BridgeError):
        leaf.sum().backward()


def test_leaves_of_another_dtype_and_shape_are_watched_too() -> None:
    one, other, guard = leaf_of("dense"), leaf_of("dense"), Guard()
    guard.watch(one)
    guard.watch(other)
    guard.open()
    one.data, other.data = one.data.double(), torch.ones(5)
    guard.close()
    for leaf in (one, other):
        with pytest.raises(BridgeError):
            leaf.sum().backward()


def test_a_leaf_that_is_forgotten_is_left_alone() -> None:
    one, other, guard = leaf_of("dense"), leaf_of("dense"), Guard()
    guard.watch(one)
    guard.watch(other)
    guard.forget({id(one)})
    guard.open()
    guard.close()
    one.sum().backward()
    assert torch.equal(one.grad, torch.ones(3, 2))
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


class Keeps(nn.Module):
    """Keeps what it makes where no gradient finds the way, and looks at gradients."""

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
def test_a_kept_tensor_is_refused_whatever_came_between(between: str) -> None:
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
        with pytest.raises(BridgeError, match="kept by another way"):
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
