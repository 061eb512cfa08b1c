"""Lists and strings beside a batch: every replica is handed all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

import instep

from .side_by_side import on_each_engine

NAMES = ["a", "b", "c", "d", "e"]


class Labelled(nn.Module):
    def forward(self, x: Tensor, names: list[str], targets: list[dict[str, int]]) -> list[str]:
        assert len(x) == len(names) == len(targets)
        return [f"{name}{target['id']}:{int(value)}" for name, target, value in zip(names, targets, x, strict=True)]


@on_each_engine
def test_columns_are_sliced_with_the_batch(engine: str) -> None:
    x, targets = torch.arange(5), [{"id": index} for index in range(5)]
    net = Labelled()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        assert model(x, NAMES, targets) == net(x, NAMES, targets) == ["a0:0", "b1:1", "c2:2", "d3:3", "e4:4"]


def test_torch_hands_every_replica_all_of_them() -> None:
    assert scatter_gather.scatter(NAMES, [0, 1]) == [NAMES, NAMES]
