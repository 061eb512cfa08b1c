"""Devices of different speed and samples of different size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import StructureError, WrapError

from .common import on_each_engine, torch_scatter, train_both


class Sized(nn.Module):
    def forward(self, x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        return x, torch.full((len(x),), len(x))


def test_torch_splits_into_equal_counts() -> None:
    (_, long), (_, short) = torch_scatter(torch.randn(6, 2), torch.tensor([9, 1, 1, 3, 2, 2]), devices=2)
    assert (len(long), len(short)) == (3, 3)
    assert (int(long.sum()), int(short.sum())) == (11, 7)


@on_each_engine
def test_shares(engine: str) -> None:
    x, lengths = torch.randn(9, 2), [1] * 9
    with instep.DataParallel(Sized(), ["cpu"] * 2, engine=engine, shares=[2, 1], probe=False) as model:
        out, sizes = model(x, lengths)
    assert torch.equal(out, x)
    assert sizes.tolist() == [6] * 6 + [3] * 3


@on_each_engine
@pytest.mark.parametrize("cost", ["lengths", lambda lengths: torch.tensor(lengths)], ids=["name", "function"])
def test_cost(engine: str, cost: object) -> None:
    x, lengths = torch.randn(6, 2), [9, 1, 1, 3, 2, 2]
    with instep.DataParallel(Sized(), ["cpu"] * 2, engine=engine, cost=cost, probe=False) as model:  # type: ignore[arg-type]
        out, sizes = model(x, lengths)
        assert "1 on cpu, 5 on cpu" in str(model.explain(x, lengths))
        again, _ = model(x, lengths[::-1])
    assert torch.equal(out, x)
    assert torch.equal(again, x)
    assert sizes.tolist() == [1] + [5] * 5


@on_each_engine
def test_gradients_with_shares_equal_the_plain_modules(engine: str) -> None:
    x = torch.randn(7, 3)
    train_both(nn.Linear(3, 2), [x, x[:2]], lambda model, x: model(x).square().mean(), engine, 3, shares=[5, 1, 1])


def test_invalid_shares_and_costs_raise() -> None:
    with pytest.raises(WrapError, match="one positive number for each of the 2 devices"):
        instep.DataParallel(Sized(), ["cpu"] * 2, shares=[1])
    for cost, message in (("size", "names no argument"), (lambda lengths: lengths[:2], "2 numbers for a batch of 4")):
        model = instep.DataParallel(Sized(), ["cpu"] * 2, cost=cost)  # type: ignore[arg-type]
        with pytest.raises(StructureError, match=message):
            model(torch.randn(4, 2), [1] * 4)
