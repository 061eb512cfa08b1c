"""2000 calls of many kinds do not leak memory, tensors, file descriptors or threads, also not in workers."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.worker.server import MODULES_PER_GC

CALLS = 2000
MEBIBYTE = 2**20


class Mixed(nn.Module):
    """Has state, dropout, batch normalization and an output kept as an attribute; raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 3)
        self.penalty = torch.zeros(())
        self.calls = 0

    def forward(self, x: Tensor, names: list[str] | None = None, fail: bool = False) -> dict[str, Tensor | list[str]]:
        self.calls += 1
        h = self.body(x)
        self.penalty = h.square().mean()
        if fail:
            raise ZeroDivisionError("on request")
        out: dict[str, Tensor | list[str]] = {"out": self.head(h), "hidden": h}
        return out if names is None else {**out, "names": names}


class Usage(NamedTuple):
    """Resources of one process."""

    memory: int
    files: int
    threads: int


def usage(pid: int) -> Usage:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {word: int(rest.split()[0]) for word, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    resident = found["RssAnon"] + found["RssShmem"]  # without mapped files, whose pages the kernel may drop
    return Usage(resident * 1024, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


def tensors() -> int:
    gc.collect()
    return sum(1 for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter))


def pids(model: instep.DataParallel) -> list[int]:
    """The ids of this process and of the workers of a wrapper."""
    pool = getattr(model._instep_engine, "_pool", None)
    workers = [] if pool is None else [pool.get(index).pid for index in range(1, len(model._instep_devices))]
    return [os.getpid(), *workers]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_calls_do_not_leak_resources(engine: str) -> None:
    choose = random.Random(0)
    net = Mixed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    kept: list[object] = []
    with instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for call in range(CALLS):
            one_call(model, optimizer, choose, kept)
            if call in (CALLS // 4, CALLS - 1):
                kept.clear()
                count, usages = tensors(), list(map(usage, pids(model)))
            if call == CALLS // 4:
                before = count, usages
    assert count - before[0] < 20
    assert len(usages) == (3 if engine == "processes" else 1)
    for then, now in zip(before[1], usages, strict=True):
        assert now.threads <= then.threads  # fewer if a thread of an earlier test has ended
        # A worker frees this many modules at a time; each has four descriptors.
        assert now.files <= then.files + 4 * MODULES_PER_GC
        assert now.memory - then.memory < 24 * MEBIBYTE
    assert net.calls > CALLS // 2


def one_call(
    model: instep.DataParallel, optimizer: torch.optim.Optimizer, choose: random.Random, kept: list[object]
) -> None:
    size = choose.choice([2, 3, 4, 7, 12])
    x = torch.randn(size, 6)
    kind = choose.choice(["step", "step", "drop", "keep", "fail", "eval", "inference", "names", "misfit", "no_sync"])
    model.train(kind != "eval")
    if kind == "fail":
        with pytest.raises(ZeroDivisionError, match="on request"):
            model(x, fail=True)
    elif kind == "misfit":
        with pytest.raises(instep.StructureError):
            model(x, [torch.randn(size + 1, 2)])
    elif kind in ("eval", "inference"):
        with torch.inference_mode(kind == "inference"), torch.no_grad():
            model(x)
    elif kind == "no_sync":
        with model.no_sync():
            model(x)["out"].sum().backward()
    elif kind == "names":
        assert len(model(x, [f"{index}" for index in range(size)])["names"]) == size
    else:
        out = model(x)["out"]
        if kind == "step":
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
        elif kind == "keep":
            kept[:] = [*kept[-3:], out]
