"""The cost of a training step on the host: tiny tensors, so that almost nothing but the plumbing is measured.

instep with two CPU replicas is compared with DistributedDataParallel on two Gloo processes whose communication is free:
a hook returns each bucket at once, and buffers are not broadcast. Rank 0 of DDP also runs instep, alternating with DDP.
The table shows medians over all rounds, of forward and backward without an optimizer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # some of torch's Arm kernels ignore torch.set_num_threads

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import instep


class Named(nn.Module):
    """A dictionary of two tensors and a list of strings in, a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
        assert len(names) == len(batch["a"])
        return {"sum": self.left(batch["a"]) + self.right(batch["b"]), "left": batch["a"] * 2}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def chain() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))


def conv_net() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(20)]
    return nn.Sequential(*layers)


def row_batch(count: int) -> tuple[Any, ...]:
    return (torch.randn(count, 8),)


def image_batch(count: int) -> tuple[Any, ...]:
    return (torch.randn(count, 4, 4, 4),)


def named_batch(count: int) -> tuple[Any, ...]:
    return {"a": torch.randn(count, 8), "b": torch.randn(count, 8)}, [f"sample {i}" for i in range(count)]


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    sync_batchnorm: bool = True


CASES = {
    "MLP, 4 weights": Case(mlp, row_batch),
    "100 linear layers": Case(chain, row_batch),
    "20 conv + batch norm, per shard": Case(conv_net, image_batch, sync_batchnorm=False),
    "20 conv + batch norm, whole batch": Case(conv_net, image_batch),
    "dictionary and strings": Case(Named, named_batch),
}


def run_step(model: nn.Module, batch: tuple[Any, ...]) -> tuple[float, float]:
    """Seconds of a forward and of a backward."""
    model.zero_grad()
    start = time.perf_counter()
    output = model(*batch)
    middle = time.perf_counter()
    (output["sum"] if isinstance(output, dict) else output).sum().backward()
    return middle - start, time.perf_counter() - middle


def completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def compare(rank: int, case: Case, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ddp = nn.parallel.DistributedDataParallel(case.make(), broadcast_buffers=False)
    ddp.register_comm_hook(None, lambda _, bucket: completed(bucket.buffer()))
    plain = case.make()
    shard, whole = case.batch(4), case.batch(8)
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "DDP": [], "instep": []}
    with ExitStack() as stack:
        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "plain": lambda: run_step(plain, shard),
            "DDP": lambda: run_step(ddp, shard),
        }
        if rank == 0:
            model = stack.enter_context(
                instep.DataParallel(
                    case.make(), ["cpu"] * 2, engine="processes", sync_batchnorm=case.sync_batchnorm, min_shard=1
                )
            )
            sides["instep"] = lambda: run_step(model, whole)
        for turn in range(rounds + 2):
            for name in times:
                dist.barrier()
                if name in sides:
                    found = [sides[name]() for _ in range(steps)]
                    if turn > 1:  # the first rounds are a warm-up
                        times[name] += found[2:]  # the first steps after another side have cold caches
    return times


def work(rank: int, folder: str, names: list[str], rounds: int, steps: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 0:
        print(f"{'forward + backward, ms':36}{'plain':>14}{'DDP':>14}{'instep':>14}{'instep / DDP':>14}", flush=True)
    for name in names:
        times = compare(rank, CASES[name], rounds, steps)
        if rank == 0:
            columns, totals = [], []
            for side in times.values():
                forward, backward = (statistics.median(column) * 1e3 for column in zip(*side, strict=True))
                columns.append(f"{forward:.2f} + {backward:.2f}")
                totals.append(forward + backward)
            print(f"{name:36}" + "".join(f"{c:>14}" for c in columns) + f"{totals[2] / totals[1]:>14.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only in name]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, names, arguments.rounds, arguments.steps), nprocs=2)


if __name__ == "__main__":
    main()
