"""Calls in forked children, which have no replica threads and no workers."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import instep

if not hasattr(os, "fork"):
    pytest.skip("this system has no fork", allow_module_level=True)

# Python warns of a fork beside threads; that is what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def in_child(work: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether a forked child says yes; one that hangs is ended."""
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.set_num_threads(1)  # the child has no OpenMP threads either
            status = 0 if work() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


class Waits(nn.Module):
    """Stands still inside forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.entered, self.go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.entered.set()
        assert self.go.wait(30)
        return self.layer(x)


def test_a_forked_child_starts_its_own_threads() -> None:
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        expected = model(x).detach()

        def work() -> bool:
            loss = model(x)
            loss.sum().backward()
            return torch.equal(loss, expected) and net.weight.grad is not None

        assert in_child(work)
        assert net.weight.grad is None
        assert torch.equal(model(x), expected)


def test_a_child_forked_during_a_call_does_not_deadlock() -> None:
    net, x = Waits(), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
        answers: list[Tensor] = []
        caller = threading.Thread(target=lambda: answers.append(model(x)))
        caller.start()
        try:
            assert net.entered.wait(30)

            def work() -> bool:
                net.go.set()
                return torch.allclose(model(x), net.layer(x))

            assert in_child(work)
        finally:
            net.go.set()
            caller.join()
        assert torch.allclose(answers[0], net.layer(x))


class Tied(nn.Module):
    """Two layers with one weight, and two buffers that are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        both = torch.ones(8)
        self.register_buffer("scale", both[:4])
        self.register_buffer("shift", both[4:])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))) * self.scale + self.shift


def change(net: nn.Module, factor: float) -> None:
    """Write to all weights and buffers, but for the count of batches."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(factor).add_(0.1)


def trains_like_the_module(model: instep.DataParallel, x: Tensor) -> bool:
    """Whether outputs, gradients and weights are those of the plain module, over several steps."""
    plain = copy.deepcopy(model.module)
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in (model.module, plain)]
    for _ in range(3):
        outputs = [net(x) for net in (model, plain)]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.pow(2).mean().backward()
        mine, theirs = ([p.grad for p in net.parameters()] for net in (model.module, plain))
        torch.testing.assert_close((outputs[0], mine), (outputs[1], theirs))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(model.module.state_dict(), plain.state_dict())
    return True


@pytest.mark.parametrize(
    "anew",
    [pytest.param(False, id="the same wrapper"), pytest.param(True, id="wrapped anew", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("one_core", "workers")
@pytest.mark.slow
def test_workers_of_a_forked_child_read_the_weights_of_the_child(anew: bool) -> None:
    net, x = Tied().double(), torch.randn(6, 4, dtype=torch.float64)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        output = model(x).sum()
        held = net.first.weight.detach()[1:]
        state = copy.deepcopy(net.state_dict())

        def work() -> bool:
            mine = instep.DataParallel(net, ["cpu"] * 2, engine="processes") if anew else model
            if not anew:
                output.backward()  # of a forward that workers of the parent did
            change(net, 1.5)
            good = trains_like_the_module(mine, x) and torch.equal(held, net.first.weight[1:])
            before = copy.deepcopy(net.state_dict())

            def work_again() -> bool:
                change(net, 0.5)
                return trains_like_the_module(mine, x)

            good = good and in_child(work_again, 60.0)
            torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
            return good and trains_like_the_module(mine, x)

        assert in_child(work, 120.0)
        torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
        assert trains_like_the_module(model, x)
