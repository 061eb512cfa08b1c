"""Combinations of features: carried state and the probe, compiled code and batch normalisation, losses and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import instep

ENGINES = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


class Carries(nn.Module):
    """Keeps a hidden state from call to call; `out` says what it makes of it, `read` how it reads it."""

    def __init__(self, out: Callable[..., Any], read: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.h: Tensor | None = None
        self.kl: Tensor | None = None
        self.out, self.read = out, read

    def forward(self, x: Tensor, mode: str = "a") -> Any:
        h = torch.tanh(self.layer(x) + (torch.zeros_like(x) if self.h is None else self.read(self.h)))
        before, self.h = self.h, h.detach()
        self.kl = h.square().mean()
        return self.out(h, mode, before)


def mean_or_sum(h: Tensor, mode: str, before: Any) -> Tensor:
    return h.square().mean() if mode == "a" else h.square().sum()


def roll(h: Tensor) -> Tensor:
    return h.roll(1, 0)


CASES: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "another meaning in another mode": (mean_or_sum, lambda h: h),
    "numbers only": (lambda h, mode, before: {"score": float(h.detach().sum())}, lambda h: h),
    "nothing but an attribute": (lambda h, mode, before: None, lambda h: h),
    "read as a whole": (lambda h, mode, before: h, lambda h: h.mean(0)),
    "the row of a neighbour": (lambda h, mode, before: h, roll),
    "small numbers": (lambda h, mode, before: h * 1e-7, roll),
    "seen one call late": (lambda h, mode, before: h * 0 if before is None else before, roll),
}


OWN_ROW = ("another meaning in another mode", "numbers only", "nothing but an attribute")


@ENGINES
@pytest.mark.parametrize(("case", "state"), [*((c, {}) for c in CASES), *((c, {"h": "cat"}) for c in OWN_ROW)])
@pytest.mark.filterwarnings("ignore:calls run on one device because forward reads")
def test_carried_state_and_the_probe(case: str, state: dict[str, Any], engine: str) -> None:
    net = Carries(*CASES[case]).double()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state=state) as model:
        for mode in "aaabbab":
            x = torch.randn(6, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x, mode), plain(x, mode), rtol=1e-8, atol=1e-15)
            torch.testing.assert_close(net.h, plain.h)
            torch.testing.assert_close(net.kl, plain.kl)


@ENGINES
def test_samples_that_meet_beside_carried_state(engine: str) -> None:
    net = Carries(lambda h, mode, before: h if mode == "a" else h.softmax(0))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state={"h": "cat"}) as model:
        for _ in range(3):
            model(torch.randn(6, 3))
        with pytest.raises(instep.MergeError, match="depend on other samples"):
            model(torch.randn(6, 3), "b")


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out


@ENGINES
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_batch_normalisation_is_one_exchange_and_one_graph_break(engine: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = Normalised().double()
    net = copy.deepcopy(plain)
    net.compile(backend="eager")
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            x = torch.randn(7, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x), plain(x))
        assert counters["stats"]["unique_graphs"] <= 2 * 2
    torch.testing.assert_close(net.norm.running_var, plain.norm.running_var)
    torch._dynamo.reset()


def test_explain_depends_on_plain_arguments() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, how: str) -> Tensor:
            return x.square().mean() if how == "mean" else x.square().sum()

    with instep.DataParallel(Net(), ["cpu"] * 2) as model:
        x = torch.randn(5, 3)
        model(x, "mean")
        assert "tried on" in str(model.explain(x, "mean"))
        assert "not tried yet" in str(model.explain(x, "sum"))


@ENGINES
@pytest.mark.parametrize(
    "value",
    [
        lambda y: y.softmax(0),
        lambda y: y.detach().softmax(0),
        lambda y: torch.arange(len(y)),
        lambda y: list(y.shape),
        lambda y: 1 / len(y),
        lambda y: y.shape,
    ],
    ids=["samples that meet", "detached", "positions", "a shape in a list", "a share", "a shape"],
)
@pytest.mark.parametrize("batch", [2, 6])
def test_an_attribute_that_the_parts_do_not_make_is_refused(value: Any, batch: int, engine: str) -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            self.kept = value(y)
            return y

    with (
        instep.DataParallel(Sets(), ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.StateError, match="'kept'"),
    ):
        model(torch.randn(batch, 3))


@ENGINES
def test_a_count_of_samples_is_distinguished_from_a_count_of_calls_with_one_sample_each(engine: str) -> None:
    class Counts(nn.Module):
        def __init__(self, samples: bool) -> None:
            super().__init__()
            self.samples, self.seen = samples, 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += len(x) if self.samples else 1
            return x * 2

    with instep.DataParallel(Counts(samples=False), ["cpu"] * 2, engine=engine) as model:
        for _ in range(3):
            model(torch.randn(2, 3))
        assert model.seen == 3
    with (
        instep.DataParallel(Counts(samples=True), ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.StateError, match="'seen'"),
    ):
        model(torch.randn(2, 3))
    with instep.DataParallel(Counts(samples=True), ["cpu"] * 2, engine=engine, state={"seen": "sum"}) as model:
        model(torch.randn(2, 3))
        assert model.seen == 2


@ENGINES
def test_a_layer_that_runs_twice_counts_its_calls(engine: str) -> None:
    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.arm = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.arm(a) - self.arm(b)
            return out

    with instep.DataParallel(Siamese(), ["cpu"] * 3, engine=engine) as model:
        for size in (12, 6, 7):
            model(torch.randn(size, 4), torch.randn(size, 4))
        assert model.arm[1].num_batches_tracked == 6


def test_a_setting_that_is_annealed_is_tried_once() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.beta = nn.Linear(3, 3), 0.0

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y.square().mean() + self.beta * y.abs().mean()

    net = Annealed().double()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        for step in range(40):
            model.beta = step / 40
            x = torch.randn(5, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x), net(x))


def test_texts_that_differ_at_each_call_are_just_texts() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor, name: str) -> Tensor:
            return (self.layer(x) * (0 if name == "3" else 1)).square().mean()

    net = Named().double()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        for step in range(40):
            x = torch.randn(5, 3, dtype=torch.float64)
            torch.testing.assert_close(model(x, str(step)), net(x, str(step)))


@ENGINES
@pytest.mark.filterwarnings("ignore:calls run on one device because forward reads")
@pytest.mark.parametrize("rows", [True, False], ids=["its own row", "the whole"])
def test_state_that_only_another_mode_reads(rows: bool, engine: str) -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.h: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            if self.training:
                self.h = out.detach()
                return out
            assert self.h is not None
            return out + (self.h if rows else self.h.mean(0))

    net = Later().double()
    plain, x = copy.deepcopy(net), torch.randn(6, 4, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for training in (True, True, True, False, False, True, False):
            model.train(training)
            plain.train(training)
            torch.testing.assert_close(model(x), plain(x))
