"""Helpers of the gallery: training with and without instep, and torch's own wrappers where they run on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

import instep

on_each_engine = pytest.mark.parametrize("engine", ["serial", "threads", "processes"])


def train_both(
    net: nn.Module,
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    engine: str,
    replicas: int = 2,
    **options: Any,
) -> tuple[nn.Module, list[Tensor]]:
    """Train a copy plainly and the module with instep. Asserts equal losses in each step and equal final weights."""
    plain = copy.deepcopy(net)
    theirs, ours = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, net))
    losses = []
    with instep.DataParallel(net, ["cpu"] * replicas, engine=engine, **options) as model:
        for batch in batches:
            values = []
            for module, optimizer in ((plain, theirs), (model, ours)):
                optimizer.zero_grad()
                value = loss(module, batch)
                value.backward()
                optimizer.step()
                values.append(value.detach())
            torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)
            losses.append(values[0])
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert (mine.grad is None) == (other.grad is None)
    return net, losses


class _ChunkOnly:
    """Replaces torch's `Scatter`: splits in the same way, but does not copy the chunks to GPUs."""

    @staticmethod
    def apply(devices: Sequence[int], _: None, dim: int, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(len(devices), dim)


def torch_scatter(*args: Any, devices: int) -> list[Any]:
    """The arguments that `nn.DataParallel` passes to its replicas, from torch's own code without the copies to GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter_gather, "Scatter", _ChunkOnly)
        shards, _ = scatter_gather.scatter_kwargs(args, {}, list(range(devices)))
    return list(shards)


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A process group with this process only, which is enough to see some errors of DistributedDataParallel."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
