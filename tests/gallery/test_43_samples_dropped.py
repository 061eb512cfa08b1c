"""Two arguments with different batch sizes: nn.DataParallel drops replicas and samples silently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import StructureError

from .common import on_each_engine, torch_scatter


class Both(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y])


def test_torch_drops_replicas_and_samples() -> None:
    shards = torch_scatter(torch.randn(8, 2), torch.randn(2, 2), devices=4)
    assert [(len(x), len(y)) for x, y in shards] == [(2, 1), (2, 1)]  # two replicas and half of the batch


@on_each_engine
def test_the_error_names_the_argument_that_does_not_fit(engine: str) -> None:
    with (
        instep.DataParallel(Both(), ["cpu"] * 4, engine=engine) as model,
        pytest.raises(StructureError, match=r"'y' \(Tensor \[2, 2\]\) for a batch of 8"),
    ):
        model(torch.randn(8, 2), torch.randn(2, 2))
