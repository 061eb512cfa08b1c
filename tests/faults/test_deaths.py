"""Workers that die, raise, hang or are interrupted: the step is replayed exactly, or an error explains why not."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import WorkerFailure
from instep.runtime.process_role import inside_worker

from ..all_features import Net


class Fails(nn.Module):
    """Calls a function in forward or backward if a sample has a certain value."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.action = action

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().max() > 100:
            self.action()
        y: Tensor = self.layer(x)
        if x.detach().min() < -100:
            y.register_hook(lambda _: self.action())
        return y


def wrap(net: nn.Module, replicas: int = 2, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * replicas, engine="processes", hooks="per_replica", **options)


def pids(model: instep.DataParallel) -> list[int]:
    engine: Any = model._instep_engine
    return [engine._pool.get(index).pid for index in range(1, len(model._instep_devices))]


def kill_worker(pid: int) -> None:
    """Kill a worker, unless one that died before has been replaced since."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def batch(value: float = 0.0) -> Tensor:
    """Six samples. The last one, for the last replica, has the given value."""
    x = torch.randn(6, 4)
    x[-1, 0] = value or x[-1, 0]
    return x


def train(deaths: Iterator[str], steps: int) -> Net:
    torch.default_generator.manual_seed(0)
    net, choose = Net().double(), random.Random(0)
    with wrap(net, 3, merge={"penalty": "mean"}, restarts=10**6) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model(torch.randn(7, 4).double())
        for _ in range(steps):
            phase = next(deaths)
            kill = threading.Timer(0.004 * choose.random(), kill_worker, (choose.choice(pids(model)),))
            if phase == "forward":
                kill.start()
            out = model(torch.randn(7, 4).double())
            if phase == "between":
                kill.function(*kill.args)
            if phase == "backward":
                kill.start()
            optimizer.zero_grad()
            (out.square().mean() + 0.1 * model.penalty).backward()
            optimizer.step()
            if phase == "idle":
                kill.function(*kill.args)
            if kill.ident is not None:
                kill.join()
    return net


PHASES = ["forward", "between", "backward", "idle", "none"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(["none", "forward", "backward"], id="forward, backward"),
        pytest.param(random.Random(1).choices(PHASES, k=9), id="random", marks=pytest.mark.slow),
    ],
)
def test_kills_do_not_change_results(phases: list[str]) -> None:
    undisturbed = train(iter(lambda: "none", ""), len(phases))
    disturbed = train(iter(phases), len(phases))
    assert disturbed.steps == undisturbed.steps
    for (name, theirs), mine in zip(undisturbed.state_dict().items(), disturbed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.slow
def test_too_many_deaths_raise_worker_failure() -> None:
    net = Fails(lambda: os.kill(os.getpid(), signal.SIGKILL))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with wrap(net, restarts=1) as model:
        model(batch())
        start = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"replica 1 on cpu[\s\S]*SIGKILL[\s\S]*memory"):
            model(batch(200))
        assert time.monotonic() - start < 30  # two workers were started meanwhile
        x = batch()
        torch.testing.assert_close(model(x), net(x))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def _add(net: nn.Linear) -> None:
    with torch.no_grad():
        net.weight.add_(1)


def _add_without_version(net: nn.Linear) -> None:
    net.weight.data.add_(1)


def _step(net: nn.Linear) -> None:
    net.weight.grad = torch.ones_like(net.weight)
    torch.optim.SGD(net.parameters(), 0.5, fused=True).step()  # does not increase the version either
    net.weight.grad = None


@pytest.mark.slow
@pytest.mark.parametrize("change", [_add, _add_without_version, _step])
def test_a_death_after_the_weights_have_changed_is_an_error(change: Callable[[nn.Linear], None]) -> None:
    net = nn.Linear(4, 3)
    with wrap(net) as model:
        out = model(batch())
        change(net)
        os.kill(pids(model)[0], signal.SIGKILL)
        with pytest.raises((WorkerFailure, RuntimeError), match=r"weights.* changed since|modified by an inplace"):
            out.square().sum().backward()
        assert net.weight.grad is None
        x = batch()
        torch.testing.assert_close(model(x), net(x))


class Odd(Exception):
    """An exception that cannot be made from its arguments alone."""

    def __init__(self, text: str, *, code: int) -> None:
        super().__init__(text)
        self.code = code


def _raise() -> None:
    raise Odd("no luck", code=7)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("value", [200.0, -200.0], ids=["forward", "backward"])
def test_an_exception_keeps_its_type(value: float) -> None:
    with wrap(Fails(_raise)) as model:
        model(batch()).sum().backward()
        start = time.monotonic()
        with pytest.raises(Odd, match="no luck") as caught:
            model(batch(value)).sum().backward()
        assert time.monotonic() - start < 1
        assert caught.value.code == 7
        notes = "\n".join(getattr(caught.value, "__notes__", ()))
        assert "replica 1 on cpu" in notes
        assert "_raise" in notes  # the worker's own traceback
        x = batch()
        torch.testing.assert_close(model(x), model.module(x))


def _hang() -> None:
    if inside_worker():
        time.sleep(1000)


def test_a_hanging_worker_is_reported_with_its_stack_and_killed() -> None:
    with wrap(Fails(_hang), timeout=2) as model, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(batch())
        start = time.monotonic()
        with pytest.raises(WorkerFailure, match=r"replica 1 on cpu has not replied[\s\S]*_hang"):
            model(batch(200))
        assert time.monotonic() - start < 15
        assert any("_hang" in str(warning.message) for warning in said)
        x = batch()
        torch.testing.assert_close(model(x), model.module(x))


def _write(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


@pytest.mark.usefixtures("workers")
def test_a_parameter_written_by_a_worker_is_unchanged() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if inside_worker() and x.max() > 100:
                _write(self.layer)
            y: Tensor = self.layer(x)
            return y

    net = Writes()
    with wrap(net) as model:
        model(batch())
        before = net.layer.weight.detach().clone()
        with pytest.raises(instep.StateError, match=r"'layer\.weight'"):
            model(batch(200))
        assert torch.equal(net.layer.weight, before)
        x = batch()
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
def test_an_output_that_cannot_be_pickled_is_named() -> None:
    class Locked(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "lock": threading.Lock()}

    with wrap(Locked(), merge={"lock": "first"}) as model, pytest.raises(instep.EngineError, match=r"'lock'.*_thread"):
        model(batch())


@pytest.mark.usefixtures("workers")
def test_an_interruption_is_raised_at_once_and_later_calls_are_correct() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if inside_worker() and x.max() > 100:
                time.sleep(1.5)
            y: Tensor = self.layer(x)
            return y

    net = Slow()
    with wrap(net) as model:
        model(batch())
        threading.Timer(0.4, signal.raise_signal, (signal.SIGINT,)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model(batch(200))
        assert time.monotonic() - start < 1.2
        for _ in range(3):
            x = batch()
            torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("slow", [(0, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_interruption_does_not_wait_for_other_replicas(slow: tuple[int, ...]) -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.slow: tuple[int, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            if instep.replica().index in self.slow:
                time.sleep(3)
            y: Tensor = self.layer(x)
            return y

    net = Slow()
    with wrap(net, 3, probe=False) as model:
        model(batch())
        net.slow = slow
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        assert time.monotonic() - start < 2
        net.slow = ()
        x = batch()
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
def test_a_worker_that_receives_garbage_is_replaced() -> None:
    net = nn.Linear(4, 3)
    with wrap(net, restarts=5) as model:
        model(batch())
        engine: Any = model._instep_engine
        worker = engine._pool.get(1)
        worker.connection._sock.send(b"not a frame")
        x = batch()
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.usefixtures("workers")
def test_out_of_shared_memory_is_an_error_before_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.engines.processes.transport.shared_memory.available_memory", lambda: 1000)
    with wrap(nn.Linear(400, 300)) as model, pytest.raises(instep.EngineError, match=r"shared memory"):
        model(torch.randn(6, 400))
    monkeypatch.undo()
    net = nn.Linear(400, 300)
    with wrap(net) as model:
        x = torch.randn(6, 400)
        torch.testing.assert_close(model(x), net(x))
