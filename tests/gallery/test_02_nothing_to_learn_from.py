"""A shard without targets or with a zero loss: with DDP, every other rank waits for it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .common import on_each_engine, train_both


class Detector(nn.Module):
    """Returns the loss of the samples that have boxes, or None if no sample has any."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(3, 1)

    def forward(self, images: Tensor, boxes: list[list[float]]) -> Tensor | None:
        kept = [index for index, found in enumerate(boxes) if found]
        if not kept:
            return None
        targets = torch.tensor([sum(boxes[index]) for index in kept])
        out: Tensor = (self.score(images[kept]).squeeze(1) - targets).square().sum()
        return out


BOXES: list[list[float]] = [[1.0], [2.0, 3.0], [], [], []]


def run_rank(rank: int) -> str:
    """What happens on a rank of DistributedDataParallel when the other rank has no loss."""
    model = DistributedDataParallel(Detector(), process_group=dist.new_group(timeout=timedelta(seconds=1)))
    loss = model(torch.randn(2, 3), BOXES[:2] if rank == 0 else BOXES[3:])
    outcome = "had no loss"
    if loss is not None:
        try:
            loss.backward()
            outcome = "continued"
        except RuntimeError as error:
            outcome = f"waited: {error}"
    dist.barrier()  # both ranks arrive here
    return outcome


def test_the_other_rank_waits_until_its_timeout(two_ranks: dict[str, list[Any]]) -> None:
    first, second = two_ranks["test_02_nothing_to_learn_from"]
    assert second == "had no loss"
    assert first.startswith("waited: ")
    assert "Timed out" in first


@on_each_engine
def test_a_shard_without_targets(engine: str) -> None:
    train_both(Detector(), [torch.randn(5, 3)] * 2, lambda model, x: model(x, BOXES), engine, merge="sum")


class Detached(nn.Module):
    """Returns a constant without a gradient for a shard of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 0).all()):
            return torch.zeros(len(x), 1)
        out: Tensor = self.layer(x)
        return out


@on_each_engine
def test_a_shard_whose_output_needs_no_gradient(engine: str) -> None:
    x = torch.cat([torch.randn(3, 3), torch.zeros(2, 3)])

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)[:3].square().sum()
        return out

    train_both(Detached(), [x, x], loss, engine)
