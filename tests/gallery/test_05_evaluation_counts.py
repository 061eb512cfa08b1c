"""Pitfall 5: evaluation repeats or drops samples; here counts are exact and order is kept, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import instep


class Evaluates(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor | int]:  # type: ignore[override]
        found = super().forward(x).argmax(1)
        return {"right": (found == y).sum(), "seen": len(x), "found": found}


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
@pytest.mark.parametrize("samples", [10, 11])
def test_counts_are_exact(engine: str, samples: int) -> None:
    net = Evaluates(3, 2)
    x = torch.randn(samples, 3)
    y = nn.functional.linear(x, net.weight, net.bias).argmax(1)
    y[1::3] = 1 - y[1::3]
    right = seen = 0
    found = []
    with torch.no_grad(), instep.DataParallel(net, ["cpu"] * 3, engine=engine) as model:
        for batch in torch.arange(samples).split(6):  # the last batch is smaller
            out = model(x[batch], y[batch])
            right, seen = right + int(out["right"]), seen + out["seen"]
            found.append(out["found"])
        whole = net(x, y)
    assert (right, seen) == (int(whole["right"]), samples)
    assert torch.equal(torch.cat(found), whole["found"])

    # One sampler a rank: samples are repeated until the ranks have equally many.
    ranks = [list(DistributedSampler(range(samples), 3, rank, shuffle=False)) for rank in range(3)]  # type: ignore[arg-type]
    assert sum(map(len, ranks)) == 12
