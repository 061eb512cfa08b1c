"""Tests of `CudaIpcChannel` and its ring buffers, with CPU memory in place of device memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.engines.plain_values import dump_plain, load_plain
from instep.engines.processes.transport import cuda_ipc
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import DeviceReceiver
from instep.engines.processes.transport.cuda_ipc import FLAG_COUNT, CudaIpcChannel, IpcTransfer
from instep.engines.processes.transport.shared_memory import RingAllocator

CPU = torch.device("cpu")


class FakeMemory:
    """Stands for `DeviceMemory`."""

    blocks: dict[bytes, Tensor]

    def __init__(self, handle: bytes) -> None:
        self.handle, self.device, self.nbytes = handle, CPU, self.blocks[handle].numel()

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        return self.blocks[self.handle][offset : offset + nbytes]


@pytest.fixture(autouse=True)
def fake_memory(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, Tensor]:
    FakeMemory.blocks = {}

    def allocate(nbytes: int, _: torch.device) -> FakeMemory:
        handle = b"%d" % len(FakeMemory.blocks)
        FakeMemory.blocks[handle] = torch.zeros(nbytes, dtype=torch.uint8)
        return FakeMemory(handle)

    monkeypatch.setattr(cuda_ipc, "allocate_shared", allocate)
    monkeypatch.setattr(cuda_ipc, "open_shared", lambda handle, nbytes, device: FakeMemory(handle))
    monkeypatch.setattr(cuda_ipc, "ALLOCATION_GRANULARITY", 4096)
    monkeypatch.setattr(cuda_ipc, "current_raw_stream", lambda _: 0)
    return FakeMemory.blocks


class FakeFlags:
    """Stands for `StreamFlags`. All work is done when it is queued, so a wait that is not over would never end."""

    def __init__(self) -> None:
        self.words = [0] * FLAG_COUNT

    def signal(self, index: int, value: int, _: Any) -> None:
        assert value > self.words[index]
        self.words[index] = value

    def wait(self, index: int, value: int, _: Any) -> None:
        assert self.has_reached(index, value)

    def has_reached(self, index: int, value: int) -> bool:
        return self.words[index] >= value

    def store(self, index: int, value: int) -> None:
        self.words[index] = value


def make_pair() -> tuple[CudaIpcChannel, CudaIpcChannel]:
    flags: Any = FakeFlags()
    parent, worker = (CudaIpcChannel(CPU, flags, is_parent=is_parent) for is_parent in (True, False))
    parent.enabled = True
    return parent, worker


def write(channel: CudaIpcChannel, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
    others, transfer = channel.write(tensors)
    return others, dump_plain(transfer.to_tuple())


def read(channel: CudaIpcChannel, others: list[Tensor], transfer: Any) -> list[Tensor]:
    return channel.read(others, IpcTransfer.from_tuple(load_plain(transfer)), DeviceReceiver(CPU))


def test_tensors_are_received_in_order() -> None:
    parent, worker = make_pair()
    tensors = [torch.randn(3, 4), torch.empty(0, 2), torch.arange(5), torch.tensor(2.5, dtype=torch.float64)]
    others, transfer = write(parent, tensors)
    assert not others
    for received, sent in zip(read(worker, others, transfer), tensors, strict=True):
        torch.testing.assert_close(received, sent)
    assert worker.enabled


def test_tensors_of_other_devices_are_returned() -> None:
    parent, _ = make_pair()
    meta = torch.empty(3, device="meta")
    others, transfer = parent.write([torch.ones(3), meta, torch.ones(2)])
    assert others == [meta]
    assert [item.position for item in transfer.items] == [0, 2]


def test_nothing_is_written_while_disabled() -> None:
    _, worker = make_pair()
    tensor = torch.ones(3)
    others, transfer = worker.write([tensor])
    assert others[0] is tensor
    assert transfer.write_position is None
    assert transfer.number == 0


def test_the_parent_allocates_the_ring_for_replies() -> None:
    parent, worker = make_pair()
    read(worker, *write(parent, []))
    tensor = torch.arange(700)
    others, transfer = write(worker, [tensor])
    assert others[0] is tensor  # sent with the message
    read(parent, others, transfer)
    read(worker, *write(parent, []))
    others, transfer = write(worker, [tensor])
    assert not others
    assert torch.equal(read(parent, others, transfer)[0], tensor)


def test_a_message_without_tensors_is_ordered_too() -> None:
    parent, worker = make_pair()
    _, transfer = parent.write([])
    parent.flags.store(0, 0)  # as if the stream had not signalled yet
    with pytest.raises(AssertionError):
        worker.read([], transfer, DeviceReceiver(CPU))


def test_waits_for_a_dead_worker_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned: list[Any] = []
    monkeypatch.setattr(cuda_ipc, "poison", poisoned.append)
    parent, worker = make_pair()
    for _ in range(2):
        read(worker, *write(parent, [torch.ones(3)]))
        read(parent, *write(worker, [torch.ones(3)]))
    assert not parent.awaits_peer()
    parent.flags.store(2, 1)  # as if the worker's last reply was not complete
    assert parent.awaits_peer()
    assert parent.release_waits([])
    assert not parent.awaits_peer()
    assert len(poisoned) == 1
    assert not parent.release_waits([])


def test_a_reply_that_is_read_after_the_worker_exited_is_not_awaited() -> None:
    parent, worker = make_pair()
    read(worker, *write(parent, [torch.ones(3)]))
    others, transfer = write(worker, [])
    assert not parent.release_waits([])  # nothing was read yet
    with pytest.raises(ConnectionClosed):
        read(parent, others, transfer)


def test_requests_and_replies_reuse_the_rings(fake_memory: dict[bytes, Tensor]) -> None:
    parent, worker = make_pair()
    for step in range(50):
        for sender, receiver in ((parent, worker), (worker, parent)):
            tensors = [torch.full((step % 7 * 100,), step), torch.full((3,), -step)]
            for received, sent in zip(read(receiver, *write(sender, tensors)), tensors, strict=True):
                assert torch.equal(received, sent)
    assert len(fake_memory) <= 4


def test_unread_messages_are_not_overwritten() -> None:
    draw = random.Random(0)
    parent, worker = make_pair()
    unread: list[tuple[Tensor, Any]] = []
    for step in range(600):
        if len(unread) < 6 and draw.random() < 0.6:
            tensor = torch.full((draw.choice([5, 300, 2000, 20_000]),), step)
            unread.append((tensor, write(parent, [tensor])))
        elif unread:
            sent, message = unread.pop(0)
            [received] = read(worker, *message)
            assert torch.equal(received, sent)
            if draw.random() < 0.5:
                read(parent, *write(worker, []))  # a reply reports the read position
    assert not parent._retired_rings or len(parent._retired_rings) <= len(unread) + 1


def test_an_empty_ring_restarts_at_offset_0() -> None:
    ring = RingAllocator(1024)
    assert [ring.reserve(384), ring.reserve(380)] == [0, 384]
    assert ring.reserve(300) is None
    ring.read = 384  # the first block was read
    assert ring.reserve(300) == 0  # it does not fit at the end
    assert ring.reserve(100) is None
    ring.read = ring.written
    assert ring.reserve(1024) == 0


@pytest.mark.parametrize(
    ("device", "other", "enabled", "expected"),
    [
        ("cuda:1", "cuda:0", "1", True),
        ("cuda:2", "cuda:0", "1", False),  # the driver says that it does not reach it
        ("cuda:0", "cuda:0", "1", False),
        ("cpu", "cuda:0", "1", False),
        ("cuda:0", "cpu", "1", False),
        ("cuda:1", "cuda:0", "0", False),
    ],
)
def test_which_devices_reach_each_other(
    device: str, other: str, enabled: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTEP_PEER_ACCESS", enabled)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, _: one.index == 1)
    assert cuda_ipc.can_reach(torch.device(device), torch.device(other)) is expected
