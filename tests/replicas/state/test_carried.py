"""State that follows the batch and is carried from call to call: truncated back-propagation, and what looks like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Recurrent(nn.Module):
    """Carries the hidden state of an LSTM, batch in dim 1, cut off from the graph or not."""

    def __init__(self, detach: bool = True, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 5, 2, batch_first=True, dropout=dropout), nn.Linear(5, 2)
        self.dropout, self.noise = nn.Dropout(dropout), noise
        self.detach, self.parts = detach, 0
        self.h: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.rnn(x, self.h)
        self.h = tuple(t.detach() for t in h) if self.detach else h
        if self.noise:
            y = y + self.noise * torch.randn_like(y)
        return self.out(self.dropout(y))


class Cell(nn.Module):
    """Begins anew when the batch has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.h is None or self.h.shape[0] != x.shape[0]:
            self.h = x.new_zeros(x.shape[0], 5)
        y = self.cell(x, self.h)
        self.h = y.detach()
        return y


class InPlace(nn.Module):
    """Writes into the state that it carries."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.h is None:
            self.h = y.detach()
        out = y + self.h
        self.h.data.mul_(0.5).add_(y.detach())
        return out


class Memory(nn.Module):
    """Compares samples with all those of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        out = y.sum(1) if self.last is None else (y @ self.last.T).logsumexp(1)
        self.last = y.detach()
        return out


class Kept(nn.Module):
    """Leaves something for its user, and never reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x).tanh()
        return self.kept


class Table(nn.Module):
    """Keeps its state in a dictionary, and begins anew when the batch has another size."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.table: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.table.get("h")
        y = self.cell(x, x.new_ones(x.shape[0], 5) if h is None or len(h) != len(x) else h)
        self.table["h"] = y.detach()
        return y


class Stash(nn.Module):
    """Leaves features in a dictionary for its user."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.stash: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.stash["y"] = self.layer(x).tanh()
        return self.stash["y"]


def story(module: Any, batches: list[Tensor]) -> list[Tensor]:
    found = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for x in batches:
        out = module(x)
        optimizer.zero_grad()
        out.square().sum().backward()
        optimizer.step()
        found += [out.detach(), *(p.grad.clone() for p in module.parameters())]
    return found


def assert_same_story(plain: nn.Module, model: Any, batches: list[Tensor]) -> None:
    for mine, theirs in zip(story(model, batches), story(plain, batches), strict=True):
        torch.testing.assert_close(mine, theirs)


def twins(build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    plain, net = build().double(), build().double()
    net.load_state_dict(plain.state_dict())
    return plain, net


SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "lstm": (Recurrent, (4, 3), "cut"),
    "cell": (Cell, (3,), "cut"),
    "in place": (InPlace, (3,), "cut"),
    "memory": (Memory, (3,), "whole"),
}


@pytest.mark.parametrize(("build", "shape", "verdict"), SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("size", [8, 7])
def test_carried_state(
    wrap: Callable[..., Any], build: Callable[[], nn.Module], shape: tuple[int, ...], verdict: str, size: int
) -> None:
    plain, net = twins(build)
    model = wrap(net)
    assert_same_story(plain, model, [normal(size, *shape) for _ in range(5)])
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == [verdict]


def test_full_back_propagation_through_several_calls(wrap: Callable[..., Any]) -> None:
    plain, net = twins(lambda: Recurrent(detach=False))
    model = wrap(net)
    for _ in range(3):
        batches = [normal(7, 4, 3) for _ in range(3)]
        for module in (plain, model):
            module.zero_grad()
            sum(module(x).square().mean() for x in batches).backward()
            module.h = tuple(t.detach() for t in module.h)
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_another_batch_size_is_what_the_module_makes_of_it(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    assert_same_story(plain, wrap(net), [normal(size, 3) for size in (8, 8, 4, 4, 8, 5, 1, 8, 8)])
    _, net = twins(Recurrent)
    model = wrap(net)
    for size in (8, 8):
        model(normal(size, 4, 3))
    for size in (4, 16, 5):
        with pytest.raises(RuntimeError, match="hidden"):
            model(normal(size, 4, 3))
    model.h = None
    model(normal(4, 4, 3))


def test_a_reset_between_calls(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    model = wrap(net)
    for reset in (None, torch.zeros(8, 5, dtype=torch.float64), torch.ones(8, 5, dtype=torch.float64), None):
        assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])
        plain.h = net.h = reset
    with torch.no_grad():
        plain.h, net.h = normal(8, 5).fill_(2), normal(8, 5).fill_(2)
    assert_same_story(plain, model, [normal(8, 3)])


def test_what_is_set_before_the_first_call_is_cut_where_a_rule_says_so(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    model = wrap(net, state={"h": "cat"})
    for module in (plain, model):
        module.h = torch.ones(8, 5, dtype=torch.float64)
    assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])


def test_a_module_that_draws_numbers_runs_on_one_device_and_says_so(wrap: Callable[..., Any]) -> None:
    model = wrap(Recurrent(noise=0.5).double())
    model(normal(8, 4, 3))
    with pytest.warns(UserWarning, match=r"forward may read 'h'[\s\S]*state=\{'h': 'cat'\}"):
        model(normal(8, 4, 3))
    model(normal(8, 4, 3))


def test_dropout_does_not_hide_how_state_is_read(wrap: Callable[..., Any]) -> None:
    net = Recurrent(dropout=0.5).double()
    model = wrap(net)
    for _ in range(3):
        model(normal(8, 4, 3)).sum().backward()
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == ["cut"]
    assert all(module.training for module in net.modules())


def test_zeros_prove_nothing(wrap: Callable[..., Any]) -> None:
    """A state that stays zero could be read in any way; it is not compared for ever."""

    class Still(Cell):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.h = torch.zeros_like(self.h)
            return y

    plain, net = twins(Still)
    model = wrap(net)
    with pytest.warns(UserWarning, match="forward may read 'h'"):
        assert_same_story(plain, model, [normal(7, 3) for _ in range(5)])
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == ["alone"]


def test_with_a_rule_such_a_module_runs_on_all(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Recurrent)
    model = wrap(net, state={"h": "cat"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_story(plain, model, [normal(7, 4, 3) for _ in range(3)])
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == ["cut"]


def test_state_in_a_dictionary_runs_on_one_device(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Table)
    model = wrap(net)
    with pytest.warns(UserWarning, match=r"forward may read 'table\.h'"):
        assert_same_story(plain, model, [normal(size, 3) for size in (8, 8, 8, 4, 4)])


def test_features_in_a_dictionary_are_no_state(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Stash)
    model = wrap(net)
    assert_same_story(plain, model, [normal(size, 3) for size in (8, 8, 7, 5, 8)])
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == ["whole"]


def test_what_nobody_reads_is_not_carried(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Kept)
    model = wrap(net)
    assert_same_story(plain, model, [normal(size, 3) for size in (8, 5, 7, 8)])
    assert [slot.verdict for slot in model._instep_runner.state_merger.carried.values.values()] == ["unsure"]
    torch.testing.assert_close(net.kept, plain.kept)


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_state_that_is_read_in_another_way_in_another_mode(engine: str, first: str) -> None:
    """Each sample its own row in training, all rows in evaluation."""

    class Modes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.state = nn.Linear(4, 3), None

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            if self.state is not None:
                out = out + (self.state if self.training else self.state.mean(0))
            self.state = out.detach()
            return out

    net, plain = Modes().double(), Modes().double()
    plain.load_state_dict(net.state_dict())
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for step in range(10):
            training = (step % 5 < 3) == (first == "train")
            x = torch.randn(6, 4, dtype=torch.float64)
            torch.testing.assert_close(model.train(training)(x), plain.train(training)(x))


def carried_on(net: Any, x: Tensor) -> Tensor:
    """A step of a program that is written as functions of a module."""
    past = net.state if net.state is not None and len(net.state) == len(x) else torch.zeros_like(x)
    net.state = torch.tanh(net.layer(x) + past).detach()
    out: Tensor = net.layer(x) + past
    return out


class Elsewhere(nn.Module):
    """Its state is read by code that is not its class's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.state, self.steps = nn.Linear(3, 3), None, [carried_on]
        if how == "patched":
            self.forward = MethodType(carried_on, self)  # type: ignore[method-assign]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.steps[0](self, x) if self.how == "held" else carried_on(self, x)
        return out


@pytest.mark.parametrize("how", ["named", "held", "patched"])
def test_state_that_a_function_elsewhere_reads(wrap: Callable[..., Any], how: str) -> None:
    plain, net = Elsewhere(how), Elsewhere(how)
    net.load_state_dict(plain.state_dict())
    model = wrap(net)
    for size in (6, 6, 6, 5, 5, 5):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(net.state, plain.state)
