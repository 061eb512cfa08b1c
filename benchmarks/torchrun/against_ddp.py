"""Compares engine="torchrun" with DistributedDataParallel: the same ranks run both, alternately, on the CPU with Gloo.

Both train on the same global batch with one compute thread per rank. instep's loss is in the module (`with_loss`). Each
rank passes the whole batch to instep, and its part to DDP. The table shows medians over all rounds, and the time of one
exchange of headers. `ddp_comparison.py` describes a round.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
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
    Comparison,
    conv_net,
    deeper_conv_net,
    images,
    lenet,
    loss_of,
    make_parser,
    mlp,
    rows,
    run_rounds,
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


def make_comparison(rank: int, count: int, case: Case, *, bucket_view: bool) -> Comparison:
    """One case on both sides."""
    torch.manual_seed(0)
    x, y = case.sample(), torch.randint(32, (len(case.sample()),))
    own = slice(rank * len(x) // count, (rank + 1) * len(x) // count)
    ddp = nn.parallel.DistributedDataParallel(case.make(), gradient_as_bucket_view=bucket_view)
    model = instep.DataParallel(instep.with_loss(case.make(), nn.CrossEntropyLoss()), engine="torchrun")
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-3) for module in (model, ddp)]
    return Comparison(
        partial(step, model, optimizers[0], x, y), partial(step, loss_of(ddp), optimizers[1], x[own], y[own])
    )


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


def work(rank: int, count: int, folder: str, names: list[str], options: Namespace) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    comparisons = {name: make_comparison(rank, count, CASES[name], bucket_view=options.bucket_view) for name in names}
    run_rounds(comparisons, options.rounds, options.seconds)
    if rank == 0:
        print(f"{'':30}{'instep':>12}{'DDP':>12}{'DDP / instep':>14}")
        for name, comparison in comparisons.items():
            ours, theirs, ratio = comparison.medians()
            print(f"{name:30}{ours:>9.2f} ms{theirs:>9.2f} ms{ratio:>14.2f}")
    header = header_microseconds()
    if rank == 0:
        print(f"one exchange of headers: {header:.0f} µs")
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(rounds=24)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    names = [name for name in CASES if options.only in name]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options.ranks, folder, names, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
