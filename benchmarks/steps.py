"""Times a training step. Each measurement ends when the device has finished all queued work."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_step(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    synchronize(x.device)
    start = time.perf_counter()
    output = model(x).sum()
    synchronize(x.device)
    middle = time.perf_counter()
    output.backward()
    synchronize(x.device)
    return middle - start, time.perf_counter() - middle
