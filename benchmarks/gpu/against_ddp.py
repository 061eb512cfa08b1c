"""Compares engine="processes" with DistributedDataParallel on a GPU that MPS divides among k processes.

Each process gets 1/k of the multiprocessors, which is the nearest thing to k GPUs that one GPU offers. DDP's
communication is free: a hook returns each bucket at once, buffers are not broadcast, and SyncBatchNorm's collectives
send nothing. What MPS does not show: the links between GPUs, and memories of their own.

Rank 0 of DDP also runs instep, alternating with DDP. Steps are in bfloat16 autocast, with SGD; inference is forward
alone, without gradients. The table shows medians over all rounds, in milliseconds, after a warm-up, and the time of the
first step. The times of DDP and of the bare module are those of rank 0. With free communication ranks do not wait for
each other, as those of DDP do in every step, so the table also shows the slowest rank of each round, and the ratio to
it: a lower bound of what steps would take in which ranks wait. DEVICE=cpu tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import instep
from instep.engines.processes.controller import nccl_manager, remote_replica
from instep.runtime.env import is_peer_access_enabled


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


VOCABULARY = 32_000
DEVICE = os.environ.get("DEVICE", "cuda")
SEPARATE = os.environ.get("SEPARATE") == "1"
"""Whether replicas of instep are treated as if each had its own GPU."""
WARM_UP_STEPS = 36


def gpt(layers: int, width: int) -> nn.Module:
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY, bias=False))


def bert_base() -> nn.Module:
    import transformers

    return transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=4))


def resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50()


class Batch(NamedTuple):
    inputs: tuple[Tensor, ...]
    target: Tensor

    def part(self, count: int, rank: int) -> Batch:
        """The part of one rank."""
        return Batch(
            tuple(value.tensor_split(count)[rank] for value in self.inputs), self.target.tensor_split(count)[rank]
        )


def tokens(batch: int, length: int) -> Batch:
    ids, target = torch.randint(VOCABULARY, (2, batch, length), device=DEVICE)
    return Batch((ids,), target)


def sentences(batch: int, length: int) -> Batch:
    ids = torch.randint(30_000, (batch, length), device=DEVICE)
    return Batch((ids, torch.ones_like(ids)), torch.randint(4, (batch,), device=DEVICE))


def sentences_of_many_lengths() -> list[Batch]:
    """Eight batches whose lengths differ; the last one has fewer sentences."""
    return [sentences(32 if length != 80 else 13, length) for length in (128, 96, 32, 112, 64, 120, 48, 80)]


def images(batch: int) -> Batch:
    return Batch((torch.randn(batch, 3, 224, 224, device=DEVICE),), torch.randint(1000, (batch,), device=DEVICE))


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    sample: Callable[[], list[Batch]]
    has_batch_norm: bool = False

    def module(self) -> nn.Module:
        return self.make().to(DEVICE)


CASES = {
    "GPT 4 x 256, 8 x 64 tokens": Case(lambda: gpt(4, 256), lambda: [tokens(8, 64)]),
    "GPT 12 x 768, 16 x 512 tokens": Case(lambda: gpt(12, 768), lambda: [tokens(16, 512)]),
    "BERT-base, 32 x 128 tokens": Case(bert_base, lambda: [sentences(32, 128)]),
    "BERT-base, 13 and 32 x 32 to 128 tokens": Case(bert_base, sentences_of_many_lengths),
    "ResNet-50, 64 images": Case(resnet50, lambda: [images(64)], has_batch_norm=True),
}


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Side:
    """One way to run a step, and its times. `forward` takes a batch and returns the loss, or without one the output."""

    def __init__(
        self, forward: Callable[[Batch], Any], batches: list[Batch], model: nn.Module, *, training: bool = True
    ) -> None:
        self.forward, self.model, self.training = forward, model, training
        self.batches = itertools.cycle(batches)
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        self.times: list[float] = []
        self.slowest_times: list[float] = []
        """Of the slowest rank, if all ranks ran this side."""

    def run(self, steps: int) -> None:
        """Run steps. The first one, after another side or in another mode, is not timed, unless it is the only one."""
        self.model.train(self.training)
        if steps > 1:
            self._run(1)
        synchronize()
        start = time.perf_counter()
        self._run(steps)
        synchronize()
        self.times.append((time.perf_counter() - start) / steps * 1e3)

    def _run(self, steps: int) -> None:
        for batch in itertools.islice(self.batches, steps):
            if self.training:
                self.optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16), torch.set_grad_enabled(self.training):
                output = self.forward(batch)
            if self.training:
                output.backward()
                self.optimizer.step()


def training_side(model: nn.Module, batches: list[Batch]) -> Side:
    return Side(lambda batch: cross_entropy(model(*batch.inputs), batch.target), batches, model)


def inference_side(model: nn.Module, batches: list[Batch]) -> Side:
    return Side(lambda batch: model(*batch.inputs), batches, model, training=False)


def _completed(tensor: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=["cuda:0"] if DEVICE == "cuda" else [])
    future.set_result(tensor)
    return future


def ddp(model: nn.Module) -> nn.Module:
    """DDP whose communication is free."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    wrapped.register_comm_hook(None, lambda _, bucket: _completed(bucket.buffer()))
    return wrapped


def _copy_own_row(rows: Sequence[Tensor], row: Tensor, *_: object, **__: object) -> None:
    for other in rows:
        other.copy_(row)


def free_collectives() -> Any:
    """Context manager: the collectives that SyncBatchNorm calls on Gloo communicate nothing."""
    return mock.patch.multiple(dist, all_gather=_copy_own_row, all_reduce=lambda *_, **__: None)


def ddp_sides(case: Case, replicas: int, rank: int) -> dict[str, Side]:
    """The sides that every rank runs at the same time, each on its part of the batch."""
    batches = [batch.part(replicas, rank) for batch in case.sample()]
    bare = case.module()
    sides = {
        "bare": training_side(bare, batches),
        "DDP": training_side(ddp(case.module()), batches),
        "bare, inference": inference_side(bare, batches),
    }
    if case.has_batch_norm:
        synced = training_side(ddp(nn.SyncBatchNorm.convert_sync_batchnorm(case.module())), batches)
        run = synced.run

        def run_free(steps: int) -> None:
            with free_collectives():
                run(steps)

        synced.run = run_free  # type: ignore[method-assign]
        sides["DDP + SyncBatchNorm"] = synced
    return sides


def treat_as_separate_gpus() -> None:
    """Let instep treat replicas as if each had its own GPU that reaches the others', with free collectives."""
    nccl_manager.are_distinct_gpus = lambda _: True
    nccl_manager.BACKEND = "free_group:make_group"
    remote_replica.is_same_accelerator = lambda *_: False
    remote_replica.can_reach = lambda *_: is_peer_access_enabled()


def data_parallel(net: nn.Module, replicas: int, **options: Any) -> instep.DataParallel:
    devices = [torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)] * replicas
    return instep.DataParallel(net, devices, engine="processes", **options)


def instep_sides(case: Case, replicas: int, stack: ExitStack) -> dict[str, Side]:
    """The sides that rank 0 runs alone."""
    batches = case.sample()

    def wrap(net: nn.Module, **options: Any) -> instep.DataParallel:
        return stack.enter_context(data_parallel(net, replicas, **options))

    model = wrap(case.module())
    sides = {"instep": training_side(model, batches), "instep, inference": inference_side(model, batches)}
    if case.has_batch_norm:
        sides["instep, sync_batchnorm=False"] = training_side(wrap(case.module(), sync_batchnorm=False), batches)
    elif len(batches[0].inputs) == 1:
        loss = wrap(instep.with_loss(case.module(), cross_entropy))
        sides["instep, with_loss"] = Side(lambda batch: loss(*batch.inputs, batch.target), batches, loss)
    return sides


def compare(rank: int, case: Case, replicas: int, rounds: int, steps: int) -> dict[str, Side]:
    """Run all sides alternately. The other ranks run only DDP's. The first time of each side is that of its first step.

    The warm-up is longer than the calls before which the probe of instep may run a trial: the last is the 32nd. As free
    collectives send nothing, instep sends its tensors through host memory until shortly before its end.
    """
    torch.manual_seed(0)
    shared = ddp_sides(case, replicas, rank)
    with ExitStack() as stack:
        own = instep_sides(case, replicas, stack) if rank == 0 else {}
        for number, count in enumerate((1, WARM_UP_STEPS, steps, *[steps] * rounds)):
            os.environ["INSTEP_NCCL"] = str(int(number > 1))
            for side in shared.values():
                dist.barrier()
                side.run(count)
            dist.barrier()
            for side in own.values():
                side.run(count)
            dist.barrier()
    rows: list[Any] = [None] * replicas
    dist.all_gather_object(rows, [side.times for side in shared.values()])
    for side, times in zip(shared.values(), zip(*rows, strict=True), strict=True):
        side.slowest_times = [max(of_ranks) for of_ranks in zip(*times, strict=True)]
    return {**shared, **own}


def work(rank: int, folder: str, names: list[str], replicas: int, rounds: int, steps: int) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    if SEPARATE:
        treat_as_separate_gpus()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=replicas)
    for name in names:
        sides = compare(rank, CASES[name], replicas, rounds, steps)
        if rank == 0:
            report(f"{name}, {replicas} replicas", sides)
        del sides
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def report(title: str, sides: dict[str, Side]) -> None:
    """Print the times of all sides, inference relative to the bare module's."""
    print(title)
    medians = {label: statistics.median(side.times[3:]) for label, side in sides.items()}
    slowest = {label: statistics.median(side.slowest_times[3:]) for label, side in sides.items() if side.slowest_times}
    for label, side in sides.items():
        base = "DDP" if side.training else "bare, inference"
        ratio = f"{medians[label] / medians[base]:8.2f} x {base}"
        if label in slowest:
            other = f"slowest rank {slowest[label]:.1f} ms"
        else:
            other = f"{medians[label] / slowest[base]:.2f} x its slowest rank"
        first = f"first step {side.times[0] / 1e3:.1f} s"
        print(f"  {label:32}{medians[label]:9.1f} ms{ratio:28}{other:28}{first}", flush=True)


@contextmanager
def mps(folder: str) -> Iterator[None]:
    """Context manager: processes that start inside it use the GPU at the same time."""
    if DEVICE == "cpu":
        yield
        return
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = folder
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    return parser


def main() -> None:
    parser = make_parser()
    parser.add_argument("--separate", action="store_true", help="treat replicas as if each had its own GPU")
    arguments = parser.parse_args()
    if arguments.separate:  # for the ranks and the workers, which import `free_group`
        folders = [os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]
        os.environ.update(SEPARATE="1", PYTHONPATH=os.pathsep.join(filter(None, folders)))
    names = [name for name in CASES if arguments.only in name]
    with tempfile.TemporaryDirectory() as pipes, mps(pipes):
        for replicas in arguments.replicas:
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // replicas)
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(work, (folder, names, replicas, arguments.rounds, arguments.steps), nprocs=replicas)


if __name__ == "__main__":
    if DEVICE == "cpu" or torch.cuda.device_count():  # does not initialize CUDA in this process
        main()
    else:
        print("this benchmark needs a CUDA device")
