"""A cost model of a step on ranks: checked against measurements on this machine, and applied to larger ones.

    step = compute of a shard + overlapped part of (reduction of gradients) + gather of outputs + two headers + host

`python cost_model.py` measures each part alone on 1, 2 and 3 ranks of one CPU machine, adds them up, and prints the sum
beside the measured step. The reduction is added whole: on a CPU it competes with the backward for the same cores.
`python cost_model.py --predict` prints what the model says for larger machines; nothing is measured there.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_comparison import Attention, Case, mlp, rows, step, tokens
from torch import nn

import instep
from instep.engines.torchrun.channel import Message

CASES = {
    "MLP, width 1024, batch 60": Case(partial(mlp, 1024), partial(rows, 60, 1024)),
    "transformer, batch 30": Case(Attention, lambda: tokens()[:30]),
}


def median_ms(work: Callable[[], object], repeats: int = 25) -> float:
    """The median time of work that all ranks do at the same time."""
    times = []
    for number in range(repeats + 3):
        dist.barrier()
        start = time.perf_counter()
        work()
        if number > 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def measure(case: Case) -> tuple[float, float, float, float, float]:
    """Milliseconds of the parts (compute, reduction, headers, host) and of a whole step."""
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = case.sample(), torch.randint(32, (len(case.sample()),))
    own = slice(rank * len(x) // count, (rank + 1) * len(x) // count)
    net = instep.with_loss(case.make(), nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    compute = median_ms(lambda: step(net, optimizer, x[own], y[own]))
    model = instep.DataParallel(net, engine="torchrun")
    engine, parameters = model._instep_engine, list(net.parameters())
    step(model, optimizer, x, y)  # afterwards the ranks share memory

    def reduce() -> None:  # net has gradients
        engine.begin_reduction(parameters, parameters, overlap=False).finish()

    reduction = median_ms(reduce) if count > 1 else 0.0
    channel = engine.channel
    headers = 2 * median_ms(lambda: channel.exchange(Message("a header")), 100) if count > 1 else 0.0
    small = instep.with_loss(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 32)), nn.CrossEntropyLoss())
    host = 0.0
    if count > 1:  # what a step of an almost empty module costs beside its headers and its own computation
        tiny, labels = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
        bare = median_ms(lambda: small(tiny, labels).backward(), 100)
        wrapped = instep.DataParallel(small, engine="torchrun")
        host = median_ms(lambda: wrapped(tiny, labels).backward(), 100) - bare - headers
    whole = median_ms(lambda: step(model, optimizer, x, y))
    return compute, reduction, headers, host, whole


def work(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    for name, case in CASES.items():
        *parts, whole = measure(case)
        if rank == 0:
            columns = "".join(f"{part:>11.2f}" for part in (*parts, sum(parts), whole))
            print(f"{name:28}{count:>6}{columns}{whole / sum(parts):>10.2f}", flush=True)
    dist.destroy_process_group()


class Machine(NamedTuple):
    """GPUs in nodes. Bandwidths are per GPU and direction inside a node, and per node between nodes, in GB/s."""

    name: str
    gpus: int
    inside: float
    between: float = 0.0
    latency: float = 20e-6
    """Of one message between two nodes, in seconds; a few microseconds inside a node."""

    def reduction(self, nbytes: float) -> float:
        """Seconds of an all-reduce: a ring inside each node, then between the nodes, whose GPUs share its link."""
        nodes, per_node = max(1, self.gpus // 8), min(8, self.gpus)
        inside = 2 * (per_node - 1) / per_node * nbytes / (self.inside * 1e9) + 2 * math.log2(per_node) * 5e-6
        if nodes == 1:
            return inside
        return inside + 2 * (nodes - 1) / nodes * nbytes / (self.between * 1e9) + 2 * math.log2(nodes) * self.latency

    def header(self) -> float:
        """Seconds of one exchange of headers: through memory on one machine; Gloo passes them on from rank to rank."""
        return 15e-6 * self.gpus if self.gpus <= 8 else (self.gpus - 1) * self.latency + 50e-6


MACHINES = [
    Machine("8 GPUs, NVLink", 8, 300),
    Machine("8 GPUs, PCIe 4", 8, 20),
    Machine("64 GPUs, NVLink, 400 Gb/s Ethernet", 64, 300, 45),
    Machine("64 GPUs, NVLink, 100 Gb/s Ethernet", 64, 300, 11),
    Machine("64 GPUs, PCIe 4, 25 Gb/s Ethernet", 64, 20, 2.8),
    Machine("1,024 GPUs, NVLink, 400 Gb/s Ethernet", 1024, 300, 45),
    Machine("1,024 GPUs, NVLink, 100 Gb/s Ethernet", 1024, 300, 11),
]


def predict(parameters: float, compute: float, host: float) -> None:
    """Print the efficiency for a constant shard: the compute of a shard over the step."""
    nbytes = 4 * parameters
    print(f"{parameters / 1e6:.0f} million parameters, {compute * 1e3:.0f} ms of compute per shard and step")
    print(f"{'':40}{'reduction':>11}{'headers':>10}{'step':>10}{'efficiency':>12}{'with bf16':>11}")
    for machine in MACHINES:
        columns = []
        for scale in (1.0, 0.5):
            reduction, headers = machine.reduction(scale * nbytes), 2 * machine.header()
            hidden = 2 / 3 * compute  # the backward, beside which all but the last bucket can be reduced
            exposed = max(reduction - hidden, reduction * min(1.0, 25e6 / nbytes))
            columns.append((reduction, headers, compute + exposed + headers + host))
        (reduction, headers, total), (_, _, half) = columns
        times = f"{reduction * 1e3:>8.1f} ms{headers * 1e3:>7.1f} ms{total * 1e3:>7.1f} ms"
        print(f"{machine.name:40}{times}{compute / total:>12.0%}{compute / half:>11.0%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--parameters", type=float, default=134e6)
    parser.add_argument("--compute", type=float, default=0.020, help="seconds of a shard's step")
    parser.add_argument("--host", type=float, default=0.0025, help="seconds that the host adds to a step")
    options = parser.parse_args()
    if options.predict:
        predict(options.parameters, options.compute, options.host)
        return
    print(
        f"{'':28}{'ranks':>6}{'compute':>11}{'reduction':>11}{'headers':>11}{'host':>11}{'sum':>11}{'measured':>11}{'ratio':>10}"
    )
    for count in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (count, folder), nprocs=count)


if __name__ == "__main__":
    main()
