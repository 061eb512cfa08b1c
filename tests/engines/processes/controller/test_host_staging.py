"""Staging of a module's tensors in host memory, tested with CPU replicas."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.transport.copy_streams import (
    StagedTensor,
    copy_all_to_device,
    copy_all_to_host,
    fetch_to_device,
)
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.errors import CannotCross


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers copy parameters from a host staging copy, although they could map them."""
    monkeypatch.setattr("instep.engines.processes.controller.remote_module.needs_staging", lambda _: True)
    monkeypatch.setattr("instep.engines.processes.controller.remote_module.needs_device_copies", lambda _: True)


class Net(nn.Module):
    """Weights that share a storage, a buffer that moves, statistics, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("part", self.table[2:4])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.last(self.norm(self.first(x)).relu()) * self.scale + self.table + self.part.sum()


@pytest.mark.usefixtures("far", "workers")
def test_training_with_a_staging_copy() -> None:
    net = Net().double()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes", state={"seen": "sum"}) as model:
        ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (net, plain))
        for step in range(4):
            x = torch.randn(7, 4).double().requires_grad_()
            y = x.detach().clone().requires_grad_()
            outs = model(x), plain(y)
            torch.testing.assert_close(*outs)
            for out, optimizer in zip(outs, (ours, theirs), strict=True):
                optimizer.zero_grad()
                out.square().mean().backward()
                optimizer.step()
            torch.testing.assert_close(x.grad, y.grad)
            if step == 1:
                with torch.no_grad():
                    net.table.add_(1)
                    plain.table.add_(1)
        torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.usefixtures("far")
def test_a_death_between_forward_and_backward() -> None:
    net = Net().double()
    plain = copy.deepcopy(net)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes", state={"seen": "sum"}) as model:
        x = torch.randn(5, 4).double()
        out, expected = model(x), plain(x)
        engine: Any = model._instep_engine
        os.kill(engine._pool.get(1).pid, signal.SIGKILL)
        out.square().sum().backward()
        expected.square().sum().backward()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.usefixtures("far", "workers")
def test_nothing_is_copied_while_the_module_is_frozen() -> None:
    net = nn.Linear(4, 3)
    x = torch.randn(6, 4)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        with model.frozen():
            before = model(x)
            with torch.no_grad():
                net.weight.add_(1)
            after = model(x)
            torch.testing.assert_close(after[3:], before[3:])
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.slow
@pytest.mark.usefixtures("far", "workers")
def test_a_staging_copy_that_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with instep.DataParallel(nn.Linear(400, 300), ["cpu"] * 2, engine="processes", private_copies=True) as model:
        monkeypatch.setattr("instep.engines.processes.transport.shared_memory.available_memory", lambda: 300_000)
        with pytest.raises(
            CannotCross, match=r"a copy of the module's tensors .* shared memory[\s\S]*engine='threads'"
        ):
            model(torch.randn(6, 400))


def test_staged_tensors_round_trip_through_shared_memory() -> None:
    memory = SharedMemory.create(4096)
    tensors = [torch.randn(3, 5), torch.arange(7), torch.randn(2, 2).double().t(), torch.empty(0), torch.randn(4)]
    offsets = [0, 64, 128, 192, 2048]
    copy_all_to_host(memory, [StagedTensor(offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)])
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    copy_all_to_device(memory, [StagedTensor(offset, tensor) for offset, tensor in zip(offsets, targets, strict=True)])
    fetched = fetch_to_device(memory, list(zip(offsets, targets, strict=True)), torch.device("cpu"))
    for sent, target, found in zip(tensors, targets, fetched, strict=True):
        assert torch.equal(sent, target)
        assert torch.equal(sent, found)
