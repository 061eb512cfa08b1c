"""Sends CUDA tensors between processes on one device through IPC ring buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.cuda_driver import ALLOCATION_GRANULARITY, DeviceMemory, DriverError
from instep.engines.processes.transport.shared_memory import RingAllocator, align
from instep.engines.processes.transport.tensor_codec import DTYPE_CODES, DTYPES
from instep.errors import EngineError


class IpcError(EngineError):
    """Device memory of the peer could not be opened. Tensors are then sent through host memory."""


RingPosition = tuple[int, int]
"""The generation of a ring, and the position up to which it was written or read (see `RingAllocator`)."""


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
    read_position: RingPosition | None
    """The position up to which the sender has read the receiver's ring."""
    write_position: RingPosition | None = None
    """The position after the tensors of this message."""
    items: tuple[IpcTensor, ...] = ()
    ring_handle: tuple[bytes, int] | None = None
    """The IPC handle and size of the ring, until the receiver is known to have opened it."""

    def to_tuple(self) -> tuple[Any, ...]:
        """Convert to plain values."""
        items = [(item.position, item.offset, DTYPE_CODES[item.dtype], item.shape) for item in self.items]
        return self.enabled, self.read_position, self.write_position, items, self.ring_handle

    @classmethod
    def from_tuple(cls, plain: tuple[Any, ...]) -> IpcTransfer:
        """Inverse of `to_tuple`."""
        enabled, read_position, write_position, items, ring_handle = plain
        tensors = tuple(IpcTensor(index, offset, DTYPES[code], shape) for index, offset, code, shape in items)
        return cls(enabled, read_position, write_position, tensors, ring_handle)


class _DeviceRing:
    """A ring buffer in device memory."""

    def __init__(self, memory: DeviceMemory, generation: int) -> None:
        self.memory, self.generation = memory, generation
        self.allocator = RingAllocator(memory.nbytes)
        self.peer_opened = False
        """Whether the peer has opened the memory."""


class CudaIpcChannel:
    """One end of a channel for tensors between two processes that use the same device."""

    def __init__(self, device: torch.device, *, is_parent: bool) -> None:
        self.device = device
        self._is_parent = is_parent
        self.enabled = False
        """Whether tensors are sent by IPC. The parent decides; the worker follows."""
        self._send_ring: _DeviceRing | None = None
        self._retired_rings: list[_DeviceRing] = []
        """Rings that were too small, kept until the peer has read them."""
        self._opened_rings: dict[int, DeviceMemory] = {}
        """The peer's ring, by generation."""
        self._read_position: RingPosition | None = None

    def write(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], IpcTransfer]:
        """Write the tensors that are on the device to the ring. Returns the other tensors and the description."""
        indices = [i for i, tensor in enumerate(tensors) if self.enabled and tensor.device == self.device]
        sizes = [align(tensors[i].nbytes) for i in indices]
        reserved = self._reserve(sum(sizes)) if any(sizes) else None
        if reserved is None:
            return list(tensors), IpcTransfer(self.enabled, self._read_position)
        ring, offset = reserved
        items = []
        for i, size in zip(indices, sizes, strict=True):
            items.append(IpcTensor(i, offset, tensors[i].dtype, tuple(tensors[i].shape)))
            offset += size
        nonempty = [item for item in items if tensors[item.position].numel()]
        with torch.no_grad():
            torch._foreach_copy_(
                [_ring_tensor(ring.memory, item) for item in nonempty], [tensors[item.position] for item in nonempty]
            )
        synchronize_stream(self.device)
        others = [tensor for i, tensor in enumerate(tensors) if i not in set(indices)]
        handle = None if ring.peer_opened else (ring.memory.handle, ring.memory.nbytes)
        write_position = ring.generation, ring.allocator.written
        return others, IpcTransfer(self.enabled, self._read_position, write_position, tuple(items), handle)

    def read(self, received: Sequence[Tensor], transfer: IpcTransfer, receiver: DeviceReceiver | None) -> list[Tensor]:
        """All tensors of a message: those received with it, and copies of those in the peer's ring, in order."""
        if not self._is_parent:
            self.enabled = transfer.enabled
        if transfer.read_position is not None:
            self._mark_read(*transfer.read_position)
        if transfer.write_position is None:
            return list(received)
        assert receiver is not None
        generation, _ = transfer.write_position
        if transfer.ring_handle is not None and generation not in self._opened_rings:
            self._opened_rings = {generation: open_shared(*transfer.ring_handle, self.device)}
        memory = self._opened_rings[generation]
        others = iter(received)
        items = {item.position: item for item in transfer.items}
        tensors = []
        for i in range(len(received) + len(items)):
            item = items.get(i)
            tensors.append(next(others) if item is None else receiver.copy_strict(_ring_tensor(memory, item)))
        synchronize_stream(self.device)
        self._read_position = transfer.write_position
        return tensors

    def _mark_read(self, generation: int, position: int) -> None:
        """Record that the peer has read a ring up to a position; free retired rings that it has read."""
        if self._send_ring is None:
            return
        for ring in (*self._retired_rings, self._send_ring):
            if ring.generation == generation:
                ring.peer_opened, ring.allocator.read = True, max(ring.allocator.read, position)
        self._retired_rings = [
            ring
            for ring in self._retired_rings
            if ring.generation >= generation and ring.allocator.read < ring.allocator.written
        ]

    def _reserve(self, nbytes: int) -> tuple[_DeviceRing, int] | None:
        """Reserve a block, in a larger ring if necessary: the ring and the offset. None if out of memory."""
        ring = self._send_ring
        if ring is not None and (offset := ring.allocator.reserve(nbytes)) is not None:
            return ring, offset
        before, generation = (ring.memory.nbytes, ring.generation) if ring is not None else (0, 0)
        size = max(align(nbytes + nbytes // 4, ALLOCATION_GRANULARITY), 2 * before if nbytes <= before else 0)
        try:
            memory = allocate_shared(size, self.device)
        except DriverError:
            return None
        if ring is not None:
            self._retired_rings.append(ring)
        ring = self._send_ring = _DeviceRing(memory, generation + 1)
        offset = ring.allocator.reserve(nbytes)
        assert offset is not None
        return ring, offset


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


def _ring_tensor(memory: DeviceMemory, item: IpcTensor) -> Tensor:
    """The tensor at an offset of a ring, without a copy."""
    nbytes = math.prod(item.shape, start=item.dtype.itemsize)
    if not nbytes:
        return torch.empty(item.shape, dtype=item.dtype, device=memory.device)
    return memory.tensor(item.offset, nbytes).view(item.dtype).view(item.shape)
