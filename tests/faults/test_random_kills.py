"""Fifty workers are killed during training, at random points; the result is bitwise equal."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.runtime.process_role import inside_worker

IN_WORKER = ("before", "middle", "after", "backward")
"""Points at which a worker kills itself: in forward before, between and after collectives, and in backward."""
FROM_OUTSIDE = ("idle", "between", "starting")
"""Before a call; between forward and backward; before a call and while successors start."""

Deaths = dict[int, list[tuple[int, str, int]]]
"""By step: the replica, the point, and the number of kills in a row."""


class Doomed(nn.Module):
    """A module with dropout, batch norm and counters. A worker that finds its file kills itself at that point."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        self.die("before")
        h = self.drop(torch.relu(self.norm(self.first(x))))
        self.die("middle")
        self.mean = self.mean * 0.9 + 0.1 * instep.all_gather(h).detach().mean(0)
        if h.requires_grad:
            h.register_hook(lambda _: self.die("backward"))
        self.die("after")
        y: Tensor = self.last(h + 0.01 * self.mean)
        return y

    def die(self, point: str) -> None:
        if inside_worker():
            try:
                os.unlink(f"{self.folder}/{point}-{instep.replica().index}")
            except FileNotFoundError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def choose(replicas: int, kills: int, seed: int) -> Deaths:
    """Choose random points and replicas for a number of kills.

    Many of them hit workers that are starting, and many hit all workers at once: both cost little time.
    """
    draw, deaths, step = random.Random(seed), Deaths(), 0
    while kills:
        step += draw.choice([1, 1, 2])
        point = draw.choice((*IN_WORKER, *FROM_OUTSIDE, "starting", "starting"))
        doomed = range(1, replicas) if draw.random() < 0.7 else [draw.randrange(1, replicas)]
        for replica in doomed:
            times = min(kills, 1 + draw.randrange(2, 8) * (point == "starting"))
            if times:
                deaths.setdefault(step, []).append((replica, point, times))
                kills -= times
    return deaths


class Killer:
    """Kills the workers of a wrapper as planned, and counts the kills."""

    def __init__(self, model: instep.DataParallel, folder: Path, deaths: Deaths) -> None:
        self._pool = model._instep_engine._pool  # type: ignore[union-attr]
        self._folder, self._deaths = folder, deaths
        self._threads: list[threading.Thread] = []
        self.kills = 0

    def before(self, step: int) -> None:
        for replica, point, times in self._deaths.get(step, ()):
            if point in IN_WORKER:
                (self._folder / f"{point}-{replica}").touch()
                self.kills += 1
            elif point != "between":
                after = (replica, self._kill(replica), times - 1)
                self._threads.append(threading.Thread(target=self._kill_next, args=after))
                self._threads[-1].start()

    def between(self, step: int) -> None:
        for replica, point, _ in self._deaths.get(step, ()):
            if point == "between":
                self._kill(replica)

    def after(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not list(self._folder.iterdir()), "a worker did not reach its point"

    def _kill(self, replica: int) -> int:
        pid: int = self._pool.get(replica).pid
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        return pid

    def _kill_next(self, replica: int, pid: int, times: int) -> None:
        """Kill successors, each shortly after its start."""
        known, deadline = {pid}, time.monotonic() + 60
        while times and time.monotonic() < deadline:
            worker: Any = self._pool._acquired.get(replica)
            if worker is not None and worker.pid not in known and not worker.ready:
                known.add(worker.pid)
                time.sleep(0.05)
                os.kill(worker.pid, signal.SIGKILL)
                self.kills += 1
                times -= 1
            time.sleep(0.005)


def train(replicas: int, steps: int, folder: Path, deaths: Deaths) -> tuple[Doomed, int]:
    torch.default_generator.manual_seed(0)
    net = Doomed(folder).double()
    options: dict[str, Any] = {"engine": "processes", "hooks": "per_replica", "restarts": 10**6}
    with instep.DataParallel(net, ["cpu"] * replicas, **options) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        killer = Killer(model, folder, deaths)
        for step in range(steps):
            x = torch.randn(7, 4).double()
            killer.before(step)
            loss = model(x).square().mean()
            killer.between(step)
            optimizer.zero_grad()
            loss.backward()
            killer.after()
            optimizer.step()
    return net, killer.kills


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("workers", "one_core")
@pytest.mark.parametrize(("replicas", "kills", "seed"), [(2, 15, 389), (3, 35, 303)])
def test_kills_do_not_change_results(replicas: int, kills: int, seed: int, tmp_path: Path) -> None:
    deaths = choose(replicas, kills, seed)
    assert {point for doomed in deaths.values() for _, point, _ in doomed} == {*IN_WORKER, *FROM_OUTSIDE}
    steps = max(deaths) + 2
    undisturbed, none = train(replicas, steps, tmp_path, {})
    disturbed, done = train(replicas, steps, tmp_path, deaths)
    assert (none, done) == (0, kills)
    assert disturbed.steps == undisturbed.steps == steps
    for (name, theirs), mine in zip(undisturbed.state_dict().items(), disturbed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
