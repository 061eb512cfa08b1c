"""NCCL between worker processes: at world size 1, and with workers that share a GPU.

NCCL refuses two ranks on one GPU unless they seem to be on different hosts. Then it connects them by sockets, here on
the loopback interface. Nothing else differs from one GPU per rank.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.collectives.buckets import gradient_buckets
from instep.engines.processes.controller import nccl_manager
from instep.engines.processes.messages import JoinGroupRequest
from instep.engines.processes.nccl.broadcast import broadcast_coalesced
from instep.engines.processes.nccl.bucket_reducer import BucketReducer
from instep.engines.processes.nccl.group import NCCL_ENVIRONMENT, GroupAborted, NcclGroup
from instep.engines.processes.transport.copy_streams import StagedTensor
from instep.runtime.torch_private import nccl_group_class

from ..all_features import Net
from ..interference import run_before_next_call
from ..system_usage import assert_gone, sockets_of, wait_for_threads
from .sharing import mlp, pids, wrap
from .test_processes_cuda_faults import FailsInWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or nccl_group_class() is None, reason="needs a CUDA device and NCCL"
    ),
]

NCCL_TIMEOUT = {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "10"}
"""Torch reads the variable once per process, so all tests use the same value."""
HOSTS = {rank: {"NCCL_HOSTID": f"instep-{rank}", "NCCL_IB_DISABLE": "1", **NCCL_TIMEOUT} for rank in range(4)}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch, gpu_workers: Any) -> Iterator[None]:
    """Treat replicas that share a GPU as replicas on different GPUs."""
    monkeypatch.setattr(nccl_manager, "are_distinct_gpus", lambda _: True)
    monkeypatch.setattr(nccl_manager, "EXTRA_ENVIRONMENT", HOSTS)
    yield
    nccl_manager.abort_all_groups()


def controller_group(model: instep.DataParallel) -> Any:
    engine: Any = model._instep_engine
    return engine._nccl._group


def listening(pid: int | str = "self") -> set[str]:
    """The addresses that a process listens on, in the format of /proc."""
    inodes = sockets_of(pid)
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def single_rank_group(first: int = 0) -> NcclGroup:
    request = JoinGroupRequest("nccl", 0, 1, torch.device("cuda", 0), NCCL_ENVIRONMENT | NCCL_TIMEOUT, first)
    group = NcclGroup(request, os.memfd_create("store"), os.eventfd(0))
    group.connect()
    return group


def test_a_group_of_one_rank() -> None:
    variables = dict(os.environ)
    single_rank_group().abort("the first group of a process starts threads that stay")
    descriptors, files = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    group = single_rank_group(first=7)
    assert dict(os.environ) == variables
    assert not torch.distributed.is_initialized()
    tensors = [torch.randn(n, device="cuda").view(torch.uint8) for n in (3, 70, 20_000_000, 1)]
    expected = [tensor.clone() for tensor in tensors]
    with group.collective(8):
        broadcast_coalesced(
            group, [StagedTensor(offset, t) for offset, t in zip((0, 64, 384, 80_000_384), tensors, strict=True)]
        )
    assert all(map(torch.equal, tensors, expected))
    like = [torch.randn(5, 3), torch.randn(7).bfloat16(), torch.randn(2, 2), torch.randn(9).half(), torch.randn(1)]
    like = [tensor.cuda() for tensor in like]
    buckets = gradient_buckets(like)
    assert len(buckets) == 3
    sizes = [tensor.numel() for tensor in like]
    with group.collective(9):
        sums = BucketReducer(group, buckets, sizes, lambda index: like[index] if index < 4 else None).finish()
    for bucket, flat in zip(buckets, sums, strict=True):
        for index, part in zip(bucket.indices, flat.split([sizes[i] for i in bucket.indices]), strict=True):
            assert torch.equal(part, like[index].flatten() if index < 4 else torch.zeros_like(part))
    assert listening() <= LOOPBACK
    group.abort("it is over")
    with pytest.raises(GroupAborted, match="it is over"):
        group.broadcast(tensors[0])
    del group
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert set(os.listdir("/dev/shm")) <= files
    assert not listening()


def train(
    model: nn.Module, net: nn.Module, during: Callable[[int, str], None] = lambda *_: None, steps: int = 4
) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for step in range(steps):
        x = torch.randn(9, 6, device="cuda", dtype=torch.float64)
        during(step, "forward")
        out = model(x)
        during(step, "backward")
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()


@pytest.mark.usefixtures("nccl")
@pytest.mark.timeout(100)
@pytest.mark.parametrize("count", [2, 4])
def test_weights_and_gradients_are_sent_by_nccl(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results equal the plain module's and those by host memory; with two replicas the latter exactly."""
    torch.manual_seed(0)
    net = mlp().double().cuda()
    plain, by_host = copy.deepcopy(net), copy.deepcopy(net)
    with wrap(net, [0] * count, private=True, probe=False) as model:
        model(torch.randn(count, 6).double())
        group = controller_group(model).process_group
        with monkeypatch.context() as patch:
            patch.setattr("instep.engines.processes.controller.shared_parameters.HostStagingCopy.refresh", refuse)
            patch.setattr("instep.engines.processes.controller.remote_module.fetch_to_device", refuse)
            train(model, net)
        assert controller_group(model).process_group is group
        assert group.last_sequence_number == controller_group(model).sequence_base + 9
        assert "weights and gradients by NCCL" in repr(model)
        for pid in ("self", *pids(model)):
            assert listening(pid) <= LOOPBACK
    train(plain, plain)
    monkeypatch.setenv("INSTEP_NCCL", "0")
    with wrap(by_host, [0] * count, private=True, probe=False) as model:
        train(model, by_host)
        assert controller_group(model) is None
    for mine, theirs, host in zip(*(n.parameters() for n in (net, plain, by_host)), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine, host, rtol=1e-12, atol=1e-12)
        assert count > 2 or torch.equal(mine, host)


def refuse(*_: Any) -> None:
    raise AssertionError("a tensor was sent through host memory")


@pytest.mark.usefixtures("nccl")
def test_autocast_with_nccl() -> None:
    torch.manual_seed(0)
    net = mlp().cuda()
    plain = copy.deepcopy(net)
    x = torch.randn(8, 6, device="cuda")
    with wrap(net, [0, 0, 0], private=True) as model:
        for one in (model, plain):
            with torch.autocast("cuda", torch.bfloat16):
                out = one(x)
            assert out.dtype is torch.bfloat16
            out.float().square().mean().backward()
        assert controller_group(model).process_group.last_sequence_number > controller_group(model).sequence_base
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.02)


@pytest.mark.usefixtures("nccl")
def test_an_exception_keeps_the_group() -> None:
    net = FailsInWorker().cuda()
    with wrap(net, [0, 0], private=True) as model:
        x = torch.randn(6, 4, device="cuda")
        model(x)
        group = controller_group(model).process_group
        with pytest.raises(KeyError, match="no luck"):
            model(torch.cat([x[:3], x[3:] + 200]))
        torch.testing.assert_close(model(x), net(x))
        assert controller_group(model).process_group is group


PHASES = (
    "none",
    "idle before forward",
    "idle before backward",
    "in forward",
    "in backward",
    "share",
    "sum",
    "join",
    "none",
)
COLLECTIVE_STARTS = {
    "share": ("forward", "instep.engines.processes.controller.nccl_manager.broadcast_coalesced"),
    "sum": ("backward", "instep.engines.processes.controller.overlapped_reduction.BucketReducer.finish"),
    "join": ("forward", "instep.engines.processes.controller.nccl_manager._init_group"),
}
"""Where this process starts its part of a collective of the group."""


def train_with_kills(phases: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Train a module; kill the last worker in the given phase of each step."""
    torch.manual_seed(0)
    net = mlp().double().cuda()
    with wrap(net, [0, 0, 0], private=True, probe=False, restarts=10**6) as model:

        def kill() -> None:
            os.kill(pids(model)[-1], signal.SIGKILL)

        def during(step: int, phase: str) -> None:
            where = phases[step]
            if where == f"idle before {phase}":
                kill()
            elif where == f"in {phase}":
                threading.Timer(0.003, kill).start()
            elif COLLECTIVE_STARTS.get(where, ("", ""))[0] == phase:
                if where == "join":
                    controller_group(model).process_group.abort("the test replaces the group")
                run_before_next_call(COLLECTIVE_STARTS[where][1], kill, monkeypatch)

        train(model, net, during, len(phases))
        assert "by NCCL" in repr(model)
    return net


@pytest.mark.usefixtures("nccl")
@pytest.mark.timeout(240)
def test_killed_workers_do_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a worker dies in a collective, where the other ranks must not wait for it."""
    undisturbed = train_with_kills(["none"] * len(PHASES), monkeypatch)
    disturbed = train_with_kills(PHASES, monkeypatch)
    for mine, theirs in zip(disturbed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    wait_for_group_threads()


def wait_for_group_threads() -> None:
    """Threads that wait for a dead rank to join end after the NCCL timeout."""
    wait_for_threads("instep-group", 2 * float(NCCL_TIMEOUT["TORCH_NCCL_NONBLOCKING_TIMEOUT"]))


@pytest.mark.usefixtures("nccl")
@pytest.mark.timeout(100)
def test_a_worker_death_while_the_group_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new group is created while threads of the first one still wait for the dead rank."""
    undisturbed = train_with_kills(["none"] * 3, monkeypatch)
    disturbed = train_with_kills(["none", "join", "none"], monkeypatch)
    for mine, theirs in zip(disturbed.parameters(), undisturbed.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    wait_for_group_threads()


@pytest.mark.usefixtures("nccl")
def test_all_features_give_the_same_with_and_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers, batch normalization, tensors stored on the module, and state."""
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv("INSTEP_NCCL", switch)
        torch.manual_seed(0)
        net = Net().double()
        with wrap(net, [0, 0, 0], private=True, merge={"penalty": "mean"}) as model:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.randn(7, 4).double()).square().mean() + 0.1 * model.penalty).backward()
                optimizer.step()
            assert (controller_group(model) is not None) == (switch == "1")
        found.append(net.state_dict())
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


SCRIPT = """
import torch, instep
from instep.engines.processes.controller import nccl_manager
nccl_manager.are_distinct_gpus = lambda _: True
nccl_manager.EXTRA_ENVIRONMENT = {rank: {"NCCL_HOSTID": f"instep-{rank}", "NCCL_IB_DISABLE": "1"} for rank in range(4)}
net = torch.nn.Linear(4, 3).cuda()
model = instep.DataParallel(net, [0, 0], engine="processes", private_copies=True)
model(torch.randn(6, 4)).sum().backward()
assert "by NCCL" in repr(model)
print("worker", model._instep_engine._pool.get(1).pid, flush=True)
"""


@pytest.mark.parametrize("end", ["", "while True: model(torch.randn(6, 4)).sum().backward()"], ids=["ends", "killed"])
def test_the_end_of_the_parent_leaves_no_process_and_no_file(end: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT + end], stdout=subprocess.PIPE, cwd=tmp_path, env=variables
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[1])
        if end:
            time.sleep(0.3)
            parent.kill()
        assert parent.wait(20) == (-signal.SIGKILL if end else 0)
    assert_gone(pid, before, tmp_path)
