"""Every replica draws from a stream of its own, which the caller's seed decides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.runtime.rng import CallerGenerator

ENGINES = ("serial", "threads", "processes")
engines = pytest.mark.parametrize("engine", ENGINES)


class Runs(nn.Module):
    """Whatever a function of the input draws."""

    def __init__(self, draw: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Any:
        return self.draw(x)


def wrap(net: nn.Module, engine: str, count: int = 2, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * count, engine=engine, **options)


def state() -> Tensor:
    return torch.default_generator.get_state()


def _out(x: Tensor, fill: Callable[[Tensor], Any]) -> Tensor:
    made = torch.empty(x.shape)
    fill(made)
    return made


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "randint": lambda x: torch.randint(0, 10**6, x.shape),
    "randperm": lambda x: torch.stack([torch.randperm(x.shape[1]) for _ in x]),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 10**6),
    "rand out": lambda x: _out(x, lambda made: torch.rand(x.shape, out=made)),
    "randn out": lambda x: _out(x, lambda made: torch.randn(x.shape, out=made)),
    "normal out": lambda x: _out(x, lambda made: torch.normal(x, x + 1, out=made)),
    "bernoulli out": lambda x: _out(x, lambda made: torch.bernoulli(x * 0 + 0.5, out=made)),
    "normal": lambda x: torch.normal(x, x + 1),
    "normal of numbers": lambda x: torch.normal(0.0, 1.0, x.shape),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "multinomial": lambda x: torch.multinomial(x + 1, x.shape[1], replacement=True),
    "poisson": lambda x: torch.poisson(x + 5),
    "binomial": lambda x: torch.binomial(x * 0 + 90, x * 0 + 0.5),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.01),
    "random_": lambda x: torch.empty_like(x).random_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x + 1),
    "dropout1d": lambda x: F.dropout1d((x + 1)[:, :, None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x + 1, training=True),
    "rrelu": lambda x: F.rrelu(-x - 1, training=True),
    "gumbel_softmax": F.gumbel_softmax,
    "attention": lambda x: F.scaled_dot_product_attention(
        *[(x + 1).expand(4, *x.shape).transpose(0, 1)] * 3, dropout_p=0.5
    ),
    "Normal": lambda x: torch.distributions.Normal(x, x + 1).rsample(),
    "Gamma": lambda x: torch.distributions.Gamma(x + 1, x + 1).rsample(),
    "Beta": lambda x: torch.distributions.Beta(x + 1, x + 1).rsample(),
    "Dirichlet": lambda x: torch.distributions.Dirichlet(x + 1).rsample(),
    "Categorical": lambda x: torch.distributions.Categorical(logits=x[:, :, None].expand(-1, -1, 99)).sample(),
    "vmap": lambda x: torch.vmap(F.dropout, randomness="different")(x + 1),
    "init": lambda x: nn.init.kaiming_uniform_(torch.empty_like(x)),
    "inference": lambda x: _inference(x),
}


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.rand(x.shape).clone()


@functools.cache
def _layers() -> dict[str, nn.Module]:
    torch.default_generator.manual_seed(0)
    return {
        "Dropout": nn.Dropout(),
        "LSTM": nn.LSTM(12, 12, num_layers=3, dropout=0.5, batch_first=True),
        "GRU": nn.GRU(12, 12, num_layers=2, dropout=0.5, batch_first=True),
        "MultiheadAttention": nn.MultiheadAttention(12, 2, dropout=0.5, batch_first=True),
        "TransformerEncoderLayer": nn.TransformerEncoderLayer(12, 2, 16, dropout=0.5, batch_first=True),
    }


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = _layers()[name]
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 1)[:, None].expand(-1, 3, -1)
        if self.name == "MultiheadAttention":
            return self.inner(x, x, x)[0]
        out = self.inner(x)
        return out[0] if isinstance(out, tuple) else out


def _module(name: str) -> nn.Module:
    return Runs(DRAWS[name]) if name in DRAWS else Layer(name)


@pytest.mark.parametrize("name", [*DRAWS, "Dropout", "LSTM", "GRU", "MultiheadAttention", "TransformerEncoderLayer"])
def test_draws_repeat_differ_between_replicas_and_are_the_same_on_every_engine(name: str) -> None:
    runs = []
    x = torch.zeros(8, 12)
    for engine in ENGINES:
        with wrap(_module(name), engine, 4, out_dims=0) as model:
            for _ in range(2):
                torch.default_generator.manual_seed(11)
                runs.append((model(x), state()))
            assert not model._instep_runner.serialization.serialize
    outputs = [output for output, _ in runs]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(torch.equal(after, runs[0][1]) for _, after in runs)
    parts = outputs[0].split(2)
    assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])


@engines
def test_each_replica_draws_from_its_seed(engine: str) -> None:
    seeds = CallerGenerator(torch.default_generator)
    with wrap(Runs(torch.rand_like), engine) as model:
        out = model(torch.zeros(4, 5))
    for index in range(2):
        stream = torch.Generator().manual_seed(seeds.seed(index))
        assert torch.equal(out[2 * index : 2 * index + 2], torch.rand(2, 5, generator=stream))


@engines
def test_the_callers_generator_advances_by_one_number(engine: str) -> None:
    torch.default_generator.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    expected = state()
    for count in (2, 3, 4):
        with wrap(Runs(lambda x: F.dropout(F.dropout(x))), engine, count) as model:
            torch.default_generator.manual_seed(5)
            model(torch.ones(12, 3))
            assert torch.equal(state(), expected)
            first = model(torch.ones(12, 30))
            assert not torch.equal(first, model(torch.ones(12, 30)))


@engines
def test_a_call_that_draws_nothing_moves_nothing(engine: str) -> None:
    def quiet(x: Tensor) -> Tensor:
        kept = torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            y = checkpoint(lambda z: z * 2, x, use_reentrant=False) + torch.rand(()) * 0
        torch.set_rng_state(kept)
        return y

    with wrap(Runs(quiet), engine) as model:
        before = state()
        model(torch.ones(4, 3, requires_grad=True)).sum().backward()
        assert torch.equal(state(), before)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(x) + torch.rand(x.shape, generator=self.generator)
        if bool((x == 7).any()):
            raise ValueError("seven")
        return y


@engines
def test_a_call_that_fails_leaves_every_generator_alone(engine: str) -> None:
    net = Fails()
    with wrap(net, engine) as model:
        before, held = state(), net.generator.get_state()
        with pytest.raises(ValueError, match="seven"):
            model(torch.tensor([[1.0], [2.0], [3.0], [7.0]]))
        assert torch.equal(state(), before)
        assert torch.equal(net.generator.get_state(), held)
        model(torch.ones(4, 1))
        assert not torch.equal(state(), before)


class Regions(nn.Module):
    """Many checkpointed regions of dropout, whose masks can be read off the output and off the gradient."""

    def __init__(self, regions: int, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.regions, self.options = regions, options

    def forward(self, x: Tensor) -> Tensor:
        drop = functools.partial(F.dropout, p=0.02)
        for _ in range(self.regions):
            x = checkpoint(lambda y: drop(y) * self.scale, x, **self.options)
        return x


@engines
@pytest.mark.parametrize("private", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpointing_recomputes_the_same_masks(engine: str, reentrant: bool, private: bool) -> None:
    regions = 60
    net = Regions(regions, use_reentrant=reentrant).double()
    x = torch.ones(6, 40, dtype=torch.float64, requires_grad=True)
    with wrap(net, engine, 3, private_copies=private) as model:
        for _ in range(3):
            out = model(x)
            x.grad = net.scale.grad = None
            between = state()
            out.sum().backward()
            # One mask wrong in one region, and a gradient would be zero where the output is not, or the reverse.
            torch.testing.assert_close(x.grad, out.detach())
            torch.testing.assert_close(net.scale.grad, regions * out.detach().sum())
            assert torch.equal(state(), between)
            assert 0.2 < float((out != 0).double().mean()) < 0.4
        assert not model._instep_runner.serialization.serialize


@engines
def test_checkpointing_without_the_state_draws_anew(engine: str) -> None:
    net = Regions(1, use_reentrant=False, preserve_rng_state=False)
    with wrap(net, engine) as model:
        x = torch.ones(4, 400, requires_grad=True)
        runs = []
        for _ in range(2):
            torch.default_generator.manual_seed(1)
            x.grad = None
            out = model(x)
            out.sum().backward()
            assert not torch.equal(x.grad, out)
            runs.append((out, x.grad.clone(), state()))
        for first, second in zip(*runs, strict=True):
            assert torch.equal(first, second)


@engines
def test_several_calls_before_a_backward_keep_their_streams_apart(engine: str) -> None:
    net = Regions(20, use_reentrant=False).double()
    with wrap(net, engine) as model:
        xs = [torch.ones(4, 50, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        outs = [model(x) for x in xs]
        sum(out.sum() for out in outs[::-1]).backward()
        for x, out in zip(xs, outs, strict=True):
            torch.testing.assert_close(x.grad, out.detach())
        assert not torch.equal(outs[0], outs[1])


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.rand_like(gradient)


def test_a_backward_that_is_the_first_to_draw() -> None:
    with wrap(Runs(DrawsInBackward.apply), "threads") as model:
        x = torch.ones(4, 5, requires_grad=True)
        before = state()
        out, other = model(x), model(x)
        assert torch.equal(state(), before)
        (first,) = torch.autograd.grad(out.sum(), x)
        assert not torch.equal(state(), before)
        (second,) = torch.autograd.grad(other.sum(), x)
        parts = [*first.split(2), *second.split(2)]
        assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
        torch.default_generator.set_state(before)
        (again,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(again, first)


@engines
def test_a_dropout_gradient_has_the_mask_of_its_output(engine: str) -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6, bias=False)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.eye(6))
    with wrap(net, engine, 3) as model:
        x = torch.ones(7, 6, dtype=torch.float64, requires_grad=True)
        out = model(x)
        out.sum().backward()
        torch.testing.assert_close(x.grad, out.detach())
        torch.testing.assert_close(net[1].weight.grad, out.detach().sum(0).expand(6, 6))


@engines
@pytest.mark.parametrize("seed", [torch.manual_seed, torch.random.manual_seed])
def test_a_seed_set_inside_forward_is_the_replicas_own(engine: str, seed: Callable[[int], Any]) -> None:
    def seeded(x: Tensor) -> Tensor:
        seed(42)
        assert torch.initial_seed() == 42
        return torch.rand(x.shape)

    with wrap(Runs(seeded), engine) as model:
        initial = torch.initial_seed()
        out = model(torch.zeros(4, 3))
        assert torch.equal(out[:2], torch.rand(2, 3, generator=torch.Generator().manual_seed(42)))
        assert torch.equal(out[:2], out[2:])
        assert torch.initial_seed() == initial


@engines
def test_a_state_set_inside_forward_is_the_replicas_own(engine: str) -> None:
    def twice(x: Tensor) -> Tensor:
        kept = torch.get_rng_state()
        first = torch.rand(x.shape)
        with torch.random.fork_rng(devices=[]):
            torch.rand(7)
        after = torch.rand(x.shape)
        torch.set_rng_state(kept)
        assert torch.equal(first, torch.rand(x.shape))
        assert torch.equal(after, torch.rand(x.shape))
        return first

    with wrap(Runs(twice), engine, 4) as model:
        for _ in range(5):
            out = model(torch.zeros(8, 3))
            assert len({tuple(row) for row in out.tolist()}) == 8


@engines
def test_a_seed_from_the_clock_moves_only_the_replica(engine: str) -> None:
    def clock(x: Tensor) -> Tensor:
        torch.seed()
        return x

    with wrap(Runs(clock), engine) as model:
        torch.default_generator.manual_seed(9)
        model(torch.zeros(4, 3))
        torch.empty((), dtype=torch.int64).random_()
        seen = state()
        torch.default_generator.manual_seed(9)
        torch.empty((), dtype=torch.int64).random_()
        torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(seen, state())
