"""Sends CUDA tensors between processes on one device through IPC ring buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver, synchronize_stream
from instep.engines.processes.transport.cuda_driver import ALLOCATION_GRANULARITY, DeviceMemory, DriverError
from instep.engines.processes.transport.shared_memory import align
from instep.engines.processes.transport.tensor_codec import DTYPE_CODES, DTYPES
from instep.errors import EngineError


class IpcError(EngineError):
    """Memory of a device could not be opened after all; tensors then cross by host memory."""


class RingPosition(NamedTuple):
    """How far a ring has been written or read."""

    generation: int
    end: int


class IpcTensor(NamedTuple):
    """One tensor in a ring."""

    position: int
    """Its place among the tensors of the message."""
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class IpcTransfer(NamedTuple):
    """What a message says of tensors that lie in a ring."""

    enabled: bool
    """Whether the answer may bring tensors in the same way."""
    read_position: RingPosition | None
    """How far the other side's ring has been read."""
    write_position: RingPosition | None = None
    items: tuple[IpcTensor, ...] = ()
    ring_handle: tuple[bytes, int] | None = None
    """The handle and the bytes of the ring, where the other side may not have opened it yet."""

    def to_tuple(self) -> tuple[Any, ...]:
        """The same in numbers and bytes."""
        places = [None if place is None else tuple(place) for place in (self.read_position, self.write_position)]
        items = [(item.position, item.offset, DTYPE_CODES[item.dtype], item.shape) for item in self.items]
        return (self.enabled, *places, items, self.ring_handle)

    @classmethod
    def from_tuple(cls, bare: tuple[Any, ...]) -> IpcTransfer:
        """What was said in numbers and bytes."""
        near, read, written, listed, ring = bare
        items = tuple(IpcTensor(at, offset, DTYPES[code], shape) for at, offset, code, shape in listed)
        return cls(near, _to_position(read), _to_position(written), items, ring)


def _to_position(bare: tuple[int, int] | None) -> RingPosition | None:
    return None if bare is None else RingPosition(*bare)


class _DeviceRing:
    """Memory that is written round and round."""

    def __init__(self, memory: DeviceMemory, generation: int) -> None:
        self.memory, self.generation = memory, generation
        self.peer_opened = False
        """Whether the other side has opened it."""
        self.written = self.read = 0

    def reserve(self, nbytes: int) -> int | None:
        """Where so many bytes go; None where that would write over what was not read."""
        start, room = self.written, self.memory.nbytes
        if start % room + nbytes > room:
            start = align(start, room)
        if self.read >= self.written:
            self.read = start
        if start + nbytes - self.read > room:
            return None
        self.written = start + nbytes
        return start % room


class CudaIpcChannel:
    """One side's memory on a device that both sides of a line work on."""

    def __init__(self, device: torch.device, *, is_parent: bool) -> None:
        self.device = device
        self._is_parent = is_parent
        """Whether it is this side that decides."""
        self.enabled = False
        """Whether tensors are to cross in this way."""
        self._send_ring: _DeviceRing | None = None
        self._retired_rings: list[_DeviceRing] = []
        """Rings that were too small, until they have been read."""
        self._opened_rings: dict[int, DeviceMemory] = {}
        self._read_position: RingPosition | None = None

    def write(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], IpcTransfer]:
        """Tensors that have to be sent otherwise, and where the others lie, which are there when this returns."""
        mine = [at for at, tensor in enumerate(tensors) if self.enabled and tensor.device == self.device]
        sizes = [align(tensors[at].nbytes) for at in mine]
        total = sum(sizes)
        ring = self._ring_with_room(total) if total else None
        if ring is None:
            return list(tensors), IpcTransfer(self.enabled, self._read_position)
        start = ring.reserve(total)
        assert start is not None
        items, offset = [], start
        for at, size in zip(mine, sizes, strict=True):
            items.append(IpcTensor(at, offset, tensors[at].dtype, tuple(tensors[at].shape)))
            offset += size
        full = [item for item in items if tensors[item.position].numel()]
        with torch.no_grad():
            torch._foreach_copy_(
                [_ring_tensor(ring.memory, item) for item in full], [tensors[i.position] for i in full]
            )
        synchronize_stream(self.device)
        rest = [tensor for at, tensor in enumerate(tensors) if at not in set(mine)]
        handle = None if ring.peer_opened else (ring.memory.handle, ring.memory.nbytes)
        return rest, IpcTransfer(
            self.enabled, self._read_position, RingPosition(ring.generation, ring.written), tuple(items), handle
        )

    def read(self, sent: Sequence[Tensor], cargo: IpcTransfer, receiver: DeviceReceiver | None) -> list[Tensor]:
        """The tensors of a message, those that lie in the other side's ring among them, in memory of their own."""
        if not self._is_parent:
            self.enabled = cargo.enabled
        self._mark_read(cargo.read_position)
        if cargo.write_position is None:
            return list(sent)
        assert receiver is not None
        if cargo.ring_handle is not None and cargo.write_position.generation not in self._opened_rings:
            self._opened_rings = {cargo.write_position.generation: open_shared(*cargo.ring_handle, self.device)}
        memory = self._opened_rings[cargo.write_position.generation]
        rest = iter(sent)
        items = {item.position: item for item in cargo.items}
        found = []
        for at in range(len(sent) + len(items)):
            item = items.get(at)
            found.append(next(rest) if item is None else receiver.copy_strict(_ring_tensor(memory, item)))
        synchronize_stream(self.device)
        self._read_position = cargo.write_position
        return found

    def _mark_read(self, read: RingPosition | None) -> None:
        """The other side has read so far."""
        if read is None or self._send_ring is None:
            return
        for ring in (*self._retired_rings, self._send_ring):
            if ring.generation == read.generation:
                ring.peer_opened, ring.read = True, max(ring.read, read.end)
        self._retired_rings = [
            ring for ring in self._retired_rings if ring.generation >= read.generation and ring.read < ring.written
        ]

    def _ring_with_room(self, nbytes: int) -> _DeviceRing | None:
        """A ring with room for so many bytes; None where the device has no memory for one."""
        ring = self._send_ring
        if ring is not None and _has_room(ring, nbytes):
            return ring
        before, generation = (ring.memory.nbytes, ring.generation) if ring is not None else (0, 0)
        size = max(align(nbytes + nbytes // 4, ALLOCATION_GRANULARITY), 2 * before if nbytes <= before else 0)
        try:
            memory = allocate_shared(size, self.device)
        except DriverError:
            return None
        if ring is not None:
            self._retired_rings.append(ring)
        self._send_ring = _DeviceRing(memory, generation + 1)
        return self._send_ring


def allocate_shared(nbytes: int, device: torch.device) -> DeviceMemory:
    """Memory that can be shared; where there is none left, after torch has given back what it does not use."""
    try:
        return DeviceMemory.create(nbytes, device)
    except DriverError:
        torch.cuda.empty_cache()
        return DeviceMemory.create(nbytes, device)


def open_shared(handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
    """The memory of another process, which was tried before; `CannotShare` where it is refused now."""
    try:
        return DeviceMemory.open(handle, nbytes, device)
    except DriverError as refused:
        raise IpcError(str(refused)) from refused


def _has_room(ring: _DeviceRing, nbytes: int) -> bool:
    before = ring.written, ring.read
    fits = ring.reserve(nbytes) is not None
    ring.written, ring.read = before
    return fits


def _ring_tensor(memory: DeviceMemory, item: IpcTensor) -> Tensor:
    nbytes = item.dtype.itemsize
    for size in item.shape:
        nbytes *= size
    if not nbytes:
        return torch.empty(item.shape, dtype=item.dtype, device=memory.device)
    return memory.tensor(item.offset, nbytes).view(item.dtype).view(item.shape)
