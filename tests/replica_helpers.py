"""Helpers that compare a plain module with a copy on CPU replicas, for every way an engine runs collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import instep

# "joint" is what the threads engine does on accelerators: one backward over all replicas. Here it runs on the CPU.
ENGINE_MODES = ["serial", "threads", "joint", "processes"]

ENGINE_MEMORY = {
    f"{engine}-private" if private else engine: (engine, private)
    for engine in ("serial", "threads", "processes")
    for private in (False, True)
}
"""Each engine with shared parameters and with private copies, as (engine, private_copies)."""


@contextmanager
def replicated(net: nn.Module, mode: str, replicas: int = 3, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the plain module and a wrapper around a copy of it."""
    engine = "threads" if mode == "joint" else mode
    with instep.DataParallel(copy.deepcopy(net), ["cpu"] * replicas, engine=engine, **options) as model:
        if mode == "joint":
            model._instep_engine._on_cpu = False
        yield net, model


def weighted_loss(out: Tensor) -> Tensor:
    """A loss that gives each entry of an output a different weight."""
    return (out.sin() * torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).view_as(out)).sum()


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad)


class FunctionModule(nn.Module):
    """A module whose forward calls a given function with the module and its inputs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.other = nn.Linear(3, 4).double()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def batch(size: int = 7) -> Tensor:
    return torch.randn(size, 3, dtype=torch.float64)


def train(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = weighted_loss) -> Any:
    out = model(x)
    loss(out).backward()
    return out


def check(body: Callable[..., Any], mode: str, loss: Callable[[Any], Tensor] = weighted_loss, **options: Any) -> None:
    """Assert that two steps with and without replicas give the same outputs and gradients."""
    x = batch()
    with replicated(FunctionModule(body), mode, **options) as (plain, model):
        for _ in range(2):
            assert_close(train(model, x, loss), train(plain, x, loss))
            assert_same_gradients(model, plain)


def train_and_compare(net: nn.Module, x: Tensor, way: str, replicas: int = 3, steps: int = 3, **options: Any) -> None:
    """Outputs, gradients and state of a plain and a wrapped module, for some steps and then in evaluation."""
    with replicated(net.double(), way, replicas, **options) as (plain, model):
        for step in range(steps):
            inputs = [(x * (1 + step)).detach().requires_grad_() for _ in range(2)]
            outs = [each(value) for each, value in zip((plain, model), inputs, strict=True)]
            for out in outs:
                weighted_loss(out).backward()
            assert_close(outs[1], outs[0])
            assert_close(inputs[1].grad, inputs[0].grad)
            assert_same_gradients(model, plain)
            assert_close(model.state_dict(), plain.state_dict())
        plain.eval()
        model.eval()
        assert_close(model(x), plain(x))
        assert_close(model.state_dict(), plain.state_dict())
