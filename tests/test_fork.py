"""A process that forks: the child has none of the replica threads, and none of the locks that they held."""

from __future__ import annotations

import os
import signal
import threading
import time
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


def test_a_child_calls_with_threads_of_its_own() -> None:
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


def test_a_child_is_not_held_up_by_a_call_that_was_under_way() -> None:
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
