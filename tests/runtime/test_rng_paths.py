"""Generators that a module holds or is given, modes and compiled code around a draw, and torch without streams."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import instep
from instep.call import runner
from instep.runtime import rng
from instep.runtime.rng import CallerRng, ReplicaRng, supports_thread_streams

ENGINES = ("serial", "threads", "processes")
engines = pytest.mark.parametrize("engine", ENGINES)


def wrap(net: nn.Module, engine: str, count: int = 2, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * count, engine=engine, **options)


def state() -> Tensor:
    return torch.default_generator.get_state()


class Holds(nn.Module):
    """Draws from a generator of its own, kept in one of several places."""

    def __init__(self, where: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        self.use = True
        self.where = where
        self.attribute: Any = generator
        if where == "list":
            self.attribute = [generator]
        elif where == "dict":
            self.attribute = {"noise": generator}
        elif where == "object":
            self.attribute = SimpleNamespace(generator=generator)
        elif where == "closure":
            self.attribute = lambda: generator
        elif where == "partial":
            self.attribute = functools.partial(torch.rand, generator=generator)

    def find(self) -> torch.Generator:
        held = self.attribute
        if self.where == "partial":
            return held.keywords["generator"]
        places = {
            "attribute": lambda: held,
            "list": lambda: held[0],
            "dict": lambda: held["noise"],
            "object": lambda: held.generator,
            "closure": lambda: held(),
        }
        return places[self.where]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.use:
            return x
        for _ in range(10):
            x = x + torch.rand(x.shape, generator=self.find())
        return x


@engines
@pytest.mark.parametrize("where", ["attribute", "list", "dict", "object", "closure", "partial"])
def test_each_replica_has_its_own_copy_of_a_generator_of_the_module(engine: str, where: str) -> None:
    net = Holds(where)
    source = net.find()
    runs, afters = [], []
    before = state()
    for count in (2, 2, 3, 4):
        source.manual_seed(1)
        with wrap(net, engine, count) as model:
            runs.append(model(torch.zeros(12, 3)))
            afters.append(source.get_state())
            parts = runs[-1].split(12 // count)
            assert not any(torch.equal(a, b) for i, a in enumerate(parts) for b in parts[:i])
            assert not torch.equal(model(torch.zeros(12, 3)), runs[-1])
            net.use = False
            unused = source.get_state()
            model(torch.zeros(12, 3))
            assert torch.equal(source.get_state(), unused)
            net.use = True
    assert torch.equal(runs[0], runs[1])
    assert all(torch.equal(after, afters[0]) for after in afters)
    assert torch.equal(state(), before)
    assert net.find() is source


class Fixed(Exception):
    """Something that is not copied: an exception cannot be made by `object.__new__`."""


def test_a_generator_in_what_cannot_be_copied_is_drawn_from_in_turn() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.box = Fixed()
            self.box.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                x = x + torch.rand(x.shape, generator=self.box.generator)
            return x

    net = Net()
    with wrap(net, "threads", 3) as model:
        runs = []
        for _ in range(3):
            net.box.generator.manual_seed(1)
            runs.append(model(torch.zeros(6, 4)))
        assert all(torch.equal(run, runs[0]) for run in runs)
        assert len({tuple(row) for row in runs[0].tolist()}) == 6


@pytest.mark.usefixtures("workers")
def test_a_generator_of_the_module_draws_the_same_on_every_engine() -> None:
    runs = []
    for engine in ENGINES:
        with wrap(Holds("attribute"), engine, 3) as model:
            runs.append(model(torch.zeros(6, 3)))
    assert all(torch.equal(run, runs[0]) for run in runs)


@engines
def test_a_generator_that_is_set_later_is_followed(engine: str) -> None:
    net = Holds("attribute")
    with wrap(net, engine) as model:
        model(torch.zeros(4, 3))
        runs = []
        for _ in range(5):
            net.attribute = torch.Generator().manual_seed(2)
            runs.append(model(torch.zeros(4, 3)))
        assert all(torch.equal(run, runs[0]) for run in runs)
        assert len(model._instep_replicas.replicas[0].cloner.generators) <= 2


class Given(nn.Module):
    def forward(self, x: Tensor, generator: Any = None) -> Tensor:
        if isinstance(generator, dict):
            generator = generator["noise"]
        if isinstance(generator, list):
            return torch.stack([torch.rand(row.shape, generator=mine) for row, mine in zip(x, generator, strict=True)])
        return torch.rand(x.shape, generator=generator)


@engines
@pytest.mark.parametrize("nested", [False, True])
def test_a_generator_that_is_given_is_each_replicas_own(engine: str, nested: bool) -> None:
    generator = torch.Generator()
    with wrap(Given(), engine, 3) as model:
        runs = []
        for _ in range(2):
            generator.manual_seed(5)
            runs.append(model(torch.zeros(6, 3), {"noise": generator} if nested else generator))
            assert not torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())
        assert torch.equal(*runs)
        assert len({tuple(row) for row in runs[0].tolist()}) == 6


@engines
def test_one_generator_per_sample(engine: str) -> None:
    def some() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(6)]

    with wrap(Given(), engine, 3) as model:
        mine, theirs = some(), some()
        for _ in range(2):
            assert torch.equal(model(torch.zeros(6, 3), mine), Given()(torch.zeros(6, 3), theirs))
        assert all(torch.equal(a.get_state(), b.get_state()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.usefixtures("workers")
def test_a_generator_of_the_module_and_of_the_arguments_is_one() -> None:
    net = Given()
    net.noise = torch.Generator()
    with (
        wrap(net, "processes", 3) as model,
        pytest.raises(instep.EngineError, match="an attribute of the module and also an argument"),
    ):
        model(torch.zeros(6, 3), net.noise)


class Names(nn.Module):
    """Draws from the default generator by name, which gives no stream to a thread."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand(x.shape, generator=torch.default_generator)


@pytest.mark.usefixtures("workers")
def test_the_default_generator_by_name_is_drawn_from_in_turn() -> None:
    runs = []
    for engine in ENGINES:
        with wrap(Names(), engine, 3) as model:
            for _ in range(3):
                torch.default_generator.manual_seed(6)
                runs.append(model(torch.zeros(6, 4)))
            assert model._instep_runner.serialization.serialize == (engine != "serial")
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert len({tuple(row) for row in runs[0].tolist()}) == 6


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UnderAMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with Counts():
            return F.dropout(x)


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mul.Tensor])
        for _ in range(10):
            x = checkpoint(lambda y: F.dropout(y * self.scale, 0.02), x, use_reentrant=False, context_fn=kept)
        return x


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", [UnderAMode, Selective])
def test_under_a_dispatch_mode_replicas_draw_the_same_in_turn(kind: type[nn.Module]) -> None:
    x = torch.ones(4, 50, requires_grad=True)
    runs = []
    for engine in ENGINES:
        with wrap(kind(), engine) as model:
            for _ in range(3):
                torch.default_generator.manual_seed(2)
                x.grad = None
                out = model(x)
                out.sum().backward()
                torch.testing.assert_close(x.grad, out.detach())
                runs.append(out)
    assert all(torch.equal(run, runs[0]) for run in runs)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: F.dropout(y * self.scale), F.dropout(x, 0.1), use_reentrant=False)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_draws_from_the_streams() -> None:
    x = torch.ones(4, 50, requires_grad=True)
    runs = []
    for engine in ENGINES:
        torch._dynamo.reset()
        with wrap(torch.compile(nn.Dropout(), backend="aot_eager"), engine) as model:
            for _ in range(3):
                torch.default_generator.manual_seed(2)
                x.grad = None
                out = model(x)
                out.sum().backward()
                assert torch.equal(x.grad, out)
                runs.append(out.detach())
            assert not model._instep_runner.serialization.serialize
    torch._dynamo.reset()
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert not torch.equal(runs[0][:2], runs[0][2:])


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch as it would be without the key that streams need."""
    for module in (rng, runner):
        monkeypatch.setattr(module, "supports_thread_streams", lambda: False)


@pytest.mark.usefixtures("no_streams", "workers")
def test_without_streams_replicas_that_draw_run_in_turn_and_draw_the_same() -> None:
    x = torch.ones(6, 50, requires_grad=True)
    runs = []
    for engine in ENGINES:
        with wrap(Drops(), engine, 3) as model:
            for _ in range(2):
                torch.default_generator.manual_seed(2)
                x.grad = None
                out = model(x)
                out.sum().backward()
                torch.testing.assert_close(x.grad * (out != 0), out.detach())
                runs.append((out.detach(), state()))
            assert model._instep_runner.serialization.serialize == (engine != "serial")
    assert all(torch.equal(out, runs[0][0]) and torch.equal(after, runs[0][1]) for out, after in runs)


def test_a_key_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(_: Any) -> None:
        raise RuntimeError("a kernel is already registered for this key")

    monkeypatch.setattr(rng, "register_rng_kernels", taken)
    assert rng._install_rng_kernels.__wrapped__() is False


@pytest.mark.usefixtures("workers")
def test_operations_that_take_a_generator_by_place_get_it_in_its_place() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.zeros_like(x)
            torch.ops.aten.rrelu_with_noise(-x, noise, training=True)
            torch.ops.aten._sample_dirichlet(x)
            return noise + torch.ops.aten.rrelu(-x, 0.1, 0.9, True)

    runs = []
    for engine in ENGINES:
        with wrap(Net(), engine) as model:
            torch.default_generator.manual_seed(2)
            runs.append(model(torch.ones(4, 5)))
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert len({tuple(row) for row in runs[0].tolist()}) == 4


def test_threads_can_draw_here() -> None:
    """So that the tests above are tests of streams; every torch that instep runs on has what they need."""
    assert supports_thread_streams()


def test_a_backward_for_all_replicas_draws_from_a_stream_of_its_thread() -> None:
    assert supports_thread_streams()
    host = torch.device("cpu")
    streams = ReplicaRng(CallerRng([host] * 2), [[], []], per_thread=True, serialized=False)
    before = state()
    with streams.joint_backward_context():
        kept = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(kept)
        assert torch.equal(first, torch.rand(3))
    assert torch.equal(state(), before)
    streams.advance()
    assert not torch.equal(state(), before)


def test_nothing_is_registered_before_it_is_needed() -> None:
    code = """
import torch, instep
from instep.runtime import torch_private
before = torch.random.default_generator is torch.default_generator and not torch_private._libraries
net = torch.nn.Dropout()
with instep.DataParallel(net, ["cpu"] * 2, engine="serial") as model:
    model(torch.ones(4, 3))
before = before and not torch_private._libraries
for _ in range(2):
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        model(torch.ones(4, 3))
print(before, len(torch_private._libraries))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["True", "2"], run.stderr


def test_the_callers_own_thread_draws_as_ever() -> None:
    assert supports_thread_streams()
    torch.manual_seed(3)
    first = torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(3)))
    with torch.random.fork_rng(devices=[]):
        inside = torch.rand(3)
    assert torch.equal(inside, torch.rand(3))
    assert torch.initial_seed() == 3
