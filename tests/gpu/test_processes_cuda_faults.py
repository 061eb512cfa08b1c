"""Faults of worker processes on CUDA: killed workers, no memory, and device memory that cannot be shared."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.errors import WorkerFailure
from instep.runtime.process_role import inside_worker

from ..all_features import Net
from ..system_usage import assert_gone
from .sharing import each_transport, kill_worker, mlp, pids, wrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpu_workers"),
]


def train(phases: Sequence[str], private: bool) -> Net:
    """Train for one step per phase. In a phase a worker is killed; a step that fails is run again from its start."""
    torch.manual_seed(0)
    net = Net().double()
    with wrap(net, [0, 0, 0], private, merge={"penalty": "mean"}, restarts=10**6) as model:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model(torch.randn(7, 4).double())
        for phase in phases:
            saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), net.steps))
            rng_states = torch.get_rng_state(), torch.cuda.get_rng_state()
            try:
                run_step(model, optimizer, phase)
            except WorkerFailure:
                assert not private  # replicas exchange nothing on the device
                assert phase in ("forward", "backward")
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                net.steps = saved[2]
                torch.set_rng_state(rng_states[0])
                torch.cuda.set_rng_state(rng_states[1])
                run_step(model, optimizer, "none")
    return net


def run_step(model: instep.DataParallel, optimizer: torch.optim.Optimizer, phase: str) -> None:
    x = torch.randn(7, 4).double()
    kill = threading.Timer(0.002, os.kill, (pids(model)[-1], signal.SIGKILL))
    try:
        if phase == "forward":
            kill.start()
        out = model(x)
        if phase == "between":
            torch.cuda.synchronize()
            kill_worker(model, 2)
        if phase == "backward":
            kill.start()
        optimizer.zero_grad()
        (out.square().mean() + 0.1 * model.penalty).backward()
        torch.cuda.synchronize()
        if any(parameter.grad.isnan().any() for parameter in model.parameters() if parameter.grad is not None):
            model(x)  # raises: the worker was killed before its device had computed the gradients
        optimizer.step()
        if phase == "idle":
            torch.cuda.synchronize()
            kill_worker(model, 2)
    finally:
        if kill.ident is not None:
            kill.join()


@pytest.mark.timeout(240)
@each_transport
def test_killed_workers_do_not_change_the_results(private: bool) -> None:
    phases = ["none", "forward", "between", "backward", "idle", "none"]
    undisturbed = train(["none"] * len(phases), private)
    disturbed = train(phases, private)
    assert disturbed.steps == undisturbed.steps
    for (name, theirs), mine in zip(undisturbed.state_dict().items(), disturbed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


SCRIPT = """
import os, sys, torch, instep
net = torch.nn.Linear(4, 3).cuda()
model = instep.DataParallel(net, [0, 0], engine="processes")
model(torch.randn(6, 4)).sum().backward()
print("worker", model._instep_engine._pool.get(1).pid, flush=True)
while True:
    model(torch.randn(6, 4)).sum().backward()
"""


def test_a_killed_parent_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, cwd=tmp_path, env=variables
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[1])
        time.sleep(0.3)
        parent.kill()
    assert_gone(pid, before, tmp_path)


class RunsOutOfMemory(nn.Module):
    """Runs out of memory in a worker if a sample has an extreme value, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if inside_worker() and x.detach().max() > 100:
            torch.empty(2**44, dtype=torch.uint8, device=x.device)
        if inside_worker() and x.detach().min() < -100:
            y.register_hook(lambda _: [None, torch.empty(2**44, dtype=torch.uint8, device="cuda")][0])
        return y


class FailsInWorker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if inside_worker() and x.detach().max() > 100:
            raise KeyError("no luck")
        return self.layer(x)


@pytest.mark.parametrize("value", [200.0, -200.0], ids=["forward", "backward"])
@each_transport
def test_out_of_memory_in_a_worker_raises_and_the_next_call_works(private: bool, value: float) -> None:
    net = RunsOutOfMemory()
    with wrap(net, [0, 0], private, hooks="per_replica") as model:
        x = torch.randn(6, 4, device="cuda")
        before = pids(model)
        for _ in range(2):
            bad = x.clone()
            bad[-1, 0] = value
            with pytest.raises(torch.OutOfMemoryError) as caught:
                model(bad).sum().backward()
            assert "replica 1 on cuda:0" in "\n".join(caught.value.__notes__)
            assert net.layer.weight.grad is None
            torch.testing.assert_close(model(x), net(x))
        assert pids(model) == before


def test_an_exception_keeps_its_type() -> None:
    net = FailsInWorker()
    with wrap(net, [0, 0]) as model:
        x = torch.randn(6, 4, device="cuda")
        model(x)
        bad = torch.cat([x[:3], x[3:] + 200])
        with pytest.raises(KeyError, match="no luck") as caught:
            model(bad)
        assert "replica 1 on cuda:0" in "\n".join(caught.value.__notes__)
        torch.testing.assert_close(model(x), net(x))


class ReportsMemory(nn.Module):
    """Also returns the memory that torch has reserved in its process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        return self.net(x), [torch.cuda.memory_reserved()] * len(x)


@each_transport
def test_device_memory_does_not_grow(private: bool) -> None:
    net = ReportsMemory().cuda()
    with wrap(net, [0, 0, 0], private) as model:
        seen = []
        for step in range(30):
            net.zero_grad()
            out, reserved = model(torch.randn(64, 6))
            out.square().sum().backward()
            if step in (9, 29):
                seen.append(sorted(set(reserved)))
        assert all(later - before < 2**23 for before, later in zip(*seen, strict=True))


def test_repr_and_explain_show_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Linear(4, 3).cuda(), torch.randn(5, 4)
    with wrap(net, [0, 0, "cpu"]) as model:
        model(x)
        assert "tensors are sent through CUDA IPC or host memory" in str(model.explain(x))
    with wrap(nn.Linear(4, 3), [0, 0], private=True) as model:
        model(x)
        assert "tensors are sent through host memory)" in repr(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise DriverError("not in this container")

    instep.shutdown()
    monkeypatch.setattr("instep.engines.processes.controller.client.allocate_shared", refuse)
    with wrap(net, [0, 0]) as model:
        model(x).sum().backward()
        torch.testing.assert_close(model(x), net(x.cuda()))
        assert "device memory cannot be shared here (not in this container)" in repr(model)


def test_fallback_if_shared_device_memory_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = mlp().cuda(), torch.randn(5, 6)
    with wrap(net, [0, 0]) as model:
        model(x)
        monkeypatch.setattr(DeviceMemory, "handle", property(lambda _: b"?" * 64, lambda *_: None), raising=False)
        net[0] = nn.Linear(6, 64).cuda()
        for _ in range(2):
            net.zero_grad()
            out = model(x)
            torch.testing.assert_close(out, net(x.cuda()))
            out.sum().backward()
        assert "device memory cannot be shared here (cuIpcOpenMemHandle" in repr(model)
    instep.shutdown()


def test_weights_are_moved_to_shared_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place updates are not sent. If a weight gets other memory, the worker is notified."""

    def fail(*_: Any) -> None:
        raise AssertionError("the module was sent through host memory")

    net = mlp().double().cuda()
    before = net[0].weight.data_ptr()
    with wrap(net, [0, 0]) as model:
        x = torch.randn(6, 6, device="cuda", dtype=torch.float64)
        model(x)
        monkeypatch.setattr("instep.engines.processes.controller.shared_parameters.HostStagingCopy.refresh", fail)
        monkeypatch.setattr("instep.engines.processes.transport.connection.DeviceReceiver.copy_to_device", fail)
        assert net[0].weight.data_ptr() != before
        for _ in range(2):
            with torch.no_grad():
                net[0].weight.add_(0.1)
            torch.testing.assert_close(model(x), net(x))
        net[0].weight.data = net[0].weight.data.clone() * 2
        torch.testing.assert_close(model(x), net(x))
        net.load_state_dict(mlp().double().state_dict())
        torch.testing.assert_close(model(x), net(x))
    torch.testing.assert_close(net(x), copy.deepcopy(net)(x))


def test_device_memory_is_freed_with_the_module() -> None:
    def shared_bytes() -> int:
        gc.collect()
        return sum(m.nbytes for m in gc.get_objects() if isinstance(m, DeviceMemory) and m.nbytes >= 2**26)

    before = shared_bytes()
    net = nn.Linear(4096, 4096).cuda()
    with wrap(net, [0, 0]) as model:
        model(torch.randn(4, 4096)).sum().backward()
        assert shared_bytes() - before >= 2 * 2**26  # the weights, and a slot for their gradients
    del net, model
    with wrap(nn.Linear(4, 3), [0, 0]) as other:
        other(torch.randn(4, 4))
    assert shared_bytes() == before


def test_tensors_larger_than_the_ring_buffer() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"twice": x * 2 * self.scale, "half": (x[:, :1] / 2).half(), "none": x[:, :0], "bool": x > 0}

    net = Big().cuda()
    with wrap(net, [0, 0], probe=False) as model:
        for size in (10, 3_000_000, 70, 9_000_000):
            x = torch.randn(4, size, device="cuda", requires_grad=True)
            out = model(x)
            out["twice"].sum().backward()
            torch.testing.assert_close(
                {k: v.detach() for k, v in out.items()}, {k: v.detach() for k, v in net(x).items()}
            )
            assert (x.grad == 2).all()
