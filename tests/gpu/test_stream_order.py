"""Worker processes on the caller's GPU: no host waits for the device, and what happens if a worker's device fails."""

from __future__ import annotations

import builtins
import copy
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.errors import CollectiveError, WorkerFailure
from instep.runtime.process_role import inside_worker

from .sharing import mlp, pids, wrap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("gpu_workers"),
]

BAD = 200.0


def conv_net() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 5))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise if this process waits for the device."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a host waited for the device")

    patched = [(torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize")]
    saved = [getattr(owner, name) for owner, name in patched]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for owner, name in patched:
            setattr(owner, name, fail)
        yield
    finally:
        for (owner, name), function in zip(patched, saved, strict=True):
            setattr(owner, name, function)
        torch.cuda.set_sync_debug_mode("default")


class ForbidsWaits(nn.Module):
    """In workers, no host may wait for the device after the first calls."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if inside_worker():
            count_worker_call()
        return self.net(x)


STEPS, WARM_STEPS = 12, 8


def count_worker_call() -> None:
    """Forbid waits in a worker from the step after the warm ones to the last one."""
    state = builtins.__dict__.setdefault("instep_test", {"calls": 0})
    state["calls"] += 1
    if state["calls"] % STEPS == WARM_STEPS + 1:
        state["waits"] = no_waits()
        state["waits"].__enter__()
    elif state["calls"] % STEPS == 0:
        state["waits"].__exit__(None, None, None)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("make", [mlp, conv_net])
def test_no_host_waits_in_a_warm_step(make: Any, replicas: int) -> None:
    torch.manual_seed(0)
    net = ForbidsWaits(make()).cuda()
    shape = (6,) if make is mlp else (4, 6, 6)
    with wrap(net, [0] * replicas) as model:
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, foreach=True)
        batches = [torch.randn(12, *shape, device="cuda") for _ in range(STEPS)]
        for step, x in enumerate(batches):
            if step == WARM_STEPS:
                torch.cuda.synchronize()
            with no_waits() if step >= WARM_STEPS else torch.enable_grad():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.cuda.synchronize()


class FailsInWorker(nn.Module):
    """In a worker, a sample with a large value makes the device compute for long, or fail."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor, bad: bool = False) -> Tensor:
        y = self.layer(x)
        in_worker = bad and inside_worker()
        index = torch.full((len(x), 1), 7 if in_worker and self.how == "assert" else 0, device=x.device)
        torch.cuda._sleep((8_000_000_000 if self.how == "sleep" else 400_000_000) if in_worker else 1)
        return y + torch.zeros(3, device=x.device)[index]  # always, as the first call of a kernel waits for the device


def test_a_worker_that_is_killed_while_its_device_computes() -> None:
    net = FailsInWorker("sleep").cuda()
    with wrap(net, [0, 0], merge={"": "cat"}) as model:
        x = torch.randn(6, 4, device="cuda")
        for _ in range(3):
            model(x, bad=False)
        started = time.monotonic()
        y = model(x, bad=True).detach()
        os.kill(pids(model)[0], signal.SIGKILL)
        torch.cuda.synchronize()
        assert time.monotonic() - started < 5
        assert y[3:].isnan().all()
        torch.testing.assert_close(y[:3], net(x[:3]))
        with pytest.raises(WorkerFailure, match="NaN"):
            model(x)
        torch.testing.assert_close(model(x), net(x))


def test_a_device_assertion_in_a_worker_is_raised_by_the_next_call() -> None:
    net = FailsInWorker("assert").cuda()
    with wrap(net, [0, 0], merge={"": "cat"}) as model:
        x = torch.randn(6, 4, device="cuda")
        for _ in range(3):
            model(x, bad=False)
        y = model(x, bad=True).detach()
        torch.cuda.synchronize()
        assert y[3:].isnan().all()
        with pytest.raises(RuntimeError, match="device-side assert") as caught:
            model(x)
        assert "replica 1" in "\n".join(caught.value.__notes__)
        torch.testing.assert_close(model(x), net(x))


class Branches(nn.Module):
    """One replica may leave out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(4) for _ in range(3)])
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.skips and index == 1 and instep.replica().index == 1):
                x = layer(x)
        return x


def test_replicas_that_skip_a_layer() -> None:
    net = Branches().cuda()
    plain = copy.deepcopy(net)
    with wrap(net, [0, 0], probe=False) as model:
        x = torch.randn(8, 4, device="cuda")
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x))
        net.skips = True
        with pytest.raises(CollectiveError, match="Every replica has to make the same calls"):
            model(x)
        net.skips = False
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


class WaitsForDevice(nn.Module):
    """The host of each replica waits for its device, which waits for the other replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, label: object = None) -> Tensor:
        y: Tensor = self.norm(x)
        return y * (1.0 if y.sum().item() < 1e6 else 0.0)


class UnreadableInWorker:
    def __reduce__(self) -> Any:
        return raise_in_worker, ()


def raise_in_worker() -> UnreadableInWorker:
    if inside_worker():
        raise OSError("not here")
    return UnreadableInWorker()


def test_a_host_that_waits_for_the_device_of_a_worker_that_was_killed_or_failed() -> None:
    net = WaitsForDevice().cuda()
    plain = copy.deepcopy(net)
    with wrap(net, [0, 0, 0]) as model:
        x = torch.randn(9, 4, device="cuda")
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x))
        os.kill(pids(model)[1], signal.SIGKILL)
        torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(Exception, match="not here"):
            model(x, UnreadableInWorker())
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


class TakesLong(nn.Module):
    """The device computes for about a second after the batch has arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000_000)
        y: Tensor = self.layer(x)
        return y


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_the_weights_of_a_mean_are_not_awaited_behind_the_forward() -> None:
    """A mean over tokens may be weighted by samples or by tokens: each call compares the counts on the host."""
    net = TakesLong().cuda()
    x, target = torch.randn(6, 3, 4, dtype=torch.float64, device="cuda"), torch.randint(5, (6, 3), device="cuda")
    with wrap(instep.with_loss(net, token_loss), [0, 0]) as model:
        # The first, second and fourth call begin with a trial; the first three and the sixth compare the arguments.
        for _ in range(4):
            model(x, target)
        torch.cuda.synchronize()
        loss = model(x, target)
        assert not torch.cuda.current_stream().query()  # the device still computes
        torch.testing.assert_close(loss, token_loss(net.layer(x), target))
        target[4:] = -100
        torch.testing.assert_close(model(x, target), token_loss(net.layer(x), target))
