"""What a worker does before it is asked, how it waits, and what is left out of what it says."""

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
def up(workers: WorkerPool) -> None:
    """A worker that is there before the first test."""
    workers.get(1)


def wrap(net: nn.Module) -> instep.DataParallel:
    return instep.DataParallel(net, ["cpu"] * 2, engine="processes", probe=False)


class Scaled(nn.Module):
    """Reads an attribute, and changes a setting of the whole process when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = 1.0

    def forward(self, x: Tensor, careless: bool = False) -> Tensor:
        y = self.layer(x) * self.scale + torch.zeros(()).dtype.itemsize
        if careless:
            torch.set_default_dtype(torch.float64)
        return y


def test_changes_reach_a_worker_that_has_looked_ahead() -> None:
    one, two = Scaled(), Scaled()
    x = torch.randn(6, 4)
    with wrap(one) as first, wrap(two) as second:
        for scale in (2.0, 3.0, 5.0):
            for net, model in ((one, first), (two, second)):
                torch.testing.assert_close(model(x), net(x))
            one.scale = scale  # the worker was asked for the other module in between
            torch.testing.assert_close(first(x), one(x))
            one.scale = -scale
            output = first(x)
            output.sum().backward()
            torch.testing.assert_close(output, one(x))
        one.layer = nn.Linear(4, 2)
        torch.testing.assert_close(first(x), one(x))


def test_settings_that_forward_left_behind_are_set_again() -> None:
    net, x = Scaled(), torch.randn(6, 4)
    try:
        with wrap(net) as model:
            for _ in range(3):
                whole = net(x)
                torch.testing.assert_close(model(x, careless=True), whole)
                torch.set_default_dtype(torch.float32)
                torch.testing.assert_close(model(x), whole)
    finally:
        torch.set_default_dtype(torch.float32)


class Dawdles(nn.Module):
    """Meets the others; the first replica takes its time after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + instep.all_reduce(x.sum())
        if instep.replica().index == 0:
            time.sleep(0.3)
        return y


def test_a_worker_that_is_heard_before_the_first_replica_is_done() -> None:
    """It must not be told that nobody needs what it keeps for the backward."""
    net, x = Dawdles(), torch.randn(6, 4)
    with wrap(net) as model:
        first = model(x)
        model(x)
        first.sum().backward()
    torch.testing.assert_close(net.layer.weight.grad, x.sum(0).expand(3, 4))


class Threads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((len(x),), torch.get_num_threads())


def test_each_replica_has_its_share_of_the_threads() -> None:
    mine = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with wrap(Threads()) as model:
            assert [model(torch.randn(2, 1)).tolist() for _ in range(3)] == [[2.0, 2.0]] * 3
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(mine)


class Gives(nn.Module):
    """Gives back what it holds, whatever that is."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, 0, 0.0, False, "", (), [], {}], ids=repr)
def test_an_output_that_says_nothing_comes_back(value: Any) -> None:
    with wrap(Gives(value)) as model:
        got = model(torch.randn(4, 2))
    assert got == value
    assert type(got) is type(value)


def test_what_says_nothing_is_left_out() -> None:
    assert BackwardReply([1, 2]).fields() == ([1, 2],)
    assert BackwardReply().fields() == ()
    assert BackwardReply([], {}, {}, host_rng_used=True).fields() == ([], {}, {}, True)
    assert ForwardReply(output=[]).fields() == ([],)
    assert ForwardReply(output=0, written_parameters=[3]).fields()[0] == 0
    assert BackwardRequest(0, {}, 0).fields() == (0, {}, 0)
    run = ForwardRequest(1, "forward", [], 1, [2, 2], 2, False, 0, 0)
    assert ForwardRequest(*run.fields()) == run
    run.sequence_number = 7
    assert ForwardRequest(*run.fields()) == run


class Poll:
    """Finds something at its last look."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def poll(self, _: int) -> list[tuple[int, int]]:
        self.left -= 1
        return [] if self.left else [(7, select.POLLIN)]


def test_a_thread_waits_awake_only_where_there_is_a_core_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        for processes in (0, len(os.sched_getaffinity(0)) + 1):
            affinity.set_spin_wait(processes)
            asleep: Any = Poll(1)
            assert affinity.spin_poll(asleep) == []
            assert asleep.left == 1
        affinity.set_spin_wait(1)
        monkeypatch.setattr(affinity, "SPIN_SECONDS", 60.0)
        awake: Any = Poll(3)
        assert affinity.spin_poll(awake) == [(7, select.POLLIN)]
        monkeypatch.setattr(affinity, "SPIN_SECONDS", 0.0)
        awake = Poll(3)
        assert affinity.spin_poll(awake) == []
        assert awake.left == 2
        affinity.set_spin_wait(0)
        monkeypatch.setattr(affinity, "_cpu_quota", lambda: 0.5)
        affinity.set_spin_wait(1)
        assert affinity.spin_poll(asleep) == []
    finally:
        affinity.set_spin_wait(0)


@pytest.mark.parametrize(
    ("text", "found"),
    [("max 100000", math.inf), ("150000 100000", 1.5), ("200000", 2.0), ("-1", math.inf), ("", math.inf)],
)
def test_the_share_of_a_container(text: str, found: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text(text)
    monkeypatch.setattr(affinity, "_QUOTA_FILES", (str(tmp_path / "none"), str(tmp_path / "limit")))
    assert affinity._cpu_quota.__wrapped__() == found


def test_a_call_leaves_no_thread_awake() -> None:
    with wrap(nn.Linear(4, 3)) as model:
        model(torch.randn(6, 4)).sum().backward()
        assert not getattr(affinity._thread_local, "spins", False)
        with pytest.raises(RuntimeError):
            model(torch.randn(6, 5))
        assert not getattr(affinity._thread_local, "spins", False)


def test_output_that_somebody_is_just_reading_is_shown_before_the_call_returns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = WorkerOutput._read

    def slowly(fd: int) -> bytes:
        data = read(fd)
        if data and not reading.is_set():  # it is no longer in the pipe, and not shown yet
            reading.set()
            assert go_on.wait(60)
        return data

    monkeypatch.setattr(WorkerOutput, "_read", staticmethod(slowly))
    printed = WorkerOutput(lambda: "a worker")
    try:
        os.write(printed.write_ends[0], b"hello\n")
        assert reading.wait(60)
        later = threading.Timer(0.1, go_on.set)
        later.start()
        flush_output()
        assert capsys.readouterr().out == "[a worker] hello\n"
        later.join()
    finally:
        printed.close()
