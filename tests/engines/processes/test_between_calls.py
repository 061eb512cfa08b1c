"""Work between calls: updates sent ahead, waiting for messages, omitted fields, and output of workers."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.engines.processes.lifecycle.output import WorkerOutput, flush_output
from instep.engines.processes.lifecycle.pool import WorkerPool
from instep.engines.processes.messages import BackwardReply, BackwardRequest, ForwardReply, ForwardRequest
from instep.runtime import affinity


@pytest.fixture(scope="module", autouse=True)
def start_worker(workers: WorkerPool) -> None:
    """Start a worker before the first test."""
    workers.get(1)


def wrap(net: nn.Module) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False)


class Scaled(nn.Module):
    """Reads an attribute, and changes torch's default dtype on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor, careless: bool = False) -> Tensor:
        y = self.layer(x) * self.scale + torch.zeros(()).dtype.itemsize
        if careless:
            torch.set_default_dtype(torch.float64)
        return y


def test_changes_of_the_module_reach_the_worker_in_the_next_call() -> None:
    one, two = Scaled(), Scaled()
    x = torch.randn(6, 4)
    with wrap(one) as first, wrap(two) as second:
        for scale in (2.0, 3.0, 5.0):
            for net, model in ((one, first), (two, second)):
                torch.testing.assert_close(model(x), net(x))
            one.scale = scale  # the worker ran the other module in between
            torch.testing.assert_close(first(x), one(x))
            one.scale = -scale
            output = first(x)
            output.sum().backward()
            torch.testing.assert_close(output, one(x))
        one.layer = nn.Linear(4, 2)
        torch.testing.assert_close(first(x), one(x))


def test_settings_changed_in_forward_are_restored_for_the_next_call() -> None:
    net, x = Scaled(), torch.randn(6, 4)
    try:
        with wrap(net) as model:
            for _ in range(3):
                expected = net(x)
                torch.testing.assert_close(model(x, careless=True), expected)
                torch.set_default_dtype(torch.float32)
                torch.testing.assert_close(model(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


class SlowFirstReplica(nn.Module):
    """Runs a collective; then the first replica sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + instep.all_reduce(x.sum())
        if instep.replica().index == 0:
            time.sleep(0.3)
        return y


def test_a_reply_before_the_first_replica_finishes_keeps_the_workers_graph() -> None:
    """The worker must not free the graph of the first call."""
    net, x = SlowFirstReplica(), torch.randn(6, 4)
    with wrap(net) as model:
        first = model(x)
        model(x)
        first.sum().backward()
    torch.testing.assert_close(net.layer.weight.grad, x.sum(0).expand(3, 4))


class CountsThreads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((len(x),), torch.get_num_threads())


def test_torch_threads_are_divided_among_replicas() -> None:
    mine = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with wrap(CountsThreads()) as model:
            assert [model(torch.randn(2, 1)).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(mine)


class ReturnsValue(nn.Module):
    """Returns a given value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, 0, 0.0, False, "", (), [], {}], ids=repr)
def test_empty_outputs_are_returned(value: Any) -> None:
    with wrap(ReturnsValue(value)) as model:
        got = model(torch.randn(4, 2))
    assert got == value
    assert type(got) is type(value)


def test_messages_omit_default_fields() -> None:
    assert BackwardReply([1, 2]).fields() == ([1, 2],)
    assert BackwardReply().fields() == ()
    assert BackwardReply([], {}, {}, host_rng_used=True).fields() == ([], {}, {}, True)
    assert ForwardReply(output=[]).fields() == ([],)
    assert ForwardReply(output=0, written_parameters=[3]).fields()[0] == 0
    assert BackwardRequest(0, {}, 0).fields() == (0, {}, 0, ())
    run = ForwardRequest(1, "forward", [], 1, [2, 2], 2, False, 0, 0)
    assert ForwardRequest(*run.fields()) == run
    run.sequence_number = 7
    assert ForwardRequest(*run.fields()) == run


class Poll:
    """A poll object that reports an event at its last call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def poll(self, _: int) -> list[tuple[int, int]]:
        self.left -= 1
        return [] if self.left else [(7, select.POLLIN)]


def test_a_thread_spins_only_if_there_is_a_core_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for processes in (0, len(os.sched_getaffinity(0)) + 1):
            affinity.set_spin_wait(processes)
            not_spinning: Any = Poll(1)
            assert affinity.spin_poll(not_spinning) is None
            assert not_spinning.left == 1
        monkeypatch.setattr(affinity, "SPIN_SECONDS", 60.0)
        monkeypatch.setattr(affinity, "LONG_SPIN_SECONDS", 60.0)
        affinity.set_spin_wait(1)
        spinning: Any = Poll(3)
        assert affinity.spin_poll(spinning) == [(7, select.POLLIN)]
        spinning = Poll(3)
        assert affinity.spin_poll(spinning, limit=0.0) is None
        assert spinning.left == 2
        affinity.set_spin_wait(0)
        monkeypatch.setattr(affinity, "_cpu_quota", lambda: 0.5)
        affinity.set_spin_wait(1)
        assert affinity.spin_poll(not_spinning) is None
    finally:
        affinity.set_spin_wait(0)


def test_a_thread_that_launches_work_spins_longer_with_two_cores_per_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(affinity, "_available_cpus", lambda *_: 8)
    monkeypatch.setattr(affinity, "_cpu_quota", lambda: 7.5)
    counts, long, short = (0, 1, 3, 4, 7, 8), affinity.LONG_SPIN_SECONDS, affinity.SPIN_SECONDS
    assert [affinity.spin_seconds(count, on_accelerator=True) for count in counts] == [0, long, long, short, short, 0]
    assert [affinity.spin_seconds(count) for count in counts] == [0, short, short, short, short, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [("max 100000", math.inf), ("150000 100000", 1.5), ("200000", 2.0), ("-1", math.inf), ("", math.inf)],
)
def test_the_cpu_quota_of_a_container(text: str, found: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text(text)
    monkeypatch.setattr(affinity, "_QUOTA_FILES", (str(tmp_path / "none"), str(tmp_path / "limit")))
    assert affinity._cpu_quota.__wrapped__() == found


def test_no_thread_spins_after_a_call() -> None:
    with wrap(nn.Linear(4, 3)) as model:
        model(torch.randn(6, 4)).sum().backward()
        assert not getattr(affinity._thread_local, "spins", False)
        with pytest.raises(RuntimeError):
            model(torch.randn(6, 5))
        assert not getattr(affinity._thread_local, "spins", False)


def test_flush_output_waits_for_a_concurrent_reader(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, resume = threading.Event(), threading.Event()
    read = WorkerOutput._read

    def slow_read(fd: int) -> bytes:
        data = read(fd)
        if data and not reading.is_set():  # read from the pipe, not printed yet
            reading.set()
            assert resume.wait(60)
        return data

    monkeypatch.setattr(WorkerOutput, "_read", staticmethod(slow_read))
    output = WorkerOutput(lambda: "a worker")
    try:
        os.write(output.write_ends[0], b"hello\n")
        assert reading.wait(60)
        later = threading.Timer(0.1, resume.set)
        later.start()
        flush_output()
        assert capsys.readouterr().out == "[a worker] hello\n"
        later.join()
    finally:
        output.close()
