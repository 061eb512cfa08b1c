"""Row 25: `torch.nn.DataParallel` loses a buffer that forward reassigns (`self.b = self.b + 1`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.zeros(()))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b + 1
        self.total = self.total + x.sum(0)
        return x * self.b


def test_torchs_replica_does_not_update_the_modules_buffer() -> None:
    net: Any = Net()
    replica = net._replicate_for_data_parallel()
    replica(torch.randn(4, 3))
    assert (float(replica.b), float(net.b)) == (1, 0)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_reassigned_buffers_are_merged(engine: str) -> None:
    net, plain = Net(), Net()
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, state={"total": "sum"}) as model:
        for size in (5, 4, 7):
            x = torch.randn(size, 3)
            torch.testing.assert_close(model(x), plain(x))
            torch.testing.assert_close(dict(net.named_buffers()), dict(plain.named_buffers()))
    assert net.state_dict().keys() == plain.state_dict().keys()
