"""Compares the GPU memory that engine="processes" takes with that of DistributedDataParallel.

Each side trains for a few steps in k processes of its own, one side after the other. The table shows what is in use on
the device when all processes have taken their steps: parameters, gradients, activations that the caching allocators
keep, and k CUDA contexts. The allocators' own statistics would leave out what `engine="processes"` allocates otherwise.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from against_ddp import CASES, DEVICE, data_parallel, ddp, training_side

STEPS = 8


def used_bytes() -> int:
    """What is in use on the device. On the CPU, where only the script is tried, always the same."""
    if DEVICE == "cpu":
        return 1
    free, total = torch.cuda.mem_get_info()
    return total - free


def train_with_ddp(rank: int, result: str, name: str, replicas: int) -> None:
    case = CASES[name]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{result}.store", rank=rank, world_size=replicas)
    side = training_side(ddp(case.module()), [batch.part(replicas, rank) for batch in case.sample()])
    side.run(STEPS)
    dist.barrier()
    if rank == 0:
        save(result)
    dist.barrier()  # until then the other ranks keep their memory
    dist.destroy_process_group()


def train_with_instep(_: int, result: str, name: str, replicas: int) -> None:
    case = CASES[name]
    with data_parallel(case.module(), replicas) as model:
        training_side(model, case.sample()).run(STEPS)
        save(result)


def save(path: str) -> None:
    with open(path, "w") as file:
        file.write(str(used_bytes()))


def measure(train: Callable[..., None], name: str, replicas: int, processes: int) -> int:
    """Bytes in use after training in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "bytes")
        mp.spawn(train, (result, name, replicas), nprocs=processes)
        with open(result) as file:
            return int(file.read())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    arguments = parser.parse_args()
    for replicas in arguments.replicas:
        for name in [name for name in CASES if arguments.only in name]:
            others = measure(train_with_ddp, name, replicas, replicas)
            ours = measure(train_with_instep, name, replicas, 1)
            sizes = f"instep {ours / 2**30:6.2f} GiB   DDP {others / 2**30:6.2f} GiB"
            print(f"{name + f', {replicas} replicas':56}{sizes}   instep / DDP {ours / others:5.2f}", flush=True)


if __name__ == "__main__":
    if DEVICE == "cpu" or torch.cuda.device_count():  # does not initialize CUDA in this process
        main()
    else:
        print("this benchmark needs a CUDA device")
