"""The overhead of instep: one replica against the bare module, the structure layer, and the detection of changes.

Both sides of a ratio run alternately in one process. Every number is a median over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import instep
from instep.replicas.replica_set import ReplicaSet
from instep.structure.merge import Merger
from instep.structure.plan import Planner
from instep.structure.split import apply_plan
from instep.structure.tree import tensors_in


def seconds(work: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def alternate(sides: list[Callable[[], Any]], rounds: int, count: int) -> list[list[float]]:
    """Seconds of each side per round, in alternating order. The first round is a warm-up."""
    results: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        pairs = list(zip(sides, results, strict=True))
        for side, times in pairs if turn % 2 else reversed(pairs):
            elapsed = seconds(side, count)
            if turn:
                times.append(elapsed)
    return results


def one_replica(rounds: int) -> None:
    """A training step of an encoder layer, without and with a wrapper on one device."""
    bare = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    wrapped = instep.DataParallel(bare, ["cpu"])
    x = torch.randn(8, 16, 64)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).sum().backward()

    ours, theirs = alternate([lambda: step(wrapped), lambda: step(bare)], rounds * 8, 10)
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    print(
        f"one replica / bare module        {ratio:8.3f}        ({statistics.median(theirs) * 1e6:.0f} us per bare step)"
    )


def nested_batch() -> dict[str, Any]:
    """Twenty leaves: seventeen tensors and three lists, three levels deep."""
    return {
        "views": [{"image": torch.randn(8, 4), "mask": torch.ones(8, 4), "names": list("abcdefgh")} for _ in range(3)],
        "text": {"ids": torch.ones(8, 6), "mask": torch.ones(8, 6), "more": (torch.ones(8), torch.ones(8))},
        "targets": {name: torch.ones(8, 2) for name in "tuvwxyz"},
    }


def structure_layer(rounds: int) -> None:
    """Plan, split and merge a nested batch for two replicas, with a cached plan."""
    batch = nested_batch()
    planner, merger = Planner(2), Merger.from_options()

    def split_and_merge() -> Any:
        plan = planner.plan(("batch",), (batch,))
        parts = apply_plan(plan, (batch,))
        return merger.merge([part[0] for part in parts], plan.sizes)

    tensors = list(tensors_in(batch))

    def torch_alone() -> None:
        for tensor in tensors:
            torch.cat(tensor.split_with_sizes([4, 4]))

    times, floor = alternate([split_and_merge, torch_alone], rounds * 5, 20)
    print(f"plan, split, merge, 20 leaves    {statistics.median(times) * 1e6:8.0f} us      ", end="")
    print(f"(best {min(times) * 1e6:.0f}; torch's own operations {statistics.median(floor) * 1e6:.0f})")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(9)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def change_detection(rounds: int, replicas: int, blocks: int) -> None:
    """The checks of every call: changes of the source module, and changes of the replicas by forward."""
    net = nn.Sequential(*[Block() for _ in range(blocks)])
    modules = len(list(net.modules()))
    replica_set = ReplicaSet(net, [torch.device("cpu")] * replicas)
    replica_set.sync()

    def check() -> None:
        replica_set.source_changes()
        for replica in replica_set.replicas:
            replica.changes()

    def call() -> None:
        replica_set.sync()
        for replica in replica_set.replicas:
            replica.changes()
        replica_set.written_parameters()

    checks, calls = alternate([check, call], rounds, 50)
    each = [statistics.median(times) / modules / replicas * 1e6 for times in (checks, calls)]
    print(f"changes, {modules:5} modules x {replicas}       {each[0]:8.2f} us      per module and replica", end="")
    print(f" ({each[1]:.2f} with write detection)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    one_replica(rounds)
    structure_layer(rounds)
    for replicas in (2, 4):
        change_detection(rounds, replicas, 13)
        change_detection(rounds, replicas, 91)
