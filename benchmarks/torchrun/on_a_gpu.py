"""Compares engine="torchrun" with DistributedDataParallel: k ranks share one GPU, and run both alternately.

The loss of instep is in the module (`with_loss`). Both sides communicate by the same backend: NCCL between processes
that claim to be different hosts (it refuses ranks of one host on one GPU, and so uses sockets), or Gloo. Under MPS
(`--mps`) each rank gets 1/k of the multiprocessors; otherwise the ranks take turns. The speed of links between GPUs is
not measured. Steps are in bfloat16 autocast, with SGD. The table shows medians over all rounds, in milliseconds, and
the median, the smallest and the largest ratio of the rounds. Where the sides communicate by sockets, rounds differ by
up to 10 %: rows that are close need `--rounds 15`.

`--control` runs DDP a second time in each round, as a control: its ratio shows how much of the others is noise.

Nothing in a round waits for the device but its end, as in a training loop that does not read each loss. The first step
after such a wait takes longer on both sides: more of the time in which the host prepares it is visible.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from against_ddp import CASES, DEVICE, Batch, Case, Side, cross_entropy, make_parser, mps, training_side
from torch import nn

import instep

WARM_UP_STEPS = 36
"""Until then instep checks more often that the ranks are in step. These checks read tensors of the device."""


def wrap(module: nn.Module, **options: Any) -> instep.DataParallel:
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    return instep.DataParallel(instep.with_loss(module, cross_entropy), [device], engine="torchrun", **options)


def instep_side(model: nn.Module, batches: list[Batch]) -> Side:
    return Side(lambda batch: model(*batch.inputs, batch.target), batches, model)


def make_sides(case: Case, ranks: int, rank: int, *, control: bool) -> list[tuple[str, Side, str, Side]]:
    """Pairs of a side of instep and the side of DDP that it is compared with; with `control` also two of DDP."""
    batches = case.sample()
    parts = [batch.part(ranks, rank) for batch in batches]

    def ddp(module: nn.Module) -> Side:
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        return training_side(model, parts)

    plain = ddp(case.module())
    controls = [("DDP again", ddp(case.module()), "DDP", plain)] if control else []
    if not case.has_batch_norm:
        return [("with_loss", instep_side(wrap(case.module()), batches), "DDP", plain), *controls]
    synced = ddp(nn.SyncBatchNorm.convert_sync_batchnorm(case.module()))
    shards = instep_side(wrap(case.module(), sync_batchnorm=False), batches)
    return [
        ("with_loss, sync_batchnorm=False", shards, "DDP", plain),
        ("with_loss", instep_side(wrap(case.module()), batches), "DDP + SyncBatchNorm", synced),
        *controls,
    ]


def work(rank: int, folder: str, names: list[str], ranks: int, options: Namespace) -> None:
    os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(options.backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for name in names:
        torch.manual_seed(0)
        pairs = make_sides(CASES[name], ranks, rank, control=options.control)
        sides = list({id(side): side for _, ours, _, theirs in pairs for side in (ours, theirs)}.values())
        order = random.Random(0)  # the same on all ranks
        for count in (WARM_UP_STEPS, *[options.steps] * options.rounds):
            for side in order.sample(sides, len(sides)):
                dist.barrier()
                side.run(count)
        for label, ours, base, theirs in pairs:
            if rank == 0:
                ratios = sorted(a / b for a, b in zip(ours.times[1:], theirs.times[1:], strict=True))
                times = [statistics.median(side.times[1:]) for side in (ours, theirs)]
                print(
                    f"{name}, {ranks} ranks, {label:32}{times[0]:9.1f} ms{times[1]:9.1f} ms"
                    f"{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) x {base}",
                    flush=True,
                )
        del pairs, sides
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser()
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl", help="of both sides; gloo also works on a GPU")
    parser.add_argument("--mps", action="store_true", help="divide the multiprocessors among the ranks")
    parser.add_argument("--control", action="store_true", help="also compare DDP with DDP")
    parser.set_defaults(steps=16)
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name and "32 to 128" not in name]
    with tempfile.TemporaryDirectory() as folder, mps(folder) if options.mps else nullcontext():
        for ranks in options.replicas:
            if options.mps:
                os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // ranks)
            with tempfile.TemporaryDirectory() as store:
                mp.spawn(work, (store, names, ranks, options), nprocs=ranks)


if __name__ == "__main__":
    if DEVICE == "cpu" or torch.cuda.device_count():  # does not initialize CUDA in this process
        main()
    else:
        print("this benchmark needs a CUDA device")
