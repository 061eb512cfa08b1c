"""Two replica threads against DistributedDataParallel with Gloo and two processes, on the CPU.

Both sides see the same global batch and have one compute thread a replica. One process of the DDP pair also runs
instep, in turns with it, so that both meet the same state of the machine; the table gives medians over all rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import instep


class Attention(nn.Module):
    """A four-layer transformer encoder that reads 64 tokens and says one of 32 classes."""

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


def wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 32))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer, 4 layers": (Attention, lambda: torch.randint(512, (32, 64))),
    "conv net": (conv_net, lambda: torch.randn(32, 3, 32, 32)),
    "MLP, width 1024": (wide_mlp, lambda: torch.randn(64, 1024)),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def seconds(work: Callable[[], None], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def compare(rank: int, case: str, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds a step, round by round, of both sides; rank 1 only takes part in DDP."""
    make, sample = CASES[case]
    torch.manual_seed(0)
    x, y = sample(), torch.randint(32, (len(sample()),))
    half = len(x) // 2
    ddp = nn.parallel.DistributedDataParallel(make())
    ddp_optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    mine = slice(rank * half, (rank + 1) * half)
    torch.set_num_threads(1)
    ours, theirs = [], []
    with instep.DataParallel(make(), ["cpu"] * 2) if rank == 0 else nullcontext() as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3) if model is not None else None
        for turn in range(rounds + 1):
            dist.barrier()
            took = seconds(lambda: step(ddp, ddp_optimizer, x[mine], y[mine]), steps)
            dist.barrier()
            if model is not None and optimizer is not None:
                spent = seconds(lambda: step(model, optimizer, x, y), steps)
                if turn:  # the first round warms both up
                    theirs.append(took)
                    ours.append(spent)
    return ours, theirs


def work(rank: int, folder: str, rounds: int, steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        print(f"{'':24}{'instep':>12}{'DDP':>12}{'ratio':>9}")
    for case in CASES:
        ours, theirs = compare(rank, case, rounds, steps)
        if rank == 0:
            us, them = statistics.median(ours), statistics.median(theirs)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            print(f"{case:24}{us * 1e3:>9.2f} ms{them * 1e3:>9.2f} ms{ratio:>9.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, arguments.rounds, arguments.steps), nprocs=2)
