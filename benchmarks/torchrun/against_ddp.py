"""Compares engine="torchrun" with DistributedDataParallel: the same ranks run both, alternately, on the CPU with Gloo.

Both train on the same global batch with one compute thread per rank. instep's loss is in the module (`with_loss`). Each
rank passes the whole batch to instep, and its half to DDP. The table shows medians over all rounds, and the time of one
exchange of headers.

The speed of a virtual machine changes within seconds, and a step of a small model takes a few milliseconds. So every
round runs all models, about equally long: the rounds of each of them are spread over the whole run. The side that
begins changes from round to round. The first step of a side in a round is not timed: its code and data are not in the
caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_comparison import (
    Attention,
    Case,
    conv_net,
    deeper_conv_net,
    images,
    lenet,
    loss_of,
    mlp,
    rows,
    seconds,
    step,
    tokens,
)
from torch import nn

import instep
from instep.engines.torchrun.channel import Message

CASES = {
    "MLP, width 4096, batch 32": Case(partial(mlp, 4096), partial(rows, 32, 4096)),
    "MLP, width 1024, batch 64": Case(partial(mlp, 1024), partial(rows, 64, 1024)),
    "transformer": Case(Attention, tokens),
    "conv net, batch 128": Case(conv_net, partial(images, 128)),
    "conv net, batch 32": Case(conv_net, images),
    "conv net, 5 layers, batch 32": Case(deeper_conv_net, images),
    "LeNet-5, batch 32": Case(lenet, images),
}

WARM_UP_STEPS = 40
"""After them the probe of instep runs no trial."""
MIN_STEPS = 5
"""The least number of steps of a side in a round."""


class Comparison:
    """One model on both sides, and the seconds per step of each, one entry per round."""

    def __init__(self, rank: int, count: int, case: Case) -> None:
        torch.manual_seed(0)
        x, y = case.sample(), torch.randint(32, (len(case.sample()),))
        own = slice(rank * len(x) // count, (rank + 1) * len(x) // count)
        ddp = nn.parallel.DistributedDataParallel(case.make())
        model = instep.DataParallel(instep.with_loss(case.make(), nn.CrossEntropyLoss()), engine="torchrun")
        optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (model, ddp)]
        self.sides: list[Callable[[], None]] = [
            partial(step, model, optimizers[0], x, y),
            partial(step, loss_of(ddp), optimizers[1], x[own], y[own]),
        ]
        """A step of instep, and one of DDP."""
        self.times: list[list[float]] = [[], []]
        self._steps = MIN_STEPS

    def warm_up(self, round_seconds: float) -> None:
        """Run steps that are not counted, and choose the number of steps of a round, the same on all ranks."""
        for side in self.sides:
            taken = [seconds(side, WARM_UP_STEPS // 2) for _ in range(2)]
        steps = [max(MIN_STEPS, round(round_seconds / taken[1]))]
        dist.broadcast_object_list(steps, 0)
        (self._steps,) = steps

    def run_round(self, number: int) -> None:
        """Run both sides, in an order that depends on the number of the round."""
        for side in (0, 1) if number % 2 else (1, 0):
            self.sides[side]()
            dist.barrier()
            self.times[side].append(seconds(self.sides[side], self._steps))

    def row(self) -> str:
        """The medians, and the median of the ratios of the rounds."""
        ours, theirs = self.times
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        return f"{statistics.median(ours) * 1e3:>9.2f} ms{statistics.median(theirs) * 1e3:>9.2f} ms{ratio:>14.2f}"


def header_microseconds(repeats: int = 500) -> float:
    """The median time of one exchange of headers between the ranks."""
    model = instep.DataParallel(nn.Linear(1, 1), engine="torchrun")
    channel = model._instep_engine.channel
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        channel.exchange(Message("a header"))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def work(rank: int, count: int, folder: str, names: list[str], rounds: int, round_seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    comparisons = {name: Comparison(rank, count, CASES[name]) for name in names}
    for comparison in comparisons.values():
        comparison.warm_up(round_seconds)
    for number in range(rounds):
        for comparison in comparisons.values():
            comparison.run_round(number)
    if rank == 0:
        print(f"{'':30}{'instep':>12}{'DDP':>12}{'DDP / instep':>14}")
        for name, comparison in comparisons.items():
            print(f"{name:30}{comparison.row()}")
    header = header_microseconds()
    if rank == 0:
        print(f"one exchange of headers: {header:.0f} µs")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="the time of one side in a round, if steps are short"
    )
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (arguments.ranks, folder, names, arguments.rounds, arguments.seconds), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
