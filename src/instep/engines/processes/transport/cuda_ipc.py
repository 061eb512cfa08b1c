"""Sends CUDA tensors between processes through IPC ring buffers, ordered by their streams.

The buffers are on the parent's device. A worker uses the same device, or one that reaches the memory of the parent's.

No host waits for its device: a sender queues copies into a ring and a signal, and sends the message at once. The
receiver queues a wait for that signal before it uses the tensors. The parent owns all memory and all signals, so that
nothing is lost with a worker that dies.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.cuda_driver import (
    ALLOCATION_GRANULARITY,
    DeviceMemory,
    DriverError,
    current_raw_stream,
)
from instep.engines.processes.transport.shared_memory import RingAllocator, align
from instep.engines.processes.transport.stream_flags import StreamFlags
from instep.engines.processes.transport.tensor_codec import DTYPE_CODES, DTYPES
from instep.errors import EngineError
from instep.runtime.env import is_peer_access_enabled


class IpcError(EngineError):
    """Device memory of the peer could not be opened. Tensors are then sent through host memory."""


RingPosition = tuple[int, int]
"""The generation of a ring, and the position up to which it was written or read (see `RingAllocator`)."""

_REQUESTS_WRITTEN, _REQUESTS_READ, _REPLIES_WRITTEN, _REPLIES_READ = range(4)
"""Flags: the number of the last message whose tensors were written, or read, in each direction."""
FLAG_COUNT = 4


class IpcTensor(NamedTuple):
    """A tensor in a ring."""

    position: int
    """Index among the tensors of the message."""
    offset: int
    """Byte offset in the ring."""
    dtype: torch.dtype
    shape: tuple[int, ...]


class IpcTransfer(NamedTuple):
    """The part of a message that describes tensors in a ring."""

    enabled: bool
    """Whether the reply may use IPC."""
    number: int
    """The number of the message, for which the receiver's stream waits; 0 if the sender's device was not used."""
    read_number: int
    """The number of the last message of the receiver that the sender has queued to be read."""
    read_position: RingPosition | None
    """The position up to which the sender has queued to read the receiver's ring."""
    write_position: RingPosition | None = None
    """The position after the tensors of this message."""
    items: tuple[IpcTensor, ...] = ()
    rings: tuple[tuple[int, bytes, int] | None, ...] = ()
    """From the parent, until the worker is known to have opened them: generation, IPC handle and size of the ring for
    requests, and of the one for replies."""
    wanted_bytes: int = 0
    """From the worker: the size of its tensors, if the ring for replies is too small."""

    def to_tuple(self) -> tuple[Any, ...]:
        """Convert to plain values."""
        items = [(item.position, item.offset, DTYPE_CODES[item.dtype], item.shape) for item in self.items]
        return (*self[:5], items, self.rings, self.wanted_bytes)

    @classmethod
    def from_tuple(cls, plain: tuple[Any, ...]) -> IpcTransfer:
        """Inverse of `to_tuple`."""
        *head, items, rings, wanted_bytes = plain
        tensors = tuple(IpcTensor(index, offset, DTYPES[code], shape) for index, offset, code, shape in items)
        enabled, number, read_number, read_position, write_position = head
        return cls(enabled, number, read_number, read_position, write_position, tensors, rings, wanted_bytes)


class _DeviceRing:
    """A ring buffer in device memory. Its sender allocates in it."""

    def __init__(self, memory: DeviceMemory, generation: int) -> None:
        self.memory, self.generation = memory, generation
        self._bytes = memory.tensor(0, memory.nbytes)
        self.allocator = RingAllocator(memory.nbytes)
        self.peer_opened = False
        """In the parent: whether the worker has opened the memory."""

    def tensor(self, item: IpcTensor) -> Tensor:
        """A tensor in the ring, without a copy."""
        nbytes = math.prod(item.shape, start=item.dtype.itemsize)
        return self._bytes[item.offset : item.offset + nbytes].view(item.dtype).view(item.shape)

    def to_send(self) -> tuple[int, bytes, int] | None:
        """What the worker needs to open the memory; None if it has done so."""
        return None if self.peer_opened else (self.generation, self.memory.handle, self.memory.nbytes)


class CudaIpcChannel:
    """One end of a channel for tensors between two processes."""

    def __init__(self, device: torch.device, flags: StreamFlags, *, is_parent: bool) -> None:
        """`device` is that of this process."""
        self.device, self.flags = device, flags
        self._is_parent = is_parent
        self.enabled = False
        """Whether tensors are sent by IPC. The parent decides; the worker follows."""
        words = (_REQUESTS_WRITTEN, _REQUESTS_READ, _REPLIES_WRITTEN, _REPLIES_READ)
        self._written_flag, self._peer_read_flag, self._peer_written_flag, self._read_flag = (
            words if is_parent else (words[2:] + words[:2])
        )
        self._sent_number = self._read_number = self._peer_read_number = 0
        """Numbers of the last message that was written, that was read, and that the peer has queued to be read."""
        self._write_stream = self._read_stream = current_raw_stream(device)
        self._send_ring: _DeviceRing | None = None
        self._receive_ring: _DeviceRing | None = None
        self._retired_rings: list[_DeviceRing] = []
        """In the parent: rings that were too small, kept until the worker has opened the ones after them."""
        self._read_position: RingPosition | None = None
        self._wanted_bytes = 0
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self._peer_exited = False
        """In the parent: whether the waits for the worker were released. Nothing waits for it any more."""

    def write(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], IpcTransfer]:
        """Queue copies of the tensors that are on the device to the ring, and a signal.

        Returns the other tensors and the description of the message.
        """
        if not self.enabled:
            return list(tensors), IpcTransfer(False, 0, self._read_number, self._read_position)
        stream = current_raw_stream(self.device)
        if stream != self._write_stream:  # signals have to be in order
            self.flags.wait(self._written_flag, self._sent_number, stream)
            self._write_stream = stream
        self._sent_number += 1
        indices = [i for i, tensor in enumerate(tensors) if tensor.device == self.device]
        sizes = [align(tensors[i].nbytes) for i in indices]
        reserved = self._reserve(sum(sizes)) if any(sizes) else None
        others, position, items = list(tensors), None, []
        if reserved is not None:
            ring, offset = reserved
            for i, size in zip(indices, sizes, strict=True):
                items.append(IpcTensor(i, offset, tensors[i].dtype, tuple(tensors[i].shape)))
                offset += size
            nonempty = [item for item in items if tensors[item.position].numel()]
            if not self.flags.has_reached(self._peer_read_flag, self._peer_read_number):
                self.flags.wait(self._peer_read_flag, self._peer_read_number, stream)
            with torch.no_grad():
                torch._foreach_copy_(
                    [ring.tensor(item) for item in nonempty], [tensors[item.position] for item in nonempty]
                )
            others = [tensor for i, tensor in enumerate(tensors) if i not in set(indices)]
            position = ring.generation, ring.allocator.written
        self.flags.signal(self._written_flag, self._sent_number, stream)
        wanted, self._wanted_bytes = self._wanted_bytes, 0
        return others, IpcTransfer(
            True,
            self._sent_number,
            self._read_number,
            self._read_position,
            position,
            tuple(items),
            self._rings_to_send(),
            wanted,
        )

    def _rings_to_send(self) -> tuple[tuple[int, bytes, int] | None, ...]:
        if not self._is_parent:
            return ()
        rings = [None if ring is None else ring.to_send() for ring in (self._send_ring, self._receive_ring)]
        return tuple(rings) if any(rings) else ()

    def read(self, received: Sequence[Tensor], transfer: IpcTransfer, receiver: DeviceReceiver | None) -> list[Tensor]:
        """All tensors of a message: those received with it, and copies of those in the peer's ring, in order.

        The current stream waits for the sender's, also if the message has no tensors.
        """
        if not self._is_parent:
            self.enabled = transfer.enabled
            self._open_rings(transfer.rings)
        elif transfer.wanted_bytes:
            self._receive_ring = self._grow(self._receive_ring, transfer.wanted_bytes)
        self._mark_read(transfer)
        if not transfer.number:
            return list(received)
        stream = current_raw_stream(self.device)
        if stream != self._read_stream:
            self.flags.wait(self._read_flag, self._read_number, stream)
            self._read_stream = stream
        with self._lock:
            if self._peer_exited:
                raise ConnectionClosed("the worker exited before its results were complete")
            self._read_number = transfer.number  # before the wait, which `release_waits` may have to end
        self.flags.wait(self._peer_written_flag, transfer.number, stream)
        tensors = list(received) if transfer.write_position is None else self._copy(received, transfer, receiver)
        self.flags.signal(self._read_flag, transfer.number, stream)
        self._read_position = transfer.write_position or self._read_position
        return tensors

    def _copy(self, received: Sequence[Tensor], transfer: IpcTransfer, receiver: DeviceReceiver | None) -> list[Tensor]:
        assert receiver is not None
        assert transfer.write_position is not None
        rings = [self._receive_ring, *self._retired_rings]
        ring = next(ring for ring in rings if ring is not None and ring.generation == transfer.write_position[0])
        others = iter(received)
        items = {item.position: item for item in transfer.items}
        return [
            next(others) if (item := items.get(i)) is None else receiver.copy_strict(ring.tensor(item))
            for i in range(len(received) + len(items))
        ]

    def _open_rings(self, rings: tuple[tuple[int, bytes, int] | None, ...]) -> None:
        """In a worker: open rings of the parent. The worker receives from the first and sends by the second."""
        opened = [self._receive_ring, self._send_ring]
        for number, ring in enumerate(rings):
            current = opened[number]
            if ring is not None and (current is None or current.generation != ring[0]):
                if current is not None:  # copies from it may be queued
                    synchronize_stream(self.device)
                opened[number] = _DeviceRing(open_shared(ring[1], ring[2], self.device), ring[0])
        self._receive_ring, self._send_ring = opened

    def _mark_read(self, transfer: IpcTransfer) -> None:
        """Record what the peer has queued to be read."""
        self._peer_read_number = max(self._peer_read_number, transfer.read_number)
        if transfer.read_position is not None and self._send_ring is not None:
            generation, position = transfer.read_position
            if self._send_ring.generation == generation:
                self._send_ring.allocator.read = max(self._send_ring.allocator.read, position)
                self._send_ring.peer_opened = True
        if self._is_parent and self._receive_ring is not None and transfer.write_position is not None:
            self._receive_ring.peer_opened = self._receive_ring.generation == transfer.write_position[0]
        if self._retired_rings and all(r is None or r.peer_opened for r in (self._send_ring, self._receive_ring)):
            # both processes may still copy from or to them
            self.flags.wait(self._peer_read_flag, self._peer_read_number, current_raw_stream(self.device))
            synchronize_stream(self.device)
            self._retired_rings = []

    def _reserve(self, nbytes: int) -> tuple[_DeviceRing, int] | None:
        """Reserve a block in the ring: the ring and the offset. None if there is no memory for it."""
        ring = self._send_ring
        if ring is not None and (offset := ring.allocator.reserve(nbytes)) is not None:
            return ring, offset
        if not self._is_parent:  # the parent allocates a larger one; this message is sent through host memory
            self._wanted_bytes = nbytes
            return None
        ring = self._send_ring = self._grow(ring, nbytes)
        offset = None if ring is None else ring.allocator.reserve(nbytes)
        return None if ring is None or offset is None else (ring, offset)

    def _grow(self, ring: _DeviceRing | None, nbytes: int) -> _DeviceRing | None:
        """A larger ring in place of one that is too small; the same one if there is no memory."""
        before = ring.memory.nbytes if ring is not None else 0
        size = max(align(nbytes + nbytes // 4, ALLOCATION_GRANULARITY), 2 * before if nbytes <= before else 0)
        try:
            memory = allocate_shared(size, self.device)
        except DriverError:
            return ring
        if ring is not None:
            self._retired_rings.append(ring)
        return _DeviceRing(memory, next(self._generations))

    def awaits_peer(self) -> bool:
        """In the parent: whether a stream of this process may wait for a signal of the worker."""
        return not self._peer_exited and not (
            self.flags.has_reached(self._peer_written_flag, self._read_number)
            and self.flags.has_reached(self._peer_read_flag, self._peer_read_number)
        )

    def release_waits(self, memory: Iterable[DeviceMemory]) -> bool:
        """In the parent: signal on behalf of a worker that died. Returns whether a stream was waiting.

        Then the worker's replies, and the other memory that it writes to, become NaN, or -1 in integers.
        """
        with self._lock:
            awaited, self._peer_exited = self.awaits_peer(), True
            try:
                if awaited:
                    rings = [] if self._receive_ring is None else [self._receive_ring.memory]
                    for each in (*rings, *memory):
                        poison(each)
            finally:
                self.flags.store(self._peer_read_flag, self._sent_number)
                self.flags.store(self._peer_written_flag, self._read_number)
        return awaited


def can_reach(device: torch.device, other: torch.device) -> bool:
    """Whether a device has access to the memory of another one."""
    return (
        device.type == other.type == "cuda"
        and device != other
        and is_peer_access_enabled()
        and torch.cuda.can_device_access_peer(device, other)
    )


def poison(memory: DeviceMemory) -> None:
    """Fill memory with NaN. Independent of all streams of torch, which may be waiting."""
    with suppress(DriverError):  # the device has failed: nobody reads the memory
        memory.fill(255)


def allocate_shared(nbytes: int, device: torch.device) -> DeviceMemory:
    """Allocate device memory that can be shared. If there is too little, torch's cached memory is freed first."""
    try:
        return DeviceMemory.create(nbytes, device)
    except DriverError:
        torch.cuda.empty_cache()
        return DeviceMemory.create(nbytes, device)


def open_shared(handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
    """Open device memory of the peer. Raises `IpcError` on failure, though an earlier test has succeeded."""
    try:
        return DeviceMemory.open(handle, nbytes, device)
    except DriverError as error:
        raise IpcError(str(error)) from error
