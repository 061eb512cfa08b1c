"""Prepared calls give the same bits as the general path: outputs, gradients, state and random numbers."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.call.prepared import PreparedCalls, PreparedDispatch
from instep.engines.thread_pool import is_replica_thread

ENGINES = ("threads", "processes")
FACTOR = 1.0
"""A global that `Net.forward` reads."""


class Net(nn.Module):
    """Draws, keeps statistics, reads an attribute and a global, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.outer = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.scale = 1.0
        self.calls_kept = 0

    def forward(
        self, batch: dict[str, Any], gain: float = 1.0, *, fail: bool = False, keep: bool = False
    ) -> dict[str, Any]:
        hidden = self.drop(self.norm(self.inner(batch["x"].sum(1)).relu()))
        if fail:
            raise ArithmeticError("as requested")
        if keep:
            self.calls_kept += 1
        y = self.outer(hidden).tanh() * self.scale * FACTOR * gain
        return {"y": y, "scores": (y.sum(1), y.argmax(1)), "names": [name.upper() for name in batch["names"]]}


def make_batch(generator: random.Random, device: str, grad: bool = False) -> dict[str, Any]:
    size, length = generator.choice([4, 4, 4, 4, 5, 7]), generator.randint(1, 3)
    x = torch.randn(size, length, 4).to(device)
    return {"x": x.requires_grad_(grad), "names": [f"s{generator.randint(0, 99)}" for _ in range(size)]}


class Session:
    """A random sequence of calls and changes of one module, with a record of everything that can be seen."""

    def __init__(
        self, engine: str, seed: int, device: str = "cpu", batch_device: str = "", drop: float = 0.3, **options: Any
    ) -> None:
        self.generator, self.device, self.batch_device = random.Random(seed), device, batch_device or device
        torch.manual_seed(seed)
        self.net = Net().to(device)
        self.net.drop.p = drop
        self.model = instep.DataParallel(self.net, [device] * 2, engine=engine, **options)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        self.hooks: list[Any] = []
        self.record: list[Any] = []

    def see(self, *values: Any) -> None:
        self.record.extend(value.detach().clone() if isinstance(value, Tensor) else value for value in values)

    def see_all(self) -> None:
        """Record gradients, state and the state of the generator."""
        self.see(*(p.grad for p in self.net.parameters()), *self.net.state_dict().values(), torch.get_rng_state())
        self.see(self.net.calls_kept)
        if self.device != "cpu":
            self.see(torch.cuda.get_rng_state(self.device))

    def forward(self, **options: Any) -> Tensor:
        out = self.model(make_batch(self.generator, self.batch_device), **options)
        self.see(out["y"], *out["scores"], out["names"])
        return out["y"].square().mean() + out["scores"][0].mean()

    def step(self) -> None:
        self.forward().backward()
        self.see_all()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.generator.random() < 0.5)

    def accumulate(self) -> None:
        self.forward().backward()

    def two_forwards(self) -> None:
        first, second = self.forward(), self.forward()
        (second if self.generator.random() < 0.5 else first).backward()
        self.see_all()

    def both_backwards(self) -> None:
        first, second = self.forward(), self.forward()
        second.backward()
        first.backward()
        self.see_all()

    def retain_graph(self) -> None:
        loss = self.forward()
        loss.backward(retain_graph=True)
        loss.backward()
        self.see_all()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    def no_grad(self) -> None:
        with torch.no_grad():
            self.forward()

    def inference(self) -> None:
        with torch.inference_mode():
            self.forward()

    def autocast(self) -> None:
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            self.forward().backward()
        self.see_all()

    def switch_mode(self) -> None:
        self.model.train(not self.model.training)

    def other_gain(self) -> None:
        self.forward(gain=self.generator.choice([0.5, 2.0, 3.0])).backward()

    def freeze(self) -> None:
        for parameter in self.net.inner.parameters():
            parameter.requires_grad_(not parameter.requires_grad)

    def replace_layer(self) -> None:
        self.net.outer = nn.Linear(6, 3).to(self.device)

    def set_attribute(self) -> None:
        self.net.scale = self.generator.choice([0.5, 1.0, 2.0])

    def set_global(self) -> None:
        global FACTOR
        FACTOR = self.generator.choice([1.0, 1.5, 2.0])

    def toggle_hook(self) -> None:
        if self.hooks:
            self.hooks.pop().remove()
        else:
            self.hooks.append(self.net.inner.register_forward_hook(lambda *_: None))

    def fail(self) -> None:
        with pytest.raises(ArithmeticError, match="as requested"):
            self.forward(fail=True)
        self.see_all()

    def keep_state(self) -> None:
        self.forward(keep=True).backward()
        self.see_all()

    def input_gradient(self) -> None:
        batch = make_batch(self.generator, self.batch_device, grad=True)
        self.model(batch)["y"].sum().backward()
        self.see(batch["x"].grad)
        self.see_all()

    def write_weights(self) -> None:
        """A write between forward and backward raises as on one device."""
        loss = self.forward()
        with torch.no_grad():
            self.net.outer.weight.add_(0.125)
        try:
            loss.backward()
        except RuntimeError as error:
            self.see("modified by an inplace operation" in str(error))
        self.net.zero_grad()

    def write_input(self) -> None:
        batch = make_batch(self.generator, self.batch_device)
        y = self.model(batch)["y"]
        batch["x"].zero_()
        y.sum().backward()
        self.see_all()

    ACTIONS = (
        *[step] * 8,
        *[accumulate] * 2,
        two_forwards,
        both_backwards,
        retain_graph,
        no_grad,
        no_grad,
        inference,
        autocast,
        switch_mode,
        other_gain,
        freeze,
        replace_layer,
        set_attribute,
        set_global,
        toggle_hook,
        fail,
        keep_state,
        input_gradient,
        write_weights,
        write_input,
    )

    def run(self, count: int) -> list[Any]:
        global FACTOR
        FACTOR = 1.0
        with self.model, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(4):
                self.step()
            for _ in range(count):
                action = self.generator.choice(self.ACTIONS)
                self.see(action.__name__)
                action(self)
                for _ in range(2):
                    self.step()
        return self.record


@pytest.fixture
def count_prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of calls that a `PreparedDispatch` ran."""
    calls = [0]
    run = PreparedDispatch.run

    def counted(self: PreparedDispatch, *args: Any) -> Any:
        calls[0] += 1
        return run(self, *args)

    monkeypatch.setattr(PreparedDispatch, "run", counted)
    yield calls
    assert not is_replica_thread()


def run_both(
    engine: str, seed: int, count: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[Any], list[Any]]:
    monkeypatch.setattr(PreparedCalls, "enabled", True)
    prepared = Session(engine, seed, **options).run(count)
    monkeypatch.setattr(PreparedCalls, "enabled", False)
    return prepared, Session(engine, seed, **options).run(count)


def assert_same(prepared: list[Any], general: list[Any]) -> None:
    assert len(prepared) == len(general)
    last = ""
    for one, other in zip(prepared, general, strict=True):
        last = one if isinstance(one, str) else last
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor), last
            assert one.dtype == other.dtype, last
            assert torch.equal(one, other), last
        else:
            assert one == other, last


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(2))
def test_random_sequences(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch, count_prepared: list[int]) -> None:
    prepared, general = run_both(engine, seed, 16, monkeypatch)
    assert count_prepared[0] > 3
    assert_same(prepared, general)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(2, 12))
def test_longer_random_sequences(
    engine: str, seed: int, monkeypatch: pytest.MonkeyPatch, count_prepared: list[int]
) -> None:
    prepared, general = run_both(engine, seed, 60, monkeypatch)
    assert count_prepared[0] > 3
    assert_same(prepared, general)


@pytest.mark.parametrize("engine", ENGINES)
def test_third_call_is_prepared(engine: str, count_prepared: list[int]) -> None:
    net = nn.Linear(3, 2)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for call in range(5):
            x = torch.randn(4, 3)
            y = model(x)
            assert torch.equal(y, net(x))
            assert count_prepared[0] == max(0, call - 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_calls_in_autocast_are_prepared(engine: str, count_prepared: list[int]) -> None:
    net, losses = nn.Linear(3, 2), []
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for call in range(6):
            x = torch.randn(4, 3)
            with torch.autocast("cpu", torch.bfloat16, enabled=call % 2 == 0):
                y, expected = model(x), net(x)
            assert y.dtype is (torch.bfloat16 if call % 2 == 0 else torch.float32)
            assert torch.equal(y, expected)
            losses.append(y.float().sum())
    assert count_prepared[0] == 4
    sum(losses, torch.zeros(())).backward()
    assert net.weight.grad is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_unusual_results_of_a_prepared_forward(engine: str, count_prepared: list[int]) -> None:
    """A prepared forward that returns a parameter, its argument or a subclass is finished by the general path."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            y = x * self.weight
            if bool((x > 9).all()):
                return {"y": y, "weight": self.weight, "x": x}
            return {"y": y, "weight": y + 1, "x": y + 2}

    net = Returns()
    rules = {"weight": lambda parts, _: parts[0]}
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, merge=rules, probe=False) as model:
        for _ in range(3):
            model(torch.ones(4, 3))
        before = count_prepared[0]
        x = torch.full((4, 3), 10.0)
        out = model(x)
        assert count_prepared[0] == before + 1
        assert out["weight"] is net.weight
        assert torch.equal(out["x"], x)
        out["y"].sum().backward()
        assert torch.equal(net.weight.grad, torch.full((3,), 40.0))


@pytest.mark.parametrize("engine", ENGINES)
def test_arguments_and_replicas_are_freed(engine: str) -> None:
    """A prepared call keeps no argument alive, and replicas only as long as they are used."""
    net = nn.Linear(3, 2)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        for _ in range(4):
            model({"x": torch.randn(4, 3)}["x"])
        gc.collect()
        gc.disable()
        try:
            x = torch.randn(4, 3)
            dead = weakref.ref(x)
            model(x).sum().backward()
            del x
            assert dead() is None
        finally:
            gc.enable()
        old = weakref.ref(model._instep_replicas.replicas[1])
        model(torch.randn(6, 3))
        net.weight = nn.Parameter(torch.ones(2, 3))
        for _ in range(2):
            model(torch.randn(6, 3))
        gc.collect()
        assert old() is None
