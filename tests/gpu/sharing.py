"""Helpers for worker processes that share a GPU.

With `private`, tensors are sent through host memory, as between two GPUs; otherwise by CUDA IPC.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

import instep

each_transport = pytest.mark.parametrize("private", [False, True], ids=["cuda-ipc", "private"])


def wrap(net: nn.Module, devices: Sequence[int | str], private: bool = False, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, devices, engine="processes", private_copies=private, **options)


def pids(model: instep.DataParallel) -> list[int]:
    engine: Any = model._instep_engine
    return [engine._pool.get(index).pid for index in range(1, len(model._instep_devices))]


def kill_worker(model: instep.DataParallel, index: int) -> None:
    """Kill the worker of a replica, and wait until it has ended: later requests are not sent to it."""
    engine: Any = model._instep_engine
    worker = engine._pool.get(index)
    os.kill(worker.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while worker.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not worker.is_alive()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 4))
