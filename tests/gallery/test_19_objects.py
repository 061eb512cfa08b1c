"""Pitfall 19: torch cannot gather strings and objects; here they are merged, or the error names what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather

import instep


class Box:
    def __init__(self, corners: list[float]) -> None:
        self.corners = corners


class Net(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Any]:
        out = super().forward(x)
        rows = out.tolist()
        return {
            "boxes": [Box(row) for row in rows],
            "records": [{"best": max(row), "text": f"{index}"} for index, row in enumerate(rows)],
        }


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_one_object_per_sample_is_merged(engine: str) -> None:
    net, x = Net(3, 2), torch.randn(5, 3)
    options: Any = {"engine": engine, "merge": {"records": "list"}}  # "text" counts from the start of each shard
    with instep.DataParallel(net, ["cpu"] * 2, **options) as model:
        ours, plain = model(x), net(x)
    assert [box.corners for box in ours["boxes"]] == [pytest.approx(box.corners) for box in plain["boxes"]]
    assert [r["best"] for r in ours["records"]] == [pytest.approx(r["best"]) for r in plain["records"]]


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_records_that_depend_on_the_shard_raise(engine: str) -> None:
    with (
        instep.DataParallel(Net(3, 2), ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"'records'.*not the same entries"),
    ):
        model(torch.randn(5, 3))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_one_object_per_batch_raises_and_names_register(engine: str) -> None:
    class One(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Box(super().forward(x).sum().tolist())

    with (
        instep.DataParallel(One(3, 2), ["cpu"] * 2, engine=engine) as model,
        pytest.raises(instep.MergeError, match=r"instep\.register\(Box"),
    ):
        model(torch.randn(5, 3))


def test_torch_does_not_gather_objects() -> None:
    with pytest.raises(TypeError, match="'Box' object is not iterable"):
        gather([Box([1.0]), Box([2.0])], torch.device("cpu"))
