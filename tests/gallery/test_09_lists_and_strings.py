"""Lists and strings as arguments: nn.DataParallel passes all of them to every replica."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

import instep

from .common import on_each_engine

NAMES = ["a", "b", "c", "d", "e"]


class Labelled(nn.Module):
    def forward(self, x: Tensor, names: list[str], targets: list[dict[str, int]]) -> list[str]:
        assert len(x) == len(names) == len(targets)
        return [f"{name}{target['id']}:{int(value)}" for name, target, value in zip(names, targets, x, strict=True)]


@on_each_engine
def test_lists_are_split_with_the_batch(engine: str) -> None:
    x, targets = torch.arange(5), [{"id": index} for index in range(5)]
    net = Labelled()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        assert model(x, NAMES, targets) == net(x, NAMES, targets) == ["a0:0", "b1:1", "c2:2", "d3:3", "e4:4"]


def test_torch_passes_the_whole_list_to_every_replica() -> None:
    assert scatter_gather.scatter(NAMES, [0, 1]) == [NAMES, NAMES]
