"""Interruptions (Ctrl-C) at any moment of a call: the call ends, and its changes are complete or undone.

Python checks for signals where a Python function begins and where a C function has returned. These tests interrupt a
call at each of these points in the code of instep, in random order.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.collectives import group
from instep.engines import thread_pool
from instep.engines.thread_pool import is_replica_thread
from instep.runtime.locks import run_uninterrupted, start_thread
from instep.runtime.rng import thread_rng_state

# Python ignores an interruption inside a finalizer and reports it as unraisable.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ENGINES = ["serial", "threads"]
HERE = str(Path(instep.__file__).parent)
PLACES = (HERE, threading.__file__, os.path.join(os.path.dirname(os.__file__), "contextlib.py"))
GRAD = os.path.join(os.path.dirname(torch.__file__), "autograd", "grad_mode.py")
MODES = [torch.no_grad, torch.inference_mode, torch.set_grad_enabled]
SEED = int(os.environ.get("INSTEP_SEED", "0"))
SECONDS = float(os.environ.get("INSTEP_SECONDS", "2"))
"""How long one kind of call is interrupted again and again."""


class At:
    """Interrupts this thread at one of the places where a signal is seen; counts them until then."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith((*PLACES, GRAD)):
            self.count += 1
            if self.count == self.number:
                raise KeyboardInterrupt

    def run(self, work: Callable[[], object]) -> bool:
        """Whether the work was interrupted; it may have no other end but its own."""
        sys.setprofile(self)
        try:
            work()
            return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)


class Net(nn.Module):
    """Meets the other replicas, draws, and keeps state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.log.append(1)
        return self.drop(self.norm(self.layer(x)))


def surroundings() -> list[Any]:
    casts = [torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()]
    return [*modes, *casts, group.current_context(), thread_rng_state(), is_replica_thread()]


def is_answered(model: instep.DataParallel, net: nn.Module, x: Tensor) -> None:
    """The next call gives its own batch's answer, from another thread too."""
    net.eval()
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(model(x)), daemon=True)
    other.start()
    other.join(20)
    assert found, "a lock stayed taken"
    torch.testing.assert_close(found[0], net(x))
    net.train()


def left_over() -> list[str]:
    """The threads that are there; a test that failed before may have left some."""
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("instep-") and name != "instep-output"]  # that one is workers'


def places(total: int) -> Iterator[int]:
    """Places of a call that has so many of them, in no order, as long as there is time."""
    deadline = time.monotonic() + SECONDS
    for number in random.Random(SEED).sample(range(1, total + 1), total):
        if time.monotonic() > deadline:
            return
        yield number


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("calls", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_forward_can_be_interrupted_anywhere(engine: str, calls: int) -> None:
    torch.manual_seed(0)
    x, before, threads = torch.randn(7, 4), surroundings(), left_over()

    def interrupted(number: int) -> At:
        net = Net()
        with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
            for _ in range(calls):
                model(x)
            net.layer.weight.grad = torch.ones(8, 4)
            state, at = torch.get_rng_state(), At(number)
            hit = at.run(lambda: model(x))
            assert surroundings() == before
            assert len(net.log) == net.count == net.norm.num_batches_tracked
            assert len(net.log) in ((calls, calls + 1) if hit else (calls + 1,))
            assert len(net.log) > calls or torch.equal(torch.get_rng_state(), state)
            assert torch.equal(net.layer.weight.grad, torch.ones(8, 4))
            assert net.drop.training
            is_answered(model, net, x)
        return at

    for number in places(interrupted(0).count):
        interrupted(number)
    assert left_over() == threads


@pytest.mark.parametrize("work", ["forward", "backward"])
def test_a_prepared_call_can_be_interrupted_anywhere(work: str) -> None:
    torch.manual_seed(0)
    x, before, threads = torch.randn(7, 4, dtype=torch.float64), surroundings(), left_over()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    net(x).square().sum().backward()
    expected = net[0].weight.grad
    net.zero_grad()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:

        def interrupted(number: int) -> At:
            for _ in range(3):  # an interrupted call discards the replicas
                loss = model(x).square().sum()
            at = At(number)
            at.run((lambda: model(x)) if work == "forward" else loss.backward)
            assert surroundings() == before
            net.zero_grad()
            model(x).square().sum().backward()
            torch.testing.assert_close(net[0].weight.grad, expected)
            is_answered(model, net, x)
            return at

        for number in places(interrupted(0).count):
            interrupted(number)
    assert left_over() == threads


def test_backward_can_be_interrupted_anywhere() -> None:
    torch.manual_seed(0)
    x, before, threads = torch.randn(7, 4, dtype=torch.float64), surroundings(), left_over()
    net = Net().double()
    net.drop.p = 0.0
    net(x).square().sum().backward()
    expected = net.layer.weight.grad
    net.zero_grad()
    with instep.DataParallel(net, ["cpu"] * 3, engine="threads") as model:

        def interrupted(number: int) -> At:
            loss, at = model(x).square().sum(), At(number)
            at.run(loss.backward)
            assert surroundings() == before
            net.zero_grad()
            model(x).square().sum().backward()
            torch.testing.assert_close(net.layer.weight.grad, expected)
            net.zero_grad()
            return at

        for number in places(interrupted(0).count):
            interrupted(number)
        is_answered(model, net, x)
    assert left_over() == threads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.set_grad_enabled], ids=lambda m: m.__name__
)
def test_an_interruption_while_entering_a_grad_mode(mode: Any, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are on afterwards, also when the interruption is forgotten and all that it held on to goes."""
    enter = mode.__enter__
    for number in range(1, 40):
        count = 0

        def interrupted(self: Any, number: int = number) -> None:
            nonlocal count
            enter(self)
            if threading.current_thread() is threading.main_thread():
                count += 1
                if count == number:
                    raise KeyboardInterrupt

        with instep.DataParallel(Net(), ["cpu"] * 2, engine=engine) as model, monkeypatch.context() as patch:
            patch.setattr(mode, "__enter__", interrupted)
            try:
                model(torch.randn(6, 4))
                break
            except KeyboardInterrupt:
                assert torch.is_grad_enabled()
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()


class Slow(nn.Module):
    """Notes its calls; waits for a moment before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.log, self.seconds = nn.Linear(4, 3), [], 0.4

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        self.log.append("step")
        return self.layer(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_that_finish_after_an_interruption_are_rolled_back_at_the_next_call(engine: str) -> None:
    net = Slow()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, probe=False) as model:
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, 4))
        timer.join()
        assert net.log == []
        net.seconds = 0.0
        x = torch.randn(6, 4)
        torch.testing.assert_close(model(x), net.layer(x))
        assert net.log == ["step"]


def test_replicas_that_finish_after_an_interruption_are_rolled_back() -> None:
    net = Slow()
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", probe=False) as model:
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, 4))
        timer.join()
        time.sleep(0.6)
        assert net.log == []


def test_a_forward_that_does_not_return_after_an_interruption_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "_INTERRUPTED_CALL_TIMEOUT", 0.1)
    net = Slow()
    net.seconds = 0.6
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads", probe=False) as model:
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, 4))
        timer.join()
        with pytest.raises(instep.InstepError, match="still runs on a replica"):
            model(torch.randn(6, 4))
        time.sleep(0.6)
        net.seconds = 0.0
        assert model(torch.randn(6, 4)).shape == (6, 3)
        assert net.log == ["step"]


def test_run_uninterrupted_runs_every_step() -> None:
    taken: list[int] = []

    def interrupted_once() -> None:
        if 1 not in taken:
            taken.append(1)
            raise KeyboardInterrupt
        taken.append(2)

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(KeyboardInterrupt):
        run_uninterrupted(interrupted_once, lambda: taken.append(3))
    assert taken == [1, 2, 3]
    with pytest.raises(ValueError, match="no"):
        run_uninterrupted(fails, lambda: taken.append(4))
    assert taken == [1, 2, 3, 4]


def test_start_thread_raises_the_interruption_instead_of_a_lock_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: threading.Thread) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_thread(threading.Thread())


def test_a_replica_whose_thread_never_starts_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name.startswith("instep-task"):
            monkeypatch.undo()
            raise KeyboardInterrupt
        begin(self)

    net, x = Net().eval(), torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 3, engine="serial") as model:
        model.train()(x)
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        assert len(net.log) == 1
        is_answered(model, net, x)
