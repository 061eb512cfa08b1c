"""Pitfall 13: dataclass outputs fail in torch's gather; here they are merged field by field."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather

import instep


@dataclass
class Result:
    scores: Tensor
    loss: Tensor
    samples: int
    name: str


class Net(nn.Linear):
    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        scores = super().forward(x)
        return Result(scores, scores.pow(2).mean(), len(x), "net")


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_dataclass_outputs_are_merged_by_field(engine: str) -> None:
    net, x = Net(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine) as model:
        ours, plain = model(x), net(x)
    assert type(ours) is Result
    assert (ours.samples, ours.name) == (5, "net")
    torch.testing.assert_close(ours.scores, plain.scores)
    torch.testing.assert_close(ours.loss, plain.loss)

    with pytest.raises((TypeError, AssertionError, AttributeError)):
        gather([net(x[:3]), net(x[3:])], torch.device("cpu"))
