"""Row 26: two forwards and one backward: "modified by an inplace operation", from buffers broadcast in between.

`DistributedDataParallel` broadcasts the first rank's buffers before each forward, changed or not. On the CPU, torch
2.13 hides these writes from autograd; where autograd sees them, the backward raises the error above. instep does not
write buffers that have not changed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import instep


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_writing_an_equal_value_breaks_the_backward() -> None:
    net = Scaled()
    first = net(torch.randn(4, 3))
    net.scale.copy_(net.scale.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_two_forwards_and_one_backward(engine: str, private: bool) -> None:
    net, plain = Scaled(), Scaled()
    plain.load_state_dict(net.state_dict())
    one, two = torch.randn(5, 3), torch.randn(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=private) as model:
        for module in (model, plain):
            (module(one).mean() + module(two).square().mean()).backward()
    torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad)
