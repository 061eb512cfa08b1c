"""The cost of a batch normalization layer in a step: the plain module and two replicas of each engine.

The network has many such layers. All sides run alternately in one process. Every number is a median over rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

import instep

sys.path.insert(0, str(Path(__file__).parents[1]))

from steps import one_step

Sides = dict[str, Callable[[Tensor], Tensor]]


def network(layers: int) -> nn.Module:
    blocks: list[nn.Module] = []
    for number in range(layers):
        blocks += [nn.Conv2d(8 if number else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--layers", type=int, default=20)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # sync_batchnorm=False warns
    torch.set_num_threads(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}, {arguments.layers} layers\n")
    x = torch.randn(8, 3, 16, 16, device=device)
    with ExitStack() as stack:
        sides: Sides = {"plain": network(arguments.layers).to(device)}
        for engine in ("threads", "processes"):
            for synced in (True, False):
                net = network(arguments.layers).to(device)
                options = {"engine": engine, "sync_batchnorm": synced}
                model = stack.enter_context(instep.DataParallel(net, [device] * 2, **options))
                sides[engine if synced else f"{engine}, each shard"] = model
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(arguments.rounds + 10):
            for name, model in sides.items():
                elapsed = one_step(model, x)
                if turn >= 10:  # warm-up
                    times[name].append(elapsed)
    print(f"{'':24}{'forward':>10}{'backward':>10}{'extra/layer':>14}")
    plain = 0.0
    for name, steps in times.items():
        forward, backward = (statistics.median(column) * 1e3 for column in zip(*steps, strict=True))
        plain = plain or forward + backward
        extra = (forward + backward - plain) / arguments.layers
        print(f"{name:24}{forward:>7.1f} ms{backward:>7.1f} ms{extra:>11.2f} ms")


if __name__ == "__main__":
    main()
