"""Compares instep with DistributedDataParallel on two Gloo processes, on the CPU.

Both train on the same global batch with one compute thread per replica. Rank 0 of DDP also runs instep, alternating
with DDP, so that both see the same load of the machine. The table shows medians over all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
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


class Timings(NamedTuple):
    """The results of one comparison."""

    ours: list[float]
    """Seconds per step of instep, one entry per round."""
    theirs: list[float]
    """Seconds per step of DDP, one entry per round."""
    moved: str
    """With engine="processes": the megabytes that a step sends between processes, and the minimum."""


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


def compare(rank: int, case: Case, engine: str, rounds: int, steps: int) -> Timings:
    """Run instep and DDP alternately. Rank 1 runs only DDP."""
    torch.manual_seed(0)
    x, y = case.sample(), torch.randint(32, (len(case.sample()),))
    half = len(x) // 2
    ddp = nn.parallel.DistributedDataParallel(case.make())
    ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    shard = slice(rank * half, (rank + 1) * half)
    torch.set_num_threads(1)
    ours, theirs, moved = [], [], ""
    net = instep.with_loss(case.make(), nn.CrossEntropyLoss()) if case.with_loss else case.make()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) if rank == 0 else nullcontext() as model:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        loss = None if model is None else model if case.with_loss else loss_of(model)
        for turn in range(rounds + 1):
            dist.barrier()
            ddp_seconds = seconds(lambda: step(loss_of(ddp), ddp_optimizer, x[shard], y[shard]), steps)
            dist.barrier()
            if loss is not None:
                instep_seconds = seconds(lambda: step(loss, optimizer, x, y), steps)
                if turn:  # the first round is a warm-up
                    theirs.append(ddp_seconds)
                    ours.append(instep_seconds)
        if loss is not None and engine == "processes":
            moved = bytes_moved(model, lambda: step(loss, optimizer, x, y), x, y, case.with_loss)
    return Timings(ours, theirs, moved)


def work(rank: int, folder: str, cases: Mapping[str, Case], engine: str, rounds: int, steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        bytes_columns = f"{'MB moved':>10}{'fewest':>10}" if engine == "processes" else ""
        print(f"{'':28}{'instep':>12}{'DDP':>12}{'instep / DDP':>14}{'DDP / instep':>14}{bytes_columns}")
    for name, case in cases.items():
        ours, theirs, moved = compare(rank, case, engine, rounds, steps)
        if rank == 0:
            us, them = statistics.median(ours), statistics.median(theirs)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            times = f"{us * 1e3:>9.2f} ms{them * 1e3:>9.2f} ms{ratio:>14.2f}{1 / ratio:>14.2f}"
            print(f"{name:28}{times}{moved}", flush=True)
    dist.destroy_process_group()


def main(cases: Mapping[str, Case], engine: str, rounds: int) -> None:
    """Compare all cases. `--rounds`, `--steps` and `--only` can be given on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    arguments = parser.parse_args()
    cases = {name: case for name, case in cases.items() if arguments.only in name}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, cases, engine, arguments.rounds, arguments.steps), nprocs=2)
