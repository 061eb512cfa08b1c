"""Pitfall 5: evaluation repeats or drops samples; here counts are exact and the order is kept for any batch size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import instep


class Classifier(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor | int]:  # type: ignore[override]
        predicted = super().forward(x).argmax(1)
        return {"right": (predicted == y).sum(), "seen": len(x), "predicted": predicted}


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("samples", [10, 11])
def test_counts_are_exact(engine: str, samples: int) -> None:
    net = Classifier(3, 2)
    x = torch.randn(samples, 3)
    y = nn.functional.linear(x, net.weight, net.bias).argmax(1)
    y[1::3] = 1 - y[1::3]
    right = seen = 0
    predicted = []
    with torch.no_grad(), instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for batch in torch.arange(samples).split(6):  # the last batch is smaller
            out = model(x[batch], y[batch])
            right, seen = right + int(out["right"]), seen + out["seen"]
            predicted.append(out["predicted"])
        expected = net(x, y)
    assert (right, seen) == (int(expected["right"]), samples)
    assert torch.equal(torch.cat(predicted), expected["predicted"])

    # DistributedSampler repeats samples until all ranks have the same number.
    ranks = [list(DistributedSampler(range(samples), 3, rank, shuffle=False)) for rank in range(3)]  # type: ignore[arg-type]
    assert sum(map(len, ranks)) == 12
