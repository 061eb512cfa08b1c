"""Compares instep with DistributedDataParallel on two Gloo processes, on the CPU.

Both train on the same global batch with one compute thread per replica. Rank 0 of DDP also runs instep, alternating
with DDP, so that both see the same load of the machine. The table shows medians over all rounds.

The speed of a virtual machine changes within seconds, and a step of a small model takes a few milliseconds. Therefore
each round runs all models, each side for about `--seconds` (at least five steps), and the measurements of each model
are spread over the whole run. The side that runs first alternates. The first step of a side in a round is not timed,
because its code and data are not in the CPU caches.

DDP has its default options. With `--bucket-view` its gradients are views of its buckets
(`gradient_as_bucket_view=True`), which saves it a copy of all gradients.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # some of torch's Arm kernels ignore torch.set_num_threads

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import instep


class Attention(nn.Module):
    """A four-layer transformer encoder that classifies 64 tokens into 32 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)).mean(1))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 32),
    )


def lenet() -> nn.Module:
    """LeNet-5 for color images, with ReLU."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 32),
    )


def deeper_conv_net() -> nn.Module:
    """Three convolutions and two dense layers, as in tutorials on small color images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
    )


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))


class Case(NamedTuple):
    """A model and its batch. `with_loss`: compute the loss on the replicas."""

    make: Callable[[], nn.Module]
    sample: Callable[[], Tensor]
    with_loss: bool = False


def tokens() -> Tensor:
    return torch.randint(512, (32, 64))


def images(count: int = 32) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width)


Loss = Callable[[Tensor, Tensor], Tensor]


def loss_of(model: nn.Module) -> Loss:
    return lambda x, y: nn.functional.cross_entropy(model(x), y)


def step(loss: Loss, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss(x, y).backward()
    optimizer.step()


def seconds(work: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


WARM_UP_STEPS = 40
"""After this many steps the probe of instep runs no more trials."""
MIN_STEPS = 5
"""The least number of steps of a side in a round."""


class Comparison:
    """One model on both sides, and the seconds per step of each, one entry per round."""

    def __init__(self, ours: Callable[[], None], theirs: Callable[[], None]) -> None:
        """`ours` runs a step of instep, and does nothing on ranks without it; `theirs` runs one of DDP."""
        self.sides = (ours, theirs)
        self.times: tuple[list[float], list[float]] = ([], [])
        """Of instep and of DDP."""
        self._steps = MIN_STEPS

    def warm_up(self, round_seconds: float) -> None:
        """Run steps that are not counted, and choose the number of steps of a round, the same on all ranks."""
        for side in self.sides:
            seconds(side, WARM_UP_STEPS // 2)
            step_seconds = seconds(side, WARM_UP_STEPS // 2)  # in the end DDP's, which all ranks run
        steps = [max(MIN_STEPS, round(round_seconds / step_seconds))]
        dist.broadcast_object_list(steps, 0)
        (self._steps,) = steps

    def run_round(self, number: int) -> None:
        """Run both sides, in an order that depends on the number of the round."""
        for side in (0, 1) if number % 2 else (1, 0):
            self.sides[side]()
            dist.barrier()
            self.times[side].append(seconds(self.sides[side], self._steps))
            dist.barrier()

    def medians(self) -> tuple[float, float, float]:
        """The milliseconds per step of instep and of DDP, and the median of the ratios of the rounds."""
        ours, theirs = self.times
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        return statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3, ratio


def run_rounds(comparisons: Mapping[str, Comparison], rounds: int, round_seconds: float) -> None:
    """Run all comparisons, in rounds."""
    for comparison in comparisons.values():
        comparison.warm_up(round_seconds)
    for number in range(rounds):
        for comparison in comparisons.values():
            comparison.run_round(number)


def bytes_moved(model: instep.DataParallel, work: Callable[[], None], x: Tensor, y: Tensor, with_loss: bool) -> str:
    """The megabytes that a step sends to and from the worker, and the minimum.

    The minimum is half of the batch, the worker's part of the output and its gradient, and each weight's gradient once.
    """
    connection = model._instep_engine._pool.get(1).connection
    before = connection.bytes_transferred
    work()
    weights = sum(p.nbytes for p in model.parameters())  # their gradients are in shared memory
    moved = connection.bytes_transferred - before + weights
    with torch.no_grad():
        output = model(x, y) if with_loss else model(x)
    batch = x.nbytes + y.nbytes if with_loss else x.nbytes
    result = output.nbytes if with_loss else output.nbytes // 2
    return f"{moved / 1e6:>10.3f}{(batch // 2 + 2 * result + weights) / 1e6:>10.3f}"


def run_nothing() -> None:
    """Do nothing: the step of instep on a rank that does not run it."""


class CaseRun:
    """One case on this rank: DDP, and on rank 0 also instep."""

    def __init__(self, rank: int, case: Case, engine: str, stack: ExitStack, *, bucket_view: bool) -> None:
        torch.manual_seed(0)
        x, y = case.sample(), torch.randint(32, (len(case.sample()),))
        shard = slice(rank * (len(x) // 2), (rank + 1) * (len(x) // 2))
        ddp = nn.parallel.DistributedDataParallel(case.make(), gradient_as_bucket_view=bucket_view)
        ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        theirs = partial(step, loss_of(ddp), ddp_optimizer, x[shard], y[shard])
        ours: Callable[[], None] = run_nothing
        self.bytes_moved: Callable[[], str] = lambda: ""
        if rank == 0:
            net = instep.with_loss(case.make(), nn.CrossEntropyLoss()) if case.with_loss else case.make()
            model = stack.enter_context(instep.DataParallel(net, ["cpu"] * 2, engine=engine))
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
            ours = partial(step, model if case.with_loss else loss_of(model), optimizer, x, y)
            if engine == "processes":
                self.bytes_moved = partial(bytes_moved, model, ours, x, y, case.with_loss)
        self.comparison = Comparison(ours, theirs)


def work(rank: int, folder: str, cases: Mapping[str, Case], engine: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with ExitStack() as stack:
        runs = {
            name: CaseRun(rank, case, engine, stack, bucket_view=options.bucket_view) for name, case in cases.items()
        }
        run_rounds({name: run.comparison for name, run in runs.items()}, options.rounds, options.seconds)
        if rank == 0:
            bytes_columns = f"{'MB moved':>10}{'fewest':>10}" if engine == "processes" else ""
            print(f"{'':28}{'instep':>12}{'DDP':>12}{'instep / DDP':>14}{'DDP / instep':>14}{bytes_columns}")
            for name, run in runs.items():
                ours, theirs, ratio = run.comparison.medians()
                times = f"{ours:>9.2f} ms{theirs:>9.2f} ms{1 / ratio:>14.2f}{ratio:>14.2f}"
                print(f"{name:28}{times}{run.bytes_moved()}", flush=True)
    dist.destroy_process_group()


def make_parser(rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="for how long each side runs in a round, at least five steps"
    )
    parser.add_argument("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    return parser


def main(cases: Mapping[str, Case], engine: str, rounds: int) -> None:
    """Compare all cases, with the options of the command line."""
    options = make_parser(rounds).parse_args()
    cases = {name: case for name, case in cases.items() if options.only in name}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, cases, engine, options), nprocs=2)
