"""The cost of a call of an almost empty module on worker processes and on threads, measured alternately."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import instep

ENGINES = "threads", "processes"


def one_call(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    start = time.perf_counter()
    output = model(x)
    middle = time.perf_counter()
    output.backward(output)
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(8, 4)
    models = {name: instep.DataParallel(nn.Linear(4, 4), ["cpu"] * 2, engine=name) for name in ENGINES}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
    for turn in range(arguments.rounds + 20):
        for name, model in models.items():
            elapsed = one_call(model, x)
            if turn >= 20:  # warm-up
                times[name].append(elapsed)
    print(f"{'':12}{'forward':>10}{'backward':>10}")
    for name, calls in times.items():
        forward, backward = (statistics.median(column) * 1e3 for column in zip(*calls, strict=True))
        print(f"{name:12}{forward:>7.2f} ms{backward:>7.2f} ms")
    for model in models.values():
        model.close()


if __name__ == "__main__":
    main()
