"""Requests of several threads to one worker, and abandoned replies."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.controller.client import WorkerClient, client_for
from instep.engines.processes.controller.requests import RetryingRequest
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.runtime.affinity import SenderCpuAvoidance, current_cpu
from instep.runtime.process_role import inside_worker


def wrap(net: nn.Module, **options: Any) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * 2, engine="processes", **options)


def test_threads_that_share_a_worker_get_their_own_replies() -> None:
    nets = [nn.Linear(4, 3) for _ in range(3)]
    models = [wrap(net) for net in nets]

    def train(number: int) -> None:
        for size in range(2, 12):
            x = torch.randn(size, 4)
            output = models[number](x)
            torch.testing.assert_close(output, nets[number](x))
            (got,) = torch.autograd.grad(output.sum(), [nets[number].weight])
            torch.testing.assert_close(got, x.sum(0).expand(3, 4))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))
    for model in models:
        model.close()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("replicas", [2, 3])
def test_threads_that_share_workers_with_collectives(replicas: int, autocast: bool) -> None:
    """A worker that waits for the others in one thread's call is asked for another's part meanwhile."""
    nets = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    plain = [copy.deepcopy(net) for net in nets]
    models = [instep.DataParallel(net, ["cpu"] * replicas, engine="processes", timeout=30) for net in nets]
    batches = [[torch.randn(size + number, 4) for size in range(replicas, replicas + 10)] for number in range(3)]

    def train(number: int) -> None:
        cast = autocast and number != 1
        for x in batches[number]:
            outputs = []
            for net, model in ((plain[number], plain[number]), (nets[number], models[number])):
                net.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                    outputs.append(model(x))
                outputs[-1].float().pow(3).sum().backward()
            torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0.2 if cast else 1e-4)
            for one, other in zip(nets[number].parameters(), plain[number].parameters(), strict=True):
                if not cast:  # too few digits for gradients of so few samples
                    torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, range(3)))
    for model in models:
        model.close()


class Fails(nn.Module):
    """Raises in the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if instep.replica().index:
            raise KeyError("mine")
        y: Tensor = self.layer(x)
        return y


@pytest.mark.slow
def test_an_error_that_another_thread_received() -> None:
    failing, fine = Fails(), nn.Linear(4, 3)
    x, stop = torch.randn(6, 4), threading.Event()
    with wrap(failing, probe=False) as one, wrap(fine, probe=False) as other, ThreadPoolExecutor(1) as pool:

        def go_on() -> None:
            while not stop.is_set():
                other(x)

        done = pool.submit(go_on)
        try:
            for _ in range(300):
                with pytest.raises(KeyError, match="mine"):
                    one(x)
        finally:
            stop.set()
        done.result()


class Delayed(torch.autograd.Function):
    """Delays the backward in a worker when the gradient is large."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if inside_worker() and gradient.max() > 100:
            time.sleep(1.0)
        return gradient


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Delayed.apply(self.layer(x))
        return y


def test_the_reply_to_an_interrupted_backward_is_not_used_for_the_next() -> None:
    net, x = Slow(), torch.randn(6, 4)
    with wrap(net) as model:
        output = model(x)
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            output.backward(torch.full((6, 3), 200.0), retain_graph=True)
        net.zero_grad()
        output.backward(torch.ones(6, 3))
        torch.testing.assert_close(net.layer.weight.grad, x.sum(0).expand(3, 4))


def test_workers_leave_the_sender_its_core() -> None:
    before, elsewhere = os.sched_getaffinity(0), SenderCpuAvoidance()
    for _ in range(20):
        core = current_cpu()
        elsewhere.record_sender(core)
        assert os.sched_getaffinity(0) == before
        elsewhere.before_wait()
        assert os.sched_getaffinity(0) == (before - {core} or before)
        elsewhere.after_wait()
        assert os.sched_getaffinity(0) == before


def test_a_worker_uses_the_memory_of_one_device() -> None:
    """Wrappers with different first devices may share a worker. The first one whose memory it can open decides."""
    devices = [torch.device("cuda", index) for index in range(3)]
    client: Any = object.__new__(WorkerClient)
    client._ipc_refusals, client._device_ready = {}, True
    client.worker, client.channel = SimpleNamespace(name="replica 1"), SimpleNamespace(cuda_ipc=None)
    connect = client._connect_ipc
    client._connect_ipc = lambda *_: "no access"
    client.prepare_device(devices[2], devices[0])
    assert client.refusal_for(devices[0]) == "no access"
    assert client.refusal_for(devices[1]) is None  # not tried yet
    client.channel.cuda_ipc, client._connect_ipc = SimpleNamespace(device=devices[1], enabled=False), lambda *_: ""
    client.prepare_device(devices[2], devices[1])
    assert client.channel.cuda_ipc.enabled
    client._connect_ipc = connect
    client.prepare_device(devices[2], devices[2])
    assert "cuda:1 for another wrapper" in client.refusal_for(devices[2])
    assert not client.channel.cuda_ipc.enabled


def test_concurrent_threads_share_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, each would listen on the one line for itself."""
    made = []

    class Opened(WorkerClient):
        def __init__(self, worker: WorkerProcess) -> None:
            time.sleep(0.05)
            made.append(worker)
            super().__init__(worker)

    monkeypatch.setattr("instep.engines.processes.controller.client.WorkerClient", Opened)
    monkeypatch.setattr(
        "instep.engines.processes.controller.client._clients", weakref.WeakKeyDictionary()
    )  # some test may have one
    model = wrap(nn.Linear(4, 3))
    worker = model._instep_engine._pool.get(1)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: client_for(worker), range(3)))
    assert made == [worker]
    assert all(client is found[0] for client in found)
    model.close()


def test_a_request_for_which_others_wait_is_not_sent_to_a_worker_that_has_exited() -> None:
    """A message to it would go into memory, without an error."""
    with wrap(nn.Linear(4, 3)) as model:
        model(torch.randn(4, 4))
        engine: Any = model._instep_engine
        worker = engine._pool.get(1)
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.wait_exit(time.monotonic() + 20)
        receivers: list[WorkerProcess] = []
        request: Any = SimpleNamespace(may_use_ipc=False, send=lambda client: receivers.append(client.worker))
        RetryingRequest(engine, 1, CallStreams(engine._devices), None).send(request, replace_at_once=True)
        (receiver,) = receivers
        assert receiver is not worker
        assert receiver.is_alive()
