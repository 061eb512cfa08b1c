"""`Group.all_gather` on every transport: rows in order, and an error where replicas disagree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import instep
from instep.collectives.exchange import gather_rows
from instep.collectives.group import current_context, exempt_collective

from ..replica_helpers import ENGINE_MODES, FunctionModule, assert_close, batch, check, replicated

pytestmark = pytest.mark.usefixtures("one_core")
each_way = pytest.mark.parametrize("way", ENGINE_MODES)


def gather(row: Tensor, label: str = "a test") -> Tensor:
    """Every replica's row; on one device a single row."""
    context = current_context()
    if context is None:
        exempt_collective()  # the probe runs parts of the batch on one device
        return row.detach()[None]
    return gather_rows(context, label, row)


def centered(self: Any, x: Tensor) -> Tensor:
    """Subtracts the mean of the whole batch, without its gradient, several times."""
    for _ in range(5):
        z = self.layer(x)
        total = gather(torch.cat([z.sum(0), z.new_tensor([float(len(z))])])).sum(0)
        x = self.other(x) + (z - total[:-1] / total[-1])[:, :1]
        x = x[:, :3]
    return x


@each_way
@pytest.mark.parametrize("replicas", [2, 4])
def test_whole_batch_statistics(way: str, replicas: int) -> None:
    check(centered, way, replicas=replicas)


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_rows_keep_their_order_shape_and_dtype(way: str, dtype: torch.dtype) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        info = instep.replica()
        for shape in [(), (1,), (2, 3), (0,), (3000, 9)]:
            expected = torch.stack([torch.full(shape, (i + 1) % 3).to(dtype) for i in range(info.count)])
            rows = gather(expected[info.index].clone())
            assert rows.dtype == dtype
            assert torch.equal(rows, expected), (rows, expected)
        return self.layer(x)

    x = batch()
    with replicated(FunctionModule(body), way) as (plain, model):
        assert_close(model(x), plain(x))


@each_way
def test_transposed_rows_without_gradients(way: str) -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        rows = gather(self.layer(x).sum(0).view(2, 2).t())
        assert not rows.requires_grad
        assert rows.shape == (instep.replica().count, 2, 2)
        return self.layer(x) * rows.sum(0).reshape(-1)

    check(body, way)


@each_way
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_modes(way: str, mode: Any) -> None:
    x = batch()
    with replicated(FunctionModule(centered), way) as (plain, model):
        for _ in range(3):
            with mode():
                assert_close(model(x), plain(x))
        assert_close(model(x), plain(x))
