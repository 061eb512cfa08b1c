"""An argument that is meant for every replica is split like the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import StructureError

from .common import on_each_engine, torch_scatter


class Scored(nn.Module):
    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return x @ prototypes.T


def test_torch_splits_every_tensor() -> None:
    x, prototypes = torch.randn(6, 3), torch.randn(4, 3)
    outputs = [Scored()(*shard) for shard in torch_scatter(x, prototypes, devices=2)]
    assert [tuple(output.shape) for output in outputs] == [(3, 2), (3, 2)]  # two of the four scores per sample


@on_each_engine
@pytest.mark.parametrize("count", [4, 6])
def test_whole_and_in_dims_replicate_an_argument(engine: str, count: int) -> None:
    """Also if there are as many prototypes as samples."""
    x, prototypes = torch.randn(6, 3), torch.randn(count, 3)
    net = Scored()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, out_dims=0) as model:
        torch.testing.assert_close(model(x, instep.whole(prototypes)), net(x, prototypes))
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, in_dims={"prototypes": None}, out_dims=0) as model:
        torch.testing.assert_close(model(x, prototypes), net(x, prototypes))


@on_each_engine
def test_different_batch_sizes_raise_before_forward_runs(engine: str) -> None:
    with (
        instep.DataParallel(Scored(), ["cpu"] * 2, engine=engine) as model,
        pytest.raises(StructureError, match=r"(?s)prototypes.*in_dims.*whole"),
    ):
        model(torch.randn(6, 3), torch.randn(4, 3))
