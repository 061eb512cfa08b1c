"""Workers on other GPUs that reach the memory of the caller's, tested with workers that share a GPU.

They are treated as if each had its own: weights and gradients are copies, sent by NCCL or through host memory. Batches,
outputs and what replicas exchange in forward and backward go through memory on the caller's GPU.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.controller import client, nccl_manager, remote_replica
from instep.errors import WorkerFailure
from instep.runtime.torch_private import nccl_group_class

from ..all_features import Net
from .sharing import kill_worker, mlp, pids, wrap
from .test_nccl import HOSTS, wait_for_group_threads
from .test_stream_order import FailsInWorker, conv_net, no_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or nccl_group_class() is None, reason="needs a CUDA device and NCCL"
    ),
]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, gpu_workers: Any) -> Iterator[None]:
    """Treat replicas that share a GPU as replicas on different GPUs that reach each other."""
    monkeypatch.setattr(nccl_manager, "are_distinct_gpus", lambda _: True)
    monkeypatch.setattr(nccl_manager, "EXTRA_ENVIRONMENT", HOSTS)
    monkeypatch.setattr(remote_replica, "is_same_accelerator", lambda *_: False)
    monkeypatch.setattr(remote_replica, "can_reach", lambda *_: True)
    yield
    nccl_manager.abort_all_groups()


def train(model: nn.Module, net: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_uses_peer_access(model: instep.DataParallel) -> None:
    engine: Any = model._instep_engine
    assert set(engine.ipc_status.values()) == {""}
    assert engine._needs_no_threads


@pytest.mark.usefixtures("peers")
@pytest.mark.timeout(100)
@pytest.mark.parametrize("with_nccl", [True, False], ids=["nccl", "host-memory"])
@pytest.mark.parametrize("make", [mlp, conv_net])
def test_training_equals_one_device(make: Any, with_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_NCCL", str(int(with_nccl)))
    memory: list[Tensor | None] = []
    find = nccl_manager.find_shared_memory
    monkeypatch.setattr(nccl_manager, "find_shared_memory", lambda run: memory.append(find(run)) or memory[-1])
    torch.manual_seed(0)
    net = make().double().cuda()
    plain = copy.deepcopy(net)
    shape = (6,) if make is mlp else (4, 6, 6)
    batches = [torch.randn(size, *shape, device="cuda", dtype=torch.float64) for size in (9, 9, 7, 9, 2, 9, 8)]
    with wrap(net, [0, 0, 0]) as model:
        losses = train(model, net, batches)
        assert_uses_peer_access(model)
        engine: Any = model._instep_engine
        assert (engine._nccl._group is not None) == with_nccl
        assert bool(memory) == with_nccl
        assert all(found is not None for found in memory)  # the weights are broadcast from where they are
        if make is conv_net:
            assert engine._row_memory.device_rows is not None
    assert losses == pytest.approx(train(plain, plain, batches), rel=1e-9)
    torch.testing.assert_close(net.state_dict(), plain.state_dict())


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("make", [mlp, conv_net])
def test_the_caller_does_not_wait_for_the_device_in_a_warm_step(make: Any) -> None:
    torch.manual_seed(0)
    net = make().cuda()
    shape = (6,) if make is mlp else (4, 6, 6)
    with wrap(net, [0, 0]) as model:
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, foreach=True)
        for step in range(12):
            x = torch.randn(12, *shape, device="cuda")
            with no_waits() if step >= 8 else torch.enable_grad():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize()
        assert_uses_peer_access(model)


@pytest.mark.usefixtures("peers")
def test_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, batch normalization, tensors stored on the module, and state: as without peer access."""
    found = []
    for reaches in (True, False):
        monkeypatch.setattr(remote_replica, "can_reach", lambda *_, reaches=reaches: reaches)
        torch.manual_seed(0)
        net = Net().double().cuda()
        with wrap(net, [0, 0, 0], merge={"penalty": "mean"}) as model:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                x = torch.randn(7, 4, dtype=torch.float64, device="cuda")
                (model(x).square().mean() + 0.1 * model.penalty).backward()
                optimizer.step()
        found.append(net.state_dict())
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("peers")
@pytest.mark.timeout(100)
def test_workers_that_are_killed_while_idle_are_replaced() -> None:
    torch.manual_seed(0)
    net = conv_net().double().cuda()
    plain = copy.deepcopy(net)
    batches = [torch.randn(8, 4, 6, 6, device="cuda", dtype=torch.float64) for _ in range(5)]
    with wrap(net, [0, 0, 0]) as model:
        losses = train(model, net, batches[:3])
        kill_worker(model, 1)
        losses += train(model, net, batches[3:4])
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        optimizer.zero_grad()
        loss = model(batches[4]).square().mean()
        kill_worker(model, 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(train(plain, plain, batches), rel=1e-9)
    wait_for_group_threads()


@pytest.mark.usefixtures("peers")
@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_while_its_device_computes() -> None:
    net = FailsInWorker("sleep").cuda()
    with wrap(net, [0, 0], merge={"": "cat"}) as model:
        x = torch.randn(6, 4, device="cuda")
        for _ in range(4):
            model(x, bad=False)
        assert_uses_peer_access(model)
        y = model(x, bad=True).detach()
        os.kill(pids(model)[0], signal.SIGKILL)
        torch.cuda.synchronize()
        assert y[3:].isnan().all()
        with pytest.raises(WorkerFailure, match="NaN"):
            model(x)
        torch.testing.assert_close(model(x), net(x))
    wait_for_group_threads()


@pytest.mark.usefixtures("peers")
@pytest.mark.timeout(100)
def test_memory_that_does_not_arrive_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "holds_byte", lambda *_: False)
    net = mlp().cuda()
    with wrap(net, [0, 0]) as model:
        kill_worker(model, 1)  # a new one tests it anew
        x = torch.randn(6, 6, device="cuda")
        torch.testing.assert_close(model(x), net(x))
        assert "does not arrive" in repr(model)
        model(x).sum().backward()
    wait_for_group_threads()
