"""The replica threads: acquiring, releasing, garbage collection, interruptions."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.engines import rendezvous, thread_pool
from instep.runtime.locks import ForkSafeLock


@pytest.fixture
def garbage() -> Iterator[None]:
    """A wrapper that only the cyclic collector will find, which comes only when it is called."""
    model = instep.DataParallel(nn.Linear(4, 3), ["cpu"] * 2, engine="threads")
    model(torch.randn(6, 4))
    gc.disable()
    model.module.me = model
    del model
    yield
    gc.enable()


def call_three() -> None:
    with instep.DataParallel(nn.Linear(4, 3), ["cpu"] * 3, engine="threads") as model:
        assert model(torch.randn(6, 4)).shape == (6, 3)


def collected_in(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> set[int]:
    """The threads in which the collector came before a function."""
    came: set[int] = set()
    before = getattr(owner, name)

    def collect_first(*args: Any) -> Any:
        came.add(threading.get_ident())
        gc.collect()
        return before(*args)

    monkeypatch.setattr(owner, name, collect_first)
    return came


@pytest.mark.usefixtures("garbage")
def test_a_wrapper_is_garbage_collected_in_a_starting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    came = collected_in(monkeypatch, threading.Thread, "_bootstrap_inner")
    call_three()
    assert came - {threading.get_ident()}


@pytest.mark.usefixtures("garbage")
def test_a_wrapper_is_garbage_collected_in_a_replica_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    came = collected_in(monkeypatch, thread_pool, "_set_num_threads")
    call_three()
    assert came - {threading.get_ident()}


@pytest.mark.usefixtures("garbage")
def test_a_wrapper_is_garbage_collected_while_another_acquires_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    came = collected_in(monkeypatch, thread_pool, "ReplicaThread")
    call_three()
    assert came == {threading.get_ident()}
    assert not thread_pool._threads


OTHERS: list[instep.DataParallel] = []


def test_a_wrapper_closed_by_a_replica_stops_its_threads() -> None:
    class Closes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            OTHERS[0].close()
            return x * 2

    OTHERS[:] = [instep.DataParallel(nn.Linear(4, 3), ["cpu"] * 3, engine="threads")]
    OTHERS[0](torch.randn(6, 4))
    assert ("cpu", 2) in thread_pool._threads
    with instep.DataParallel(Closes(), ["cpu"] * 2, engine="threads", probe=False) as model:
        model(torch.randn(4, 4))
        assert ("cpu", 2) not in thread_pool._threads
    OTHERS.clear()


def test_a_lock_knows_its_owner() -> None:
    lock = ForkSafeLock()
    assert not lock.is_owned()
    with lock, lock:
        assert lock.is_owned()
        seen: list[bool] = []
        other = threading.Thread(target=lambda: seen.append(lock.is_owned()))
        other.start()
        other.join()
    assert seen == [False]
    assert not lock.is_owned()


def test_acquiring_and_releasing_a_lock_runs_no_python_code() -> None:
    """There a signal would find it taken, and nobody to give it back."""
    for name in ("__enter__", "__exit__"):
        assert not isinstance(getattr(ForkSafeLock, name), FunctionType)
    assert all("Condition" not in inspect.getsource(part) for part in (rendezvous, thread_pool))


def test_an_interruption_while_tasks_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that have begun their backward do not wait for one that will never begin."""
    # Gradients of squares behind this layer are little but rounding.
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).double()
    with instep.DataParallel(net, ["cpu"] * 3, engine="threads") as model:
        x = torch.randn(7, 4).double()
        loss = model(x).square().sum()
        inboxes = [thread.queue for thread in thread_pool._threads.values()]

        class Interrupted:
            def put(self, _: Any) -> None:
                time.sleep(0.1)
                raise KeyboardInterrupt

        for thread in thread_pool._threads.values():
            if thread.queue is inboxes[2]:
                monkeypatch.setattr(thread, "queue", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        monkeypatch.undo()
        assert net[0].weight.grad is None
        model(x).square().sum().backward()
        mine = net[0].weight.grad.clone()
        net.zero_grad()
        net(x).square().sum().backward()
        torch.testing.assert_close(mine, net[0].weight.grad)


TEACHERS: list[instep.DataParallel] = []


@pytest.mark.parametrize("replicas", [2, 3])
def test_forward_waits_for_a_thread_that_calls_another_wrapper(replicas: int) -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as beside:
                answer = beside.submit(TEACHERS[0], x)
            return self.layer(x) + answer.result().detach()

    x, before = torch.randn(6, 4), torch.get_num_threads()
    with instep.DataParallel(nn.Linear(4, 4), ["cpu"] * replicas, engine="threads") as teacher:
        TEACHERS[:] = [teacher]
        net = Student()
        with instep.DataParallel(net, ["cpu"] * 2, engine="threads") as model:
            torch.testing.assert_close(model(x), net.layer(x) + teacher.module(x))
            model(x).sum().backward()
    TEACHERS.clear()
    assert torch.get_num_threads() == before


def test_an_interruption_while_threads_are_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, armed = threading.Event.wait, [True]

    def interrupted(self: threading.Event, *args: Any) -> bool:
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            raise KeyboardInterrupt
        return wait(self, *args)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    model = instep.DataParallel(nn.Linear(4, 3), ["cpu"] * 2, engine="threads", probe=False)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(6, 4))
    assert model(torch.randn(6, 4)).shape == (6, 3)
    model.close()
    deadline = time.monotonic() + 10
    while replica_threads() and time.monotonic() < deadline:  # the interrupted thread may only now begin to run
        time.sleep(0.01)
    assert not replica_threads()
    assert not thread_pool._threads


def replica_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("instep-cpu")]


def test_an_interruption_leaves_gradients_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = torch.no_grad.__enter__

    def interrupted(self: torch.no_grad) -> None:
        enter(self)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with instep.DataParallel(nn.Linear(4, 3), ["cpu"] * 2, engine="threads") as model:
        monkeypatch.setattr(torch.no_grad, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, 4))
        assert torch.is_grad_enabled()
        assert model(torch.randn(6, 4)).requires_grad


def test_released_threads_run_no_tasks() -> None:
    lease, ran = thread_pool.ReplicaThreads([torch.device("cpu")] * 2), []
    assert lease.run([lambda: 1, lambda: 2]) == [1, 2]
    lease.close()
    with pytest.raises(instep.EngineError, match=r"^this engine was closed\.$"):
        lease.run([lambda: ran.append(1), lambda: ran.append(2)])
    assert not ran
