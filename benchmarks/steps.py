"""A step of training, timed: its forward and its backward, each to the end of what it has queued on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_step(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    wait(x.device)
    start = time.perf_counter()
    output = model(x).sum()
    wait(x.device)
    middle = time.perf_counter()
    output.backward()
    wait(x.device)
    return middle - start, time.perf_counter() - middle
