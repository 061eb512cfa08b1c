"""A shard without targets, or with a loss of zero, on which every other rank waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .side_by_side import on_each_engine, train_beside


class Detector(nn.Module):
    """Returns a loss only for samples that have boxes, and None where a shard has none."""

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


def on_a_rank(rank: int) -> str:
    """How a rank of DistributedDataParallel fares when the other one has nothing to learn from."""
    model = DistributedDataParallel(Detector(), process_group=dist.new_group(timeout=timedelta(seconds=1)))
    loss = model(torch.randn(2, 3), BOXES[:2] if rank == 0 else BOXES[3:])
    said = "had no loss"
    if loss is not None:
        try:
            loss.backward()
            said = "went on"
        except RuntimeError as error:
            said = f"waited: {error}"
    dist.barrier()  # the other one is there, and waits as well
    return said


def test_the_other_rank_waits_until_its_timeout(two_ranks: dict[str, list[Any]]) -> None:
    first, second = two_ranks["test_02_nothing_to_learn_from"]
    assert second == "had no loss"
    assert first.startswith("waited: ")
    assert "Timed out" in first


@on_each_engine
def test_a_shard_without_targets(engine: str) -> None:
    train_beside(Detector(), [torch.randn(5, 3)] * 2, lambda model, x: model(x, BOXES), engine, merge="sum")


class Detached(nn.Module):
    """Gives a constant, which needs no gradient, where a shard has nothing to learn from."""

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

    train_beside(Detached(), [x, x], loss, engine)
