"""Tests of `DeviceRowExchange`, with CPU memory in place of device memory and counters in place of stream flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.engines.processes.transport import device_rows
from instep.engines.processes.transport.device_rows import (
    CALL_NUMBERS,
    MAX_ROW_BYTES,
    REGION_BYTES,
    DeviceRowExchange,
    DeviceRowMemory,
    RowCall,
    RowLog,
)
from instep.engines.processes.transport.shared_memory import SharedMemory

CPU = torch.device("cpu")


class FakeFlags:
    """Stands for `StreamFlags`. Signals are immediate; waits are recorded."""

    def __init__(self, count: int) -> None:
        self.words = [0] * count
        self.waits: list[tuple[int, int]] = []

    def signal(self, index: int, value: int, _: int) -> None:
        self.words[index] = value % 2**32

    def signal_and_wait(self, index: int, others: Sequence[int], value: int, stream: int) -> None:
        self.signal(index, value, stream)
        self.waits += [(other, value) for other in others]

    def store(self, index: int, value: int) -> None:
        self.signal(index, value, 0)

    def has_reached(self, index: int, value: int) -> bool:
        return (self.words[index] - value) % 2**32 < 2**31

    def pending(self) -> list[tuple[int, int]]:
        """The waits that are not over."""
        return [wait for wait in self.waits if not self.has_reached(*wait)]


class FakeMemory:
    """Stands for `DeviceMemory`."""

    device = CPU

    def __init__(self, nbytes: int) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        return self.bytes[offset : offset + nbytes]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> DeviceRowMemory:
    monkeypatch.setattr(DeviceRowMemory, "current_stream", lambda _: 0)
    monkeypatch.setattr(device_rows, "poison", lambda memory: memory.bytes.fill_(255))
    device_memory: Any = FakeMemory(2 * 3 * REGION_BYTES)
    flags: Any = FakeFlags(3)
    headers = SharedMemory.create(8 * 3 * device_rows._HEADER_WORDS)
    return DeviceRowMemory(device_memory, flags, headers, 3)


def start(memory: DeviceRowMemory, count: int) -> list[DeviceRowExchange]:
    base = memory.start_call()
    return [DeviceRowExchange(memory, base, index, count) for index in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [2, 3])
def test_every_replica_gets_all_rows(memory: DeviceRowMemory, count: int, dtype: torch.dtype) -> None:
    flags: Any = memory.flags
    for call in range(3):
        replicas = start(memory, count)
        for step in range(5):
            sent = [torch.full((2, 3), 10.0 * step + index + call, dtype=dtype) for index in range(count)]
            received = [replica.gather(f"step {step}", row) for replica, row in zip(replicas, sent, strict=True)]
            assert not flags.pending()
            for rows in received:
                assert rows is not None
                assert torch.equal(rows, torch.stack(sent))
        for replica in replicas:
            replica.leave(failed=False)
        assert replicas[0].counts() == [5] * count
        memory.complete_call(replicas[0].base)


def test_a_replica_that_is_ahead_is_awaited(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    first, second = start(memory, 2)
    assert first.gather("a", torch.ones(3)) is not None
    assert flags.pending() == [(1, first.base + 1)]
    assert second.gather("a", torch.ones(3)) is not None
    assert not flags.pending()


def test_another_label_is_seen_by_the_replica_that_comes_later(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    first, second = start(memory, 2)
    for number in range(3):  # the first replica's host is ahead
        assert first.gather(f"a{number}", torch.ones(3)) is not None
    assert second.gather("a0", torch.ones(3)) is not None
    assert second.gather("b1", torch.ones(3)) is None
    assert not flags.pending()


@pytest.mark.parametrize("failed", [False, True])
def test_no_stream_waits_for_a_replica_that_leaves_too_early(memory: DeviceRowMemory, failed: bool) -> None:
    flags: Any = memory.flags
    first, second = start(memory, 2)
    first.gather("a", torch.ones(3))
    second.gather("a", torch.ones(3))
    first.gather("b", torch.ones(3))
    assert flags.pending()
    second.leave(failed)
    assert not flags.pending()
    assert first.counts() == [2, 1]
    assert first.gather("c", torch.ones(3)) is None


def test_rows_of_a_dead_worker_become_nan(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    first, _ = start(memory, 2)
    request = memory.confirm_request(1, 7)
    rows = first.gather("a", torch.ones(3))
    assert rows is not None
    memory.release_request(1, RowCall(6, first.base), results_lost=False)  # of a worker that was replaced
    assert flags.pending()
    memory.release_request(1, request, results_lost=False)
    assert not flags.pending()
    assert rows.isnan().all()
    assert not memory.can_send(1, again=False)


@pytest.mark.parametrize("next_has_begun", [False, True])
def test_a_worker_that_dies_after_the_call_has_ended_on_the_host(memory: DeviceRowMemory, next_has_begun: bool) -> None:
    flags: Any = memory.flags
    first, _ = start(memory, 2)
    request = memory.confirm_request(1, 7)
    first.gather("a", torch.ones(3))
    memory.complete_call(first.base)
    if next_has_begun:
        memory.start_call()
    memory.release_request(1, request, results_lost=True)
    assert not flags.pending()
    assert memory.can_send(1, again=False) == next_has_begun
    assert not flags.has_reached(1, memory.start_call() + 1)


@pytest.mark.parametrize("next_has_begun", [False, True])
def test_a_worker_that_dies_while_nobody_waits_for_it(memory: DeviceRowMemory, next_has_begun: bool) -> None:
    flags: Any = memory.flags
    first, _ = start(memory, 2)
    request = memory.confirm_request(1, 7)
    memory.complete_call(first.base)
    if next_has_begun:
        memory.start_call()
    memory.release_request(1, request, results_lost=False)
    assert memory.can_send(1, again=False)
    assert not flags.has_reached(1, memory.base)


def test_a_request_is_sent_again_only_before_its_worker_exchanges_rows(memory: DeviceRowMemory) -> None:
    first, second = start(memory, 2)
    request = memory.confirm_request(1, 7)
    assert memory.can_send(1, again=True)
    memory.release_request(1, request, results_lost=True)  # the end of the worker that was replaced
    memory.confirm_request(1, 8)
    first.gather("a", torch.ones(3))
    assert memory.can_send(1, again=True)
    memory.confirm_request(1, 9)
    second.gather("a", torch.ones(3))
    assert not memory.can_send(1, again=True)


def test_an_error_before_the_replica_takes_part_releases_the_others(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    first, _ = start(memory, 2)
    memory.set_request(1, 7)
    first.gather("a", torch.ones(3))
    for other in (0, 6):
        memory.fail_request(other)
        assert flags.pending()
    memory.fail_request(7)
    assert not flags.pending()
    assert not memory.can_send(1, again=True)


def test_a_late_error_of_an_earlier_call_does_not_touch_the_next(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    start(memory, 2)
    memory.set_request(1, 7)
    base = memory.start_call()
    memory.fail_request(7)
    assert not flags.has_reached(1, base + 1)


@pytest.mark.parametrize("was_sent", [False, True])
def test_an_error_of_the_parent_releases_waits_if_the_request_was_not_sent(
    memory: DeviceRowMemory, was_sent: bool
) -> None:
    flags: Any = memory.flags
    first, _ = start(memory, 2)
    first.gather("a", torch.ones(3))
    if was_sent:  # the worker releases them, after its earlier work
        memory.confirm_request(1, 7)
    memory.release_unsent(1, first.base)
    assert bool(flags.pending()) == was_sent
    assert memory.complete_call(first.base) == was_sent


def test_a_call_whose_rows_were_lost_is_not_complete(memory: DeviceRowMemory) -> None:
    first, second = start(memory, 2)
    request = memory.confirm_request(1, 7)
    first.gather("a", torch.ones(3))
    second.gather("a", torch.ones(3))
    memory.release_request(1, request, results_lost=False)  # its reply has arrived, but others may still read its row
    assert not memory.complete_call(first.base)


def test_numbers_after_many_calls_without_collectives(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    for _ in range(5000):
        (first, _) = start(memory, 2)
        memory.complete_call(first.base)
    assert not flags.has_reached(0, memory.start_call() + 1)


def test_numbers_after_an_incomplete_call_exceed_all_of_its_numbers(memory: DeviceRowMemory) -> None:
    flags: Any = memory.flags
    first, second = start(memory, 2)
    second.leave(failed=True)
    assert flags.has_reached(1, first.base + CALL_NUMBERS - 1)
    assert not flags.has_reached(1, memory.start_call() + 1)


def test_only_small_rows_on_the_device_fit(memory: DeviceRowMemory) -> None:
    (first,) = start(memory, 1)
    assert first.accepts(torch.ones(3))
    assert not first.accepts(torch.ones(0))
    assert not first.accepts(torch.ones(3, device="meta"))
    assert not first.accepts(torch.ones(MAX_ROW_BYTES))
    assert first.row_buffer(3, torch.float32, CPU) is not None
    assert first.row_buffer(0, torch.float32, CPU) is None
    assert first.row_buffer(3, torch.float32, torch.device("meta")) is None
    assert first.row_buffer(MAX_ROW_BYTES, torch.float32, CPU) is None


def test_a_row_in_its_buffer_is_not_copied(memory: DeviceRowMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = start(memory, 2)
    buffers = [replica.row_buffer(3, torch.float32, CPU) for replica in replicas]
    for value, buffer in enumerate(buffers):
        assert buffer is not None
        buffer.fill_(value)
    monkeypatch.setattr(Tensor, "copy_", None)
    for replica, buffer in zip(replicas, buffers, strict=True):
        assert buffer is not None
        rows = replica.gather("a", buffer.detach())
    assert rows is not None
    assert rows.tolist() == [[0.0] * 3, [1.0] * 3]


def test_memory_is_reused_only_after_another_collective(memory: DeviceRowMemory) -> None:
    """Streams of other replicas may still read the rows of the last collective, also if that was in another call."""
    last: set[int] = set()
    sizes = [MAX_ROW_BYTES, 100, MAX_ROW_BYTES - 4, 8, MAX_ROW_BYTES, MAX_ROW_BYTES, 4, MAX_ROW_BYTES]
    for count in (1, 0, 8, 0, 0, 2, 1, 1, 5):
        replicas = start(memory, 2)
        for number in range(count):
            for replica in replicas:
                rows = replica.gather(f"{number}", torch.ones(sizes[number] // 4))
            assert rows is not None
            own = {address for row in rows for address in range(row.data_ptr(), row.data_ptr() + row.nbytes, 4)}
            assert not own & last
            last = own
        memory.complete_call(replicas[0].base)


@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize("size", [MAX_ROW_BYTES // 8, 30000, 9000])
def test_the_log_has_all_rows_of_a_call(memory: DeviceRowMemory, size: int, in_buffer: bool) -> None:
    """Also if the streams of the other replicas are ahead, and have written their next rows."""
    log, expected = RowLog(), []
    first, second = start(memory, 2)
    on_host = torch.randn(2, 4)
    for number in range(40):  # more than the memory holds
        shape = (2, size - 100 * number)
        sent = [torch.randn(shape) for _ in range(2)]
        second.gather(f"{number}", sent[1])
        row = sent[0].clone()
        if in_buffer:
            buffer = first.row_buffer(row.numel(), torch.float32, CPU)
            assert buffer is not None
            row = buffer.copy_(row.view(-1)).view(shape)
        first.gather(f"{number}", row, log)
        if number == 5:
            log.append(on_host)
            expected.append(on_host)
        expected.insert(number + (number > 5), torch.stack(sent))
        if number < 39:
            memory.regions[1 - first.base % 2].fill_(7)  # another call's
    first.leave(False, log)
    memory.regions.fill_(0)
    assert [rows.shape for rows in log.all()] == [rows.shape for rows in expected]
    assert all(map(torch.equal, log.all(), expected))
    assert [id(rows) for rows in log.on_host()] == [id(on_host)]


def test_a_log_without_rows(memory: DeviceRowMemory) -> None:
    log = RowLog()
    (first,) = start(memory, 1)
    first.leave(False, log)
    assert log.all() == log.on_host() == []
