"""Summing gradients while the workers' backward is still running."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instep
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.overlap import OverlappedSum, _PartialSum
from instep.engines.processes.lifecycle.watchdog import PendingReply
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.doorbell import (
    CHUNK_BYTES,
    MIN_GRADIENT_BYTES,
    Doorbell,
    gradient_chunks,
    make_doorbell,
    ready_list_bytes,
)
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.process_role import inside_worker

WIDE = 600  # a weight of more than one stretch, and not of a whole number of them


def test_chunks_cover_the_larger_tensors() -> None:
    tensors = [torch.empty(WIDE, WIDE), torch.empty(10), torch.empty(MIN_GRADIENT_BYTES // 2, dtype=torch.bfloat16)]
    cut = gradient_chunks(enumerate(tensors))
    assert {stretch.tensor_index for stretch in cut} == {0, 2}
    for number in (0, 2):
        spans = [(start, stop) for n, start, stop in cut if n == number]
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), tensors[number].numel()]
        assert all((stop - start) * tensors[number].element_size() <= CHUNK_BYTES for start, stop in spans)


def pair() -> tuple[Doorbell, Doorbell]:
    cut = gradient_chunks([(0, torch.empty(WIDE, WIDE))])
    memory = SharedMemory.create(ready_list_bytes(cut))
    near = make_doorbell(memory, cut)
    return near, Doorbell(os.dup(near.fd), memory, cut)


def test_a_doorbell_reports_each_chunk_once() -> None:
    near, far = pair()
    assert len(near.chunks_by_tensor[0]) > 1
    near.expect(1, 0)
    far.reset()
    assert near.poll() == []
    far.ring(1)
    assert near.poll() == [near.chunks_by_tensor[0][1]]
    far.ring(0)
    assert near.poll() == [near.chunks_by_tensor[0][0]]
    assert near.poll() == []


def test_signals_of_an_interrupted_backward_are_ignored() -> None:
    near, far = pair()
    near.expect(1, 0)
    near.expect(2, 0)
    assert near.backward_id == 0
    far.ring(0)  # of the first one
    near.finish()
    near.expect(3, 2)
    assert near.backward_id == 3
    assert near.poll() == []
    near.expect(4, 3)
    assert near.backward_id == 0
    near.expect(6, 5)
    assert near.backward_id == 6


class Waits(torch.autograd.Function):
    """In the backward of a worker, waits for a file; then ends the worker, where another file says nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sign: str, died: str) -> Tensor:
        ctx.sign, ctx.died = sign, died
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        end = time.monotonic() + 10
        while inside_worker() and not os.path.exists(ctx.sign) and time.monotonic() < end:
            time.sleep(0.01)
        if inside_worker() and ctx.died and not os.path.exists(ctx.died):
            Path(ctx.died).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return gradient, None, None


class Deep(nn.Module):
    """Two wide layers. In a worker the backward goes on from one to the other when a sign is there."""

    def __init__(self, sign: Path, died: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.sign, self.died = str(sign), died

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Waits.apply(torch.tanh(self.first(x)), self.sign, self.died))


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there as soon as something was added ahead."""
    path, add = tmp_path / "added", _PartialSum.add

    def add_and_say(self: _PartialSum, start: int, stop: int) -> None:
        add(self, start, stop)
        path.touch()

    monkeypatch.setattr(_PartialSum, "add", add_and_say)
    return path


class Reentrant(nn.Module):
    """One wide layer whose gradient comes in two parts: a backward inside of the backward brings the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(self.layer, x, use_reentrant=True)
        return self.layer(torch.tanh(inside)) + inside


def gradients(net: nn.Module, model: instep.DataParallel, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("count", [2, 4])
def test_sums_are_the_same_bit_for_bit(count: int, sign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Deep(sign), torch.randn(4 * count + 1, WIDE)
    with instep.DataParallel(net, ["cpu"] * count, engine="processes") as model:
        ahead = [gradients(net, model, x)]
        assert sign.exists()
        ahead += [gradients(net, model, x) for _ in range(3)]
        monkeypatch.setattr(OverlappedSum, "run", lambda *_: None)
        after = gradients(net, model, x)
    for run in ahead:
        assert all(torch.equal(one, other) for one, other in zip(run, after, strict=True))
    net.zero_grad()
    net(x).square().sum().backward()
    for one, parameter in zip(after, net.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_second_gradient_of_a_weight_is_added_late() -> None:
    net, x = Reentrant(), torch.randn(9, WIDE, requires_grad=True)
    with instep.DataParallel(net, ["cpu"] * 3, engine="processes") as model:
        model(x).square().sum().backward()
        with model.no_sync():
            model(x).square().sum().backward()
    got = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for one, parameter in zip(got, net.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(one, parameter.grad * 2, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_dead_worker_are_added_once(tmp_path: Path, sign: Path) -> None:
    net, x = Deep(sign, str(tmp_path / "died")), torch.randn(7, WIDE)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        died = gradients(net, model, x)
        assert sign.exists()
        assert os.path.exists(net.died)
        undisturbed = gradients(net, model, x)
    assert all(torch.equal(one, other) for one, other in zip(died, undisturbed, strict=True))


@pytest.mark.slow
def test_a_worker_that_dies_before_its_request_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = WorkerClient.send_backward

    def kill_first(self: WorkerClient, *args: Any) -> PendingReply:
        asked.append(self.worker.pid)
        if len(asked) == 1:
            os.kill(self.worker.pid, signal.SIGKILL)
            raise ConnectionClosed("it has just ended")
        return ask(self, *args)

    monkeypatch.setattr(WorkerClient, "send_backward", kill_first)
    net, x = nn.Linear(WIDE, WIDE), torch.randn(7, WIDE)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        died, undisturbed = gradients(net, model, x), gradients(net, model, x)
    assert asked[1] != asked[0]
    assert all(torch.equal(one, other) for one, other in zip(died, undisturbed, strict=True))
