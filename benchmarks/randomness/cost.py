"""The cost of one random stream per replica thread on the CPU, and the time it saves for a module with dropout.

All sides run alternately in one process. Every number is a median over rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import instep
from instep.runtime.rng import CallerRng, ReplicaRng, supports_thread_streams

HOST = torch.device("cpu")


def alternate(sides: list[Callable[[], float]], rounds: int) -> list[float]:
    """The median time of each side. The first round is a warm-up."""
    results: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        pairs = list(zip(sides, results, strict=True))
        for side, times in pairs if turn % 2 else reversed(pairs):
            elapsed = side()
            if turn:
                times.append(elapsed)
    return [statistics.median(times) for times in results]


def timed(context: Callable[[], AbstractContextManager[Any]], work: Callable[[], Any], count: int) -> float:
    with context():
        start = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - start) / count


def operations(rounds: int) -> None:
    """Single operations with the default generator, and with the stream of a replica thread."""
    small, square = torch.zeros(16), torch.randn(64, 64)
    streams = ReplicaRng(CallerRng([HOST, HOST]), [[], []], per_thread=True, serialized=False)
    works: dict[str, Callable[[], Any]] = {
        "uniform_, 16 numbers": small.uniform_,
        "rand, 16 numbers": lambda: torch.rand(16),
        "dropout, 16 numbers": lambda: nn.functional.dropout(small),
        "dropout, 64 x 64": lambda: nn.functional.dropout(square),
        "add, 16 numbers": lambda: torch.add(small, 1.0),
        "matmul, 64 x 64": lambda: torch.mm(square, square),
    }
    print(f"{'operation':24}{'plain':>10}{'stream':>10}{'extra':>10}")
    for name, work in works.items():
        plain, ours = alternate(
            [
                lambda w=work: timed(nullcontext, w, 2000),
                lambda w=work: timed(lambda: streams.backward_context(0), w, 2000),
            ],  # type: ignore[misc]
            rounds,
        )
        print(f"{name:24}{plain * 1e6:7.2f} us{ours * 1e6:7.2f} us{(ours - plain) * 1e6:7.2f} us")


def encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def steps(rounds: int) -> None:
    """A training step of a transformer with dropout on two replicas: concurrent with streams, and serialized."""
    x = torch.randn(16, 64, 128)
    concurrent = instep.DataParallel(encoder(0.1), ["cpu"] * 2, engine="threads")
    serialized = instep.DataParallel(encoder(0.1), ["cpu"] * 2, engine="threads")
    serialized._instep_runner.serialization.serialize = True
    without = instep.DataParallel(encoder(0.0), ["cpu"] * 2, engine="threads")

    def step(model: nn.Module) -> float:
        start = time.perf_counter()
        model.zero_grad()
        model(x).square().mean().backward()
        return time.perf_counter() - start

    models = {"serialized": serialized, "streams": concurrent, "no dropout": without}
    times = alternate([lambda m=model: step(m) for model in models.values()], rounds)  # type: ignore[misc]
    base = times[0]
    print(f"\n{'a step of 4 layers':24}{'time':>12}{'serialized / this':>18}")
    for name, elapsed in zip(models, times, strict=True):
        print(f"{name:24}{elapsed * 1e3:9.2f} ms{base / elapsed:18.2f}")
    for model in (concurrent, serialized, without):
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    start = time.perf_counter()
    assert supports_thread_streams()
    print(f"registered once in a process in {(time.perf_counter() - start) * 1e3:.0f} ms\n")
    operations(rounds)
    steps(rounds)


if __name__ == "__main__":
    main()
