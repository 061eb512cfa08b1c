"""State with one row per sample that calls carry over: truncated back-propagation, and what looks like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.replicas.state.carried import CarriedValue


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
        y: Tensor = self.layer(x).tanh()
        self.kept = y
        return y


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


def carried(model: Any) -> list[CarriedValue]:
    return list(model._instep_runner.state_merger.carried.values.values())


def reads(model: Any) -> list[list[bool]]:
    """For each carried value, what instrumented calls showed."""
    return [list(value.was_read.values()) for value in carried(model)]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (Recurrent, (4, 3)),
    "cell": (Cell, (3,)),
    "in place": (InPlace, (3,)),
    "memory": (Memory, (3,)),
}


@pytest.mark.parametrize(("build", "shape"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [8, 7])
def test_without_a_rule_calls_run_on_one_device_with_a_warning(
    wrap: Callable[..., Any], build: Callable[[], nn.Module], shape: tuple[int, ...], size: int
) -> None:
    plain, net = twins(build)
    model = wrap(net)
    # Samples of `Memory` read each other's entries: no line is offered.
    advice = "has not confirmed" if build is Memory else r"state=\{'\w+': 'cat'\}"
    with pytest.warns(UserWarning, match=rf"one device because forward reads '\w+'[\s\S]*{advice}") as caught:
        assert_same_story(plain, model, [normal(size, *shape) for _ in range(5)])
    assert reads(model) == [[True]]
    assert len(caught) == 1


@pytest.mark.parametrize("case", ["lstm", "cell", "in place"])
@pytest.mark.parametrize("size", [8, 7])
def test_with_a_rule_state_is_split_and_joined(wrap: Callable[..., Any], case: str, size: int) -> None:
    build, shape = CASES[case]
    plain, net = twins(build)
    model = wrap(net, state={"h": "cat"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_story(plain, model, [normal(size, *shape) for _ in range(5)])
    assert [value.is_declared for value in carried(model)] == [True]


def test_full_back_propagation_through_several_calls(wrap: Callable[..., Any]) -> None:
    plain, net = twins(lambda: Recurrent(detach=False))
    model = wrap(net, state={"h": "cat"})
    for _ in range(3):
        batches = [normal(7, 4, 3) for _ in range(3)]
        for module in (plain, model):
            module.zero_grad()
            sum(module(x).square().mean() for x in batches).backward()
            module.h = tuple(t.detach() for t in module.h)
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_another_batch_size_behaves_as_in_the_plain_module(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    assert_same_story(plain, wrap(net, state={"h": "cat"}), [normal(size, 3) for size in (8, 8, 4, 4, 8, 5, 1, 8, 8)])
    _, net = twins(Recurrent)
    model = wrap(net, state={"h": "cat"})
    for size in (8, 8):
        model(normal(size, 4, 3))
    for size in (4, 16, 5):
        with pytest.raises(RuntimeError, match="hidden"):
            model(normal(size, 4, 3))
    model.h = None
    model(normal(4, 4, 3))


def test_a_reset_between_calls(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    model = wrap(net, state={"h": "cat"})
    for reset in (None, torch.zeros(8, 5, dtype=torch.float64), torch.ones(8, 5, dtype=torch.float64), None):
        assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])
        plain.h = net.h = reset
    with torch.no_grad():
        plain.h, net.h = normal(8, 5).fill_(2), normal(8, 5).fill_(2)
    assert_same_story(plain, model, [normal(8, 3)])


def test_state_set_before_the_first_call_is_split_by_rule(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Cell)
    model = wrap(net, state={"h": "cat"})
    for module in (plain, model):
        module.h = torch.ones(8, 5, dtype=torch.float64)
    assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])


def test_random_draws_do_not_hide_reads(wrap: Callable[..., Any]) -> None:
    model = wrap(Recurrent(noise=0.5, dropout=0.5).double())
    model(normal(8, 4, 3))
    with pytest.warns(UserWarning, match=r"forward reads 'h'[\s\S]*state=\{'h': 'cat'\}"):
        model(normal(8, 4, 3))
    model(normal(8, 4, 3))


def test_an_instrumented_call_leaves_plain_tensors(wrap: Callable[..., Any]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)
            self.h: Tensor | None = None

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            y, before = self.layer(x), self.h
            self.h = y.detach() if before is None else before
            return y, before

    plain, net = twins(Both)
    model = wrap(net, merge={"1": "cat"})
    x = normal(8, 3)
    for step in range(4):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            (y, before), (expected, expected_before) = model(x), plain(x)
        torch.testing.assert_close(y, expected)
        if step:
            torch.testing.assert_close(before, expected_before)
            assert type(before) is Tensor
        assert type(net.h) is Tensor


def test_a_stored_reference_counts_as_a_read(wrap: Callable[..., Any]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)
            self.last: Tensor | None = None
            self.before_last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            out = y if self.before_last is None else y + self.before_last
            self.before_last = self.last
            self.last = y.detach()
            return out

    plain, net = twins(Two)
    model = wrap(net)
    with pytest.warns(UserWarning, match="forward reads 'last'"):
        assert_same_story(plain, model, [normal(8, 3) for _ in range(5)])


def test_a_replaced_layer_is_checked_again(wrap: Callable[..., Any]) -> None:
    """The new layer reads an attribute that the old one only wrote."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner: nn.Module = Kept()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    class Reader(Kept):
        def forward(self, x: Tensor) -> Tensor:
            before = getattr(self, "kept", None)
            y = super().forward(x)
            return y if before is None else y + before.detach()

    plain, net = twins(Outer)
    model = wrap(net)
    assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])
    weights = net.inner.state_dict()
    for module in (plain, net):
        module.inner = Reader().double()
        module.inner.load_state_dict(weights)
    with pytest.warns(UserWarning, match=r"forward reads 'inner\.kept'"):
        assert_same_story(plain, model, [normal(8, 3) for _ in range(4)])
    assert len(carried(model)) == 1, "the replaced layer is forgotten"


def test_a_layer_of_the_same_name_whose_class_reads_is_noticed(wrap: Callable[..., Any]) -> None:
    """The owner of the value stays; another module's code comes to read it."""

    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5)
            self.post: nn.Module = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            out: Tensor = self.post(y) if isinstance(self.post, nn.Identity) else self.post(y, self)
            self.__dict__["kept"] = y.detach()
            return out

    class Reader(nn.Module):
        def forward(self, y: Tensor, keeper: Any) -> Tensor:
            out: Tensor = y + keeper.kept
            return out

    plain, net = twins(Keeper)
    model = wrap(net)
    assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])
    plain.post, net.post = Reader(), Reader()
    with pytest.warns(UserWarning, match="forward reads 'kept'"):
        assert_same_story(plain, model, [normal(8, 3) for _ in range(3)])


def test_state_in_a_dictionary_runs_on_one_device(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Table)
    model = wrap(net)
    with pytest.warns(UserWarning, match=r"forward reads 'table\.h'"):
        assert_same_story(plain, model, [normal(size, 3) for size in (8, 8, 8, 4, 4)])


def test_features_in_a_dictionary_are_no_state(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Stash)
    model = wrap(net)
    assert_same_story(plain, model, [normal(size, 3) for size in (8, 8, 7, 5, 8)])
    assert reads(model) == [[False]]


def test_state_that_no_code_reads_is_not_carried(wrap: Callable[..., Any]) -> None:
    plain, net = twins(Kept)
    model = wrap(net)
    assert_same_story(plain, model, [normal(size, 3) for size in (8, 5, 7, 8)])
    assert reads(model) == [[]]
    torch.testing.assert_close(net.kept, plain.kept)


@pytest.mark.filterwarnings("ignore:calls run on one device")
@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_reads_are_checked_per_mode(engine: str, first: str) -> None:
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


@pytest.mark.filterwarnings("ignore:calls run on one device")
@pytest.mark.parametrize("how", ["named", "held", "patched"])
def test_state_that_a_function_elsewhere_reads(wrap: Callable[..., Any], how: str) -> None:
    plain, net = Elsewhere(how), Elsewhere(how)
    net.load_state_dict(plain.state_dict())
    model = wrap(net)
    for size in (6, 6, 6, 5, 5, 5):
        x = torch.randn(size, 3)
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(net.state, plain.state)
