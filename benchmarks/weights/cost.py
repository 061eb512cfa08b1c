"""The extra cost of each parameter in a step, on replicas of each engine compared with the plain module.

Layers are tiny, so that only their number matters. All sides run alternately in one process. Medians over rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

import instep

sys.path.insert(0, str(Path(__file__).parents[1]))

from steps import one_step


def network(layers: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--replicas", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    count = arguments.replicas
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {count} replicas on {device}\n")
    x = torch.randn(2 * count, 4, device=device)
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        sides: dict[tuple[str, int], tuple[Callable[[Tensor], Tensor], nn.Module]] = {}
        for layers in (2, 100):
            net = network(layers, device)
            sides["plain", 2 * layers] = net, net
            for engine in ("threads", "processes"):
                net = network(layers, device)
                model = stack.enter_context(instep.DataParallel(net, [device] * count, engine=engine))
                sides[engine, 2 * layers] = model, net
        for turn in range(arguments.rounds + 10):
            for name, (run, net) in sides.items():
                net.zero_grad()
                elapsed = one_step(run, x)
                if turn >= 10:  # warm-up
                    times.setdefault(name, []).append(elapsed)
    print(f"{'':12}{'weights':>8}{'forward':>11}{'backward':>11}{'extra/weight':>16}")
    fewest: dict[str, float] = {}
    plain = 0.0
    for (name, weights), steps in times.items():
        forward, backward = (statistics.median(column) * 1e3 for column in zip(*steps, strict=True))
        extra = ""
        if name in fewest:
            each = (forward + backward - fewest[name]) / (weights - 4) * 1e3
            plain = each if name == "plain" else plain
            extra = f"{each - plain:>13.1f} us"
        fewest.setdefault(name, forward + backward)
        print(f"{name:12}{weights:>8}{forward:>8.2f} ms{backward:>8.2f} ms{extra}")


if __name__ == "__main__":
    main()
