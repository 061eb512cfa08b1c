"""Arguments that belong to the caller's graph: written in place by `forward`, or detached in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

each_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


class Head(nn.Module):
    """Applies a given operation to its argument first."""

    def __init__(self, begin: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.begin = nn.Linear(4, 3).double(), begin

    def forward(self, *args: Tensor) -> Any:
        out = self.layer(self.begin(*args))
        return (out, args[0]) if self.begin is returned else out


def returned(x: Tensor) -> Tensor:
    return x.mul_(2)


def some_rows(x: Tensor) -> Tensor:
    """Not every replica has such a row."""
    rows = x[:, 0] > 1
    if rows.any():
        x[rows] = x[rows] * 3
    return x


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


BEGIN: dict[str, Callable[..., Tensor]] = {
    "relu": lambda x: torch.relu_(x),
    "scaled": lambda x: x.mul_(2),
    "twice": lambda x: x.mul_(2).add_(1),
    "a part": lambda x: (x[:, 1:].mul_(3), x)[1],
    "some rows": some_rows,
    "without gradient": without_gradient,
    "returned": returned,
    "the second": lambda x, y: x + y.exp_(),
}


def gradients(model: Any, leaf: Tensor, *, before: Callable[[Tensor], Tensor], arguments: int) -> list[Tensor]:
    """The gradients of a loss that looks at the argument afterwards, and the argument."""
    leaf = leaf.clone().requires_grad_()
    model.zero_grad()
    hidden = before(leaf)
    out = model(*[hidden * 1 for _ in range(arguments - 1)], hidden)
    outs = out if isinstance(out, tuple) else (out,)
    (sum(o.square().sum() for o in outs) + (hidden + 1).pow(3).sum()).backward()
    return [leaf.grad, hidden.detach(), *[p.grad for p in model.parameters()], *[o.detach() for o in outs]]  # type: ignore[list-item]


@each_engine
@pytest.mark.parametrize("begin", BEGIN.values(), ids=BEGIN.keys())
def test_in_place_writes_to_arguments_keep_their_history(engine: str, begin: Callable[..., Tensor]) -> None:
    plain, arguments = Head(begin), 2 if begin is BEGIN["the second"] else 1
    befores: list[Callable[[Tensor], Tensor]] = [lambda x: x * 1.5, lambda x: torch.cat([x, x], 1)[:, 2:6]]
    with instep.DataParallel(copy.deepcopy(plain), ["cpu"] * 3, engine=engine) as model:
        for size in (7, 6):
            x = torch.randn(size, 4, dtype=torch.float64)
            for before in befores:
                theirs = gradients(plain, x, before=before, arguments=arguments)
                mine = gradients(model, x, before=before, arguments=arguments)
                torch.testing.assert_close(mine, theirs)


@each_engine
def test_writing_to_a_tensor_saved_for_backward_is_an_error_as_on_one_device(engine: str) -> None:
    plain = Head(BEGIN["scaled"])
    with instep.DataParallel(copy.deepcopy(plain), ["cpu"] * 2, engine=engine) as model:
        for each in (plain, model):
            hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True).tanh()  # keeps its result
            out = each(hidden)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


class Judges(nn.Module):
    """A discriminator that detaches by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor, bias: Tensor, *, detach: bool = False) -> Tensor:
        out: Tensor = self.layer(x.detach() if detach else x) + bias
        return out


@each_engine
def test_an_argument_that_forward_detaches_keeps_its_graph(engine: str) -> None:
    plain, maker = Judges(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    with instep.DataParallel(copy.deepcopy(plain), ["cpu"] * 3, engine=engine) as model:
        found = []
        for each in (plain, model):
            maker.zero_grad()
            bias = torch.ones(7, 1, dtype=torch.float64, requires_grad=True)
            fake = maker(x)
            each(fake, bias * 1, detach=True).square().sum().backward()
            assert all(p.grad is None for p in maker.parameters())
            each(fake, bias * 1).square().sum().backward()
            found.append([bias.grad, *[p.grad for m in (each, maker) for p in m.parameters()]])
    torch.testing.assert_close(found[1], found[0])


class Recurrent(nn.Module):
    """Keeps its state with its history, and detaches it when it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        past = torch.zeros_like(x) if self.state is None or len(self.state) != len(x) else self.state.detach()
        self.state = torch.tanh(self.layer(x) + past)
        return self.state


@each_engine
def test_state_that_is_detached_where_it_is_read(engine: str) -> None:
    plain = Recurrent()
    with instep.DataParallel(copy.deepcopy(plain), ["cpu"] * 3, engine=engine, state={"state": "cat"}) as model:
        for size in (7, 7, 7, 7, 6, 6, 6):
            x = torch.randn(size, 4, dtype=torch.float64)
            for each in (plain, model):
                each.zero_grad()
                each(x).square().sum().backward()
            torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)
            torch.testing.assert_close(model.state, plain.state)
