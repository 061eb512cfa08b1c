"""Python's and NumPy's random numbers in workers."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.worker.rng import PythonRngMonitor


class Draws(nn.Module):
    """Adds random numbers of Python and NumPy; then kills the worker process if the flag says so."""

    def __init__(self, flag: str = "", first: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.flag = flag
        self.calls, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        drawn = [random.random(), np.random.rand()] if self.calls > self.first else [0.0, 0.0]
        if self.flag and instep.replica().index == 1 and os.path.exists(self.flag):
            os.remove(self.flag)
            os.kill(os.getpid(), signal.SIGKILL)
        return x + self.weight + torch.tensor(drawn)


def outputs(model: instep.DataParallel, count: int = 4) -> list[Tensor]:
    random.seed(3)
    np.random.seed(3)
    return [model(torch.zeros(3, 2)).detach() for _ in range(count)]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers_on_reused_workers() -> None:
    with instep.DataParallel(Draws(), ["cpu"] * 3, engine="processes", probe=False) as model:
        first = outputs(model)
        assert all(map(torch.equal, first, outputs(model)))
    numbers = torch.cat(first).flatten().tolist()
    assert len(set(numbers)) == len(numbers), "every replica and every call has its own"
    instep.shutdown()
    with instep.DataParallel(Draws(), ["cpu"] * 3, engine="processes", probe=False) as model:
        model(torch.zeros(3, 2))
        assert all(map(torch.equal, first, outputs(model)))


@pytest.mark.slow
def test_a_replacement_worker_draws_the_same_numbers(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with instep.DataParallel(Draws(str(flag)), ["cpu"] * 2, engine="processes", probe=False) as model:
        undisturbed = outputs(model)
        flag.touch()
        assert all(map(torch.equal, undisturbed, outputs(model)))
    assert not flag.exists()


def test_a_forward_that_begins_to_draw_later_is_detected() -> None:
    with instep.DataParallel(Draws(first=5), ["cpu"] * 2, engine="processes", probe=False) as model:
        outputs(model, 8)
        assert all(map(torch.equal, outputs(model), outputs(model)))


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_unused_generators_are_checked_ever_less_often(draw: object) -> None:
    monitor = PythonRngMonitor()
    checked = []
    for call in range(1, 40):
        before = monitor.begin_call()
        if before is not None:
            checked.append(call)
        monitor.end_call(before)
    assert checked == [1, 2, 3, 4, 8, 16, 32]
    for _ in range(40, 65):
        before = monitor.begin_call()
        assert callable(draw)
        draw()
        monitor.end_call(before)
    assert monitor.begin_call() is not None


def test_the_first_replica_uses_the_callers_generators() -> None:
    with instep.DataParallel(Draws(), ["cpu"] * 2, engine="processes", probe=False) as model:
        outputs(model, 2)
        after = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    alone = [(random.random(), np.random.rand()) for _ in range(3)]
    assert after == alone[2]
