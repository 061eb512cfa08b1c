"""Compares a minimal caller with workers, instep and DistributedDataParallel on a divided GPU.

Replica 0 is in the calling process and the others are in workers, as with engine="processes", but nothing else is done:
arguments, shapes and the module are fixed, weights are memory that all processes share, and a request is a number in
shared memory for which workers spin. Streams wait for each other on the device (torch's symmetric memory). There are no
checks, no probe, no state and no error handling, and hooks of parameters see no gradients. Two variants:

- "no host waits": the caller never waits for the host of a worker. If a worker raises an exception, the caller has
  returned an output that was never computed.
- "waits for workers": the caller waits until each worker has queued its forward, and again its backward: only then can
  it know that they have not failed.

The models, MPS, DDP with free communication and the steps of instep are those of `against_ddp.py`. DDP's time is that
of rank 0, and its gradients are not summed; the minimal caller and instep sum gradients, and wait for the slowest
worker. The table shows medians over all rounds, and the median, the smallest and the largest ratio of the rounds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.multiprocessing as mp
from against_ddp import (
    CASES,
    WARM_UP_STEPS,
    Batch,
    Case,
    Side,
    cross_entropy,
    ddp_sides,
    instep_sides,
    make_parser,
    mps,
)
from torch import Tensor, nn

FORWARD, BACKWARD, INFERENCE, END = range(1, 5)
"""The requests."""
START, FORWARD_DONE, BACKWARD_START, BACKWARD_DONE = range(2, 6)
"""Channels of barriers on the device."""
MAX_REQUESTS, MAX_REPLICAS = 2**16, 64
"""For each request of a case there is a place in memory: the caller may be many requests ahead of a worker."""
MEMORY_BYTES = 8 * (MAX_REQUESTS + MAX_REPLICAS)
CASE_NAMES = [name for name, case in CASES.items() if not case.has_batch_norm and "to 128" not in name]


class SharedTensor:
    """A tensor of the same size in each process, which the others can read and write."""

    def __init__(self, numel: int, dtype: torch.dtype, count: int) -> None:
        self.own = symmetric_memory.empty(numel, dtype=dtype, device="cuda")
        self.handle = symmetric_memory.rendezvous(self.own, dist.group.WORLD.group_name)
        self.rows = [self.handle.get_buffer(rank, (numel,), dtype) for rank in range(count)]


class MinimalCaller:
    """One process of a caller with workers."""

    def __init__(self, rank: int, count: int, net: nn.Module, batch: Batch, memory: Any) -> None:
        self.rank, self.count, self.net, self.batch = rank, count, net, batch
        self.part = batch.part(count, rank)
        assert len(batch.target) % count == 0, "the parts of the batch have to be equal"
        numbers = np.frombuffer(memory, np.int64)
        self.kinds, self.numbers = numbers[:MAX_REQUESTS], numbers[MAX_REQUESTS:]
        """The kinds of all requests; the number of the last one, and of the last that each worker has queued."""
        self.parameters = list(net.parameters())
        sizes = [p.numel() for p in self.parameters]
        weights, self.gradients = (SharedTensor(sum(sizes), torch.float32, count) for _ in range(2))
        views = zip(weights.rows[0].split(sizes), self.gradients.own.split(sizes), strict=True)
        for p, (weight, gradient) in zip(self.parameters, views, strict=True):
            if rank == 0:
                weight.copy_(p.detach().view(-1))
            p.data, p.grad = weight.view_as(p), gradient.view_as(p)
        with torch.no_grad():
            output = self.forward()
        self.shape = output.shape
        self.outputs, self.output_gradients = (SharedTensor(output.numel(), output.dtype, count) for _ in range(2))
        self.barrier = weights.handle.barrier
        self.last = 0
        self.waits_for_workers = False

    def forward(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            output: Any = self.net(*self.part.inputs)
        return getattr(output, "logits", output)

    # the caller

    def request(self, kind: int) -> None:
        self.kinds[self.numbers[0] + 1] = kind
        self.numbers[0] += 1

    def wait_for_workers(self) -> None:
        if self.waits_for_workers:
            for rank in range(1, self.count):
                while self.numbers[rank] < self.numbers[0]:
                    pass

    def gather_output(self, kind: int) -> tuple[Tensor, Tensor]:
        """This process's output, and that of the whole batch."""
        self.request(kind)
        self.barrier(channel=START)
        output = self.forward()
        self.barrier(channel=FORWARD_DONE)
        self.wait_for_workers()
        return output, torch.cat([output.detach(), *(row.view(self.shape) for row in self.outputs.rows[1:])])

    def loss(self, batch: Batch) -> Loss:
        return Loss(self, *self.gather_output(FORWARD), batch.target)

    def infer(self, _: Batch) -> Tensor:
        return self.gather_output(INFERENCE)[1]

    def end(self) -> None:
        self.request(END)

    # a worker

    def serve(self) -> None:
        output = torch.empty(0)
        while (kind := self.next_request()) != END:
            if kind == BACKWARD:
                self.barrier(channel=BACKWARD_START)
                output.backward(self.output_gradients.own.view(self.shape))
                self.barrier(channel=BACKWARD_DONE)
            else:
                self.barrier(channel=START)
                with torch.set_grad_enabled(kind == FORWARD):
                    if kind == FORWARD:
                        self.gradients.own.zero_()
                    output = self.forward()
                self.outputs.own.copy_(output.detach().reshape(-1))
                self.barrier(channel=FORWARD_DONE)
            self.numbers[self.rank] = self.last

    def next_request(self) -> int:
        while self.numbers[0] == self.last:
            pass
        self.last += 1
        return int(self.kinds[self.last])


class Loss:
    """The loss of a step, whose backward runs on all processes."""

    def __init__(self, side: MinimalCaller, own: Tensor, output: Tensor, target: Tensor) -> None:
        self.side, self.own, self.output = side, own, output.requires_grad_()
        self.value = cross_entropy(self.output, target)

    def backward(self) -> None:
        side = self.side
        self.value.backward()
        side.request(BACKWARD)
        own, *others = self.output.grad.chunk(side.count)
        for row, gradient in zip(side.output_gradients.rows[1:], others, strict=True):
            row.copy_(gradient.reshape(-1))
        side.barrier(channel=BACKWARD_START)
        side.gradients.own.zero_()
        self.own.backward(own)
        side.barrier(channel=BACKWARD_DONE)
        side.wait_for_workers()
        for row in side.gradients.rows[1:]:
            side.gradients.own.add_(row)


class MinimalSide(Side):
    """Steps of `MinimalCaller`. The gradients stay where they are."""

    def __init__(
        self, processes: MinimalCaller, forward: Callable[[Batch], Any], *, waits: bool, training: bool = True
    ) -> None:
        super().__init__(forward, [processes.batch], processes.net, training=training)
        self.processes, self.waits = processes, waits
        self.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]

    def run(self, steps: int) -> None:
        if self.processes.rank:
            self.processes.net.train(self.training)
            self.processes.serve()
            return
        self.processes.waits_for_workers = self.waits
        super().run(steps)
        self.processes.end()


class Idle:
    """A side that only rank 0 runs, on the other ranks."""

    def run(self, steps: int) -> None:
        pass


def make_sides(rank: int, count: int, case: Case, memory: Any, stack: ExitStack) -> dict[str, Any]:
    sides: dict[str, Any] = dict(ddp_sides(case, count, rank))
    (batch,) = case.sample()
    processes = MinimalCaller(rank, count, case.module(), batch, memory)
    for waits, label in ((False, "no host waits"), (True, "waits for workers")):
        sides[label] = MinimalSide(processes, processes.loss, waits=waits)
        sides[f"{label}, inference"] = MinimalSide(processes, processes.infer, waits=waits, training=False)
    own: dict[str, Any] = dict(instep_sides(case, count, stack)) if rank == 0 else {}
    names = [list(own)]
    dist.broadcast_object_list(names, 0)
    return {**sides, **{name: own.get(name, Idle()) for name in names[0]}}


def report(title: str, sides: dict[str, Any]) -> None:
    """Print the medians, and the median, the smallest and the largest ratio of the rounds."""
    print(title)
    for label, side in sides.items():
        base = "DDP" if side.training else "bare, inference"
        times = side.times[2:]  # after the warm-up, and a first round
        ratios = sorted(a / b for a, b in zip(times, sides[base].times[2:], strict=True))
        spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        time = statistics.median(times)
        print(f"  {label:32}{time:9.1f} ms{statistics.median(ratios):8.2f} {spread:18}x {base}", flush=True)


def compare(rank: int, count: int, name: str, path: str, rounds: int, steps: int) -> None:
    """Run one case. `path` is that of a file for the requests."""
    torch.manual_seed(0)
    if rank == 0:
        with open(path, "wb") as file:
            file.write(bytes(MEMORY_BYTES))
    dist.barrier()
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), MEMORY_BYTES)
    with ExitStack() as stack:
        sides = make_sides(rank, count, CASES[name], memory, stack)
        order = list(sides.values())
        for turn in range(rounds + 2):
            for side in order if turn % 2 else reversed(order):
                torch.cuda.synchronize()
                dist.barrier()
                side.run(steps if turn else WARM_UP_STEPS)
        torch.cuda.synchronize()
        dist.barrier()
        if rank == 0:
            report(f"{name}, {count} replicas", sides)


def work(rank: int, folder: str, names: list[str], count: int, rounds: int, steps: int) -> None:
    torch.cuda.set_device(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    for number, name in enumerate(names):
        compare(rank, count, name, os.path.join(folder, f"requests-{number}"), rounds, steps)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def main() -> None:
    options = make_parser().parse_args()
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    names = [name for name in CASE_NAMES if options.only in name]
    with tempfile.TemporaryDirectory() as pipes, mps(pipes):
        for count in options.replicas:
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // count)
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(work, (folder, names, count, options.rounds, options.steps), nprocs=count)


if __name__ == "__main__":
    if torch.cuda.device_count():  # does not initialize CUDA in this process
        main()
    else:
        print("this benchmark needs a CUDA device")
