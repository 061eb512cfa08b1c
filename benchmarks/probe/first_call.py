"""The cost of the probe: the first call and later calls, with and without it.

Each first call uses a new wrapper around a new module. Both sides run alternately in one process. Every number is a
median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instep
from instep.probe.trial import TrialCall


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        scores = self.head(self.body(x).mean((2, 3)))
        return {"loss": F.cross_entropy(scores, target), "scores": scores}


class Language(nn.Module):
    """A transformer whose loss is a mean over tokens without padding."""

    def __init__(self, width: int = 128, layers: int = 4, words: int = 500) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), labels.flatten())


def mlp() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)), (torch.randn(32, 64),)


def wide() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)), (torch.randn(32, 1024),)


def conv() -> tuple[nn.Module, tuple[Any, ...]]:
    return Conv(), (torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))


def language() -> tuple[nn.Module, tuple[Any, ...]]:
    ids = torch.randint(1, 500, (32, 32))
    labels = ids.clone()
    for index in range(32):
        labels[index, 32 - index :] = -100
    return Language(), (ids, labels)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "MLP, 19 thousand weights": mlp,
    "MLP, 4 million weights": wide,
    "conv net": conv,
    "transformer, token mean": language,
}
RULES = {"mlp": {}, "wide": {}, "conv": {"loss": "mean"}, "language": {"*": "mean"}}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def first_and_later(make: Callable[[], Any], probe: bool, calls: int) -> tuple[float, float]:
    """Seconds of the first call of a new wrapper, and the median of later calls."""
    net, batch = make()
    # Without the probe, scalar losses need a rule. Any rule will do here.
    merge = "auto" if probe else RULES[make.__name__] or "auto"
    with instep.DataParallel(net, ["cpu"] * 2, probe=probe, merge=merge) as model, torch.no_grad():
        first = seconds(lambda: model(*batch))
        for _ in range(20):  # later trials, if the first one left verdicts undetermined
            model(*batch)
        later = statistics.median(seconds(lambda: model(*batch)) for _ in range(calls))
    return first, later


def probe_seconds(make: Callable[[], Any], rounds: int) -> float:
    """Seconds that a later call spends in the probe."""
    net, batch = make()
    with instep.DataParallel(net, ["cpu"] * 2) as model:
        for _ in range(20):
            model(*batch)
        binding = model._instep_runner.binding("forward")
        names, values = binding.bind(batch, {})
        plan = binding.planner.plan(names, values)
        call = TrialCall(net, torch.device("cpu"), plan, values, len(batch), lambda shard: shard)
        count = 500

        def prepare() -> None:
            for _ in range(count):
                binding.probe.prepare(call, 0)

        return statistics.median(seconds(prepare) / count for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{'':26}{'first call':>26}{'later calls':>26}")
    print(f"{'':26}{'with':>13}{'without':>13}{'with':>13}{'without':>13}")
    for name, make in MODELS.items():
        results: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for turn in range(options.rounds + 1):
            for probe in (True, False) if turn % 2 else (False, True):
                times = first_and_later(make, probe, options.calls)
                if turn:
                    results[probe].append(times)
        cells = [statistics.median(t[i] for t in results[probe]) * 1e3 for i in (0, 1) for probe in (True, False)]
        print(f"{name:26}" + "".join(f"{cell:10.2f} ms" for cell in cells))
    print(f"probe in a later call:             {probe_seconds(mlp, options.rounds) * 1e6:8.2f} us")
    print(f"with two possible label counts:   {probe_seconds(language, options.rounds) * 1e6:8.2f} us")


if __name__ == "__main__":
    main()
