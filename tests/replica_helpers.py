"""A module twice, as it is and on CPU replicas, for every way in which an engine lets replicas meet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import instep

# "joint" is what threads do on accelerators: one backward over all replicas, here on the CPU.
WAYS = ["serial", "threads", "joint", "processes"]

KINDS = {
    f"{engine}-private" if private else engine: (engine, private)
    for engine in ("serial", "threads", "processes")
    for private in (False, True)
}
"""Every engine, with memory that replicas share with the module and with memory of their own."""


@contextmanager
def replicated(net: nn.Module, way: str, replicas: int = 3, **options: Any) -> Iterator[tuple[Any, Any]]:
    """The plain module and a wrapper around its twin."""
    engine = "threads" if way == "joint" else way
    with instep.DataParallel(copy.deepcopy(net), ["cpu"] * replicas, engine=engine, **options) as model:
        if way == "joint":
            model._instep_engine._on_cpu = False
        yield net, model


def weigh(out: Tensor) -> Tensor:
    """A loss that every entry of an output enters by another weight."""
    return (out.sin() * torch.linspace(0.5, 2.0, out.numel(), dtype=out.dtype).view_as(out)).sum()


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad)


class Does(nn.Module):
    """Runs a function of itself and its inputs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.other = nn.Linear(3, 4).double()
        self.body = body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def batch(size: int = 7) -> Tensor:
    return torch.randn(size, 3, dtype=torch.float64)


def train(model: nn.Module, x: Tensor, loss: Callable[[Any], Tensor] = weigh) -> Any:
    out = model(x)
    loss(out).backward()
    return out


def check(body: Callable[..., Any], way: str, loss: Callable[[Any], Tensor] = weigh, **options: Any) -> None:
    """Two steps with and without replicas agree."""
    x = batch()
    with replicated(Does(body), way, **options) as (plain, model):
        for _ in range(2):
            assert_close(train(model, x, loss), train(plain, x, loss))
            assert_same_gradients(model, plain)
