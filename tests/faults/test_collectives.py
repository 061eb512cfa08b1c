"""Deaths, delays and interruptions of worker processes in calls with collectives."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes import engine as engine_module
from instep.engines.processes.controller.requests import RetryingRequest
from instep.engines.processes.lifecycle.process import WorkerProcess

pytestmark = pytest.mark.usefixtures("workers")


def worker_of(model: instep.DataParallel, index: int) -> WorkerProcess:
    engine: Any = model._instep_engine
    worker: WorkerProcess = engine._pool.get(index)
    return worker


class InBackward(torch.autograd.Function):
    """The identity; calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, action: Any) -> Tensor:
        ctx.action = action
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.action()
        return gradient, None


class Deep(nn.Module):
    """Three collectives, and weights large enough for their gradients to be signalled by the doorbell."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(300, 300) for _ in range(3))
        self.mark = mark
        """Holds the pid of a worker to kill in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = InBackward.apply(self.a(x), self.after_last_collective)
        x = x - instep.all_reduce(x.mean(0), "mean")
        x = InBackward.apply(x, self.before_last_collective)
        x = torch.tanh(self.b(x))
        x = x - instep.all_reduce(x.mean(0), "mean")
        x = torch.tanh(self.c(x))
        return x - instep.all_reduce(x.mean(0), "mean")

    def before_last_collective(self) -> None:
        if self.mark.exists() and instep.replica().index == 0:
            time.sleep(0.7)  # until the others have reached it
            os.kill(int(self.mark.read_text()), signal.SIGKILL)
            time.sleep(0.2)

    def after_last_collective(self) -> None:
        if self.mark.exists() and instep.replica().index == 2:
            time.sleep(2)


@pytest.mark.slow
def test_a_death_in_a_backward_collective_changes_no_gradient(wrap: Any, tmp_path: Path) -> None:
    """Chunks that the dead worker signalled must not be read from its successor's slots."""
    net = Deep(tmp_path / "mark")
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(12, 300)
    for _ in range(2):
        net.zero_grad()
        model(x).pow(3).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    loss = model(x).pow(3).sum()
    victim = worker_of(model, 1).pid
    net.mark.write_text(str(victim))
    loss.backward()
    net.mark.unlink()
    assert worker_of(model, 1).pid != victim
    assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))


class Timed(nn.Module):
    """Sleeps before its two collectives, differently in each replica."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.first: dict[int, float] = {}
        self.second: dict[int, float] = {}
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        index = instep.replica().index
        y: Tensor = self.layer(x)
        if self.fails and not index:
            raise KeyError("no luck")
        for seconds in (self.first, self.second):
            time.sleep(seconds.get(index, 0))
            try:
                y = y - instep.all_reduce(y.mean(0), "mean")
            except instep.CollectiveError:  # as some programs do
                continue
        return y


def check(model: instep.DataParallel, x: Tensor) -> None:
    y = model.module.layer(x)
    torch.testing.assert_close(model(x), y - y.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_only_the_dead_worker_is_replaced(wrap: Any) -> None:
    """The thread that receives for several workers must not confuse them."""
    net = Timed()
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(7, 4)
    check(model, x)
    before = [worker_of(model, index).pid for index in (1, 2)]
    net.first = {1: 1.5, 2: 1.5}
    threading.Timer(0.3, os.kill, (before[1], signal.SIGKILL)).start()
    check(model, x)
    after = [worker_of(model, index).pid for index in (1, 2)]
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.slow
def test_waiting_for_another_replica_does_not_count_as_stuck(wrap: Any) -> None:
    net = Timed()
    model = wrap(net, 3, engine="processes", probe=False, timeout=2)
    x = torch.randn(7, 4)
    check(model, x)
    net.first, net.second = {2: 0.9}, {1: 0.9, 2: 0.9}  # worker 1 waits 1.8 s between collectives
    check(model, x)


def test_a_forward_that_catches_collective_errors_does_not_block_the_worker(wrap: Any) -> None:
    net = Timed()
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(7, 4)
    check(model, x)
    net.fails, net.first = True, {1: 1.0, 2: 1.0}
    with pytest.raises(KeyError, match="no luck") as kept:
        model(x)
    net.fails, net.first = False, {}
    start = time.monotonic()
    check(model, x)
    assert time.monotonic() - start < 10
    del kept


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.slow
def test_an_interruption_while_requests_are_sent(wrap: Any, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    model = wrap(net, 3, engine="processes", probe=False)
    x = torch.randn(7, 4).double()
    model(x).sum().backward()

    class Interrupted(RetryingRequest[Any]):
        def send(self, request: Any, *, replace_at_once: bool = False) -> None:
            if self._index < 2 or moment == "after":
                super().send(request, replace_at_once=replace_at_once)
            if self._index == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "RetryingRequest", Interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:  # as an interactive prompt keeps it
        model(x)
    monkeypatch.undo()
    start = time.monotonic()
    running = [buffer.clone() for buffer in net.buffers()]
    out = model(x)
    assert time.monotonic() - start < 10
    for buffer, then in zip(net.buffers(), running, strict=True):
        buffer.copy_(then)
    torch.testing.assert_close(out, net(x))
    del kept
