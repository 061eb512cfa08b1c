"""Scripts that end during a call, while forked `DataLoader` workers hold inherited descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..exit_scripts import SECONDS, is_alive

FROM_TORCH = ("pymp-", "torch_")
"""Prefixes of files that `DataLoader` itself leaves when a script is killed."""

SCRIPT = """
import os, signal, sys, threading, time
import torch, instep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.slow = nn.Linear(4000, 30), False
    def forward(self, x):
        if self.slow:
            time.sleep(60)
        return self.layer(x)

def end(*_):
    if way == "error":
        raise RuntimeError("an error of the script")
    sys.exit(5)

way, net = sys.argv[1], Net()
model = instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False)
loader = DataLoader(TensorDataset(torch.randn(64, 4000)), batch_size=8, num_workers=2)
batches = iter(loader)
(x,) = next(batches)
model(x).sum().backward()
worker = model._instep_engine._pool.get(1).pid
print(worker, *(one.pid for one in batches._workers), flush=True)
net.slow = True
signal.signal(signal.SIGUSR2, end)
model(x)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm to look at")
def test_a_script_that_ends_in_a_call_leaves_nothing(tmp_path: Path) -> None:
    ways = {"error": signal.SIGUSR2, "exit": signal.SIGUSR2, "term": signal.SIGTERM, "kill": signal.SIGKILL}
    shared = set(os.listdir("/dev/shm"))
    environment = os.environ | {
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    scripts = {
        way: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, way],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for way in ways
    }
    loaders: list[int] = []
    try:
        for way, number in ways.items():
            process = scripts[way]
            assert process.stdout is not None
            worker, *others = map(int, process.stdout.readline().split())
            loaders += others
            time.sleep(0.5)  # until it is in the call
            assert is_alive(worker)
            process.send_signal(number)
            process.wait(20)
            deadline = time.monotonic() + SECONDS
            while is_alive(worker) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_alive(worker), way
        codes = {way: process.returncode for way, process in scripts.items()}
        assert codes == {"error": 1, "exit": 5, "term": -signal.SIGTERM, "kill": -signal.SIGKILL}
        left = [*os.listdir(tmp_path), *(set(os.listdir("/dev/shm")) - shared)]
        assert [name for name in left if not name.startswith(FROM_TORCH)] == []
    finally:
        for process in scripts.values():
            process.kill()
            process.communicate()
        for pid in loaders:  # they would exit by themselves some seconds later
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
