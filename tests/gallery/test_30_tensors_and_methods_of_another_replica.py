"""Row 30: plain tensors, cached devices and bound methods of a replica still belong to the first device.

Here unregistered tensors are copied to each replica, a device stored on the module is replaced by the replica's, and
bound methods are bound to the replica.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.replicas.replica import Replica
from instep.replicas.tensors import ParameterSharing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.shift = torch.ones(2)
        self.table = {"scale": torch.full((2,), 2.0)}
        self.run = self.through
        self.steps = [self.through, lambda y: y + self.shift]

    def through(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        owners = {id(self), id(self.run.__self__), id(self.steps[0].__self__)}
        assert len(owners) == 1, "a method is bound to another replica"
        return self.steps[1](self.steps[0](x)) * self.table["scale"]


def test_torchs_replica_runs_methods_of_the_module() -> None:
    """`torch.nn.parallel.replicate` copies `__dict__`, whose entries still refer to the original module."""
    net: Any = Net()
    replica = net._replicate_for_data_parallel()
    assert replica.shift is net.shift
    with pytest.raises(AssertionError, match="bound to another replica"):
        replica(torch.randn(2, 3))


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_tensors_and_bound_methods_belong_to_the_replica(engine: str) -> None:
    net = Net()
    x = torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine=engine, private_copies=True) as model:
        torch.testing.assert_close(model(x), net(x))
        model(x).sum().backward()
        gradient = net.layer.weight.grad.clone()
        net.shift = torch.zeros(2)
        net.table["scale"].mul_(2)
        torch.testing.assert_close(model(x), net(x))
    net.zero_grad()
    net.table["scale"].div_(2)
    net(x).sum().backward()
    torch.testing.assert_close(gradient, net.layer.weight.grad)


def test_a_stored_device_is_the_replicas() -> None:
    """The meta device stands for a second device."""
    net: Any = Net()
    net.device, net.other = torch.device("cpu"), torch.device("cuda", 3)
    on_meta = Replica(1, net, torch.device("meta"), ParameterSharing.COPY, source_device=torch.device("cpu"))
    replica: Any = on_meta.module
    assert (replica.device, replica.other) == (torch.device("meta"), torch.device("cuda", 3))
    assert {t.device.type for t in (replica.shift, replica.table["scale"], replica.layer.weight)} == {"meta"}
