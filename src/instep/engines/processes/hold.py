"""Tensors that stay on an accelerator when they cross: two processes that share it open one another's memory.

Each side writes what it sends into a ring of its own and says in the message where it lies. Its memory is used again
when the other side has said, in some later message, that it has copied all up to there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.arena import aligned
from instep.engines.processes.driver import GRAIN, DeviceMemory, Refused
from instep.engines.processes.looks import CODES, DTYPES
from instep.engines.processes.shore import Shore, wait_for
from instep.errors import EngineError


class CannotShare(EngineError):
    """Memory of a device could not be opened after all; tensors then cross by host memory."""


class Place(NamedTuple):
    """How far a ring has been written or read."""

    generation: int
    end: int


class Item(NamedTuple):
    """One tensor in a ring."""

    at: int
    """Its place among the tensors of the message."""
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Cargo(NamedTuple):
    """What a message says of tensors that lie in a ring."""

    near: bool
    """Whether the answer may bring tensors in the same way."""
    read: Place | None
    """How far the other side's ring has been read."""
    written: Place | None = None
    items: tuple[Item, ...] = ()
    ring: tuple[bytes, int] | None = None
    """The handle and the bytes of the ring, where the other side may not have opened it yet."""

    def bare(self) -> tuple[Any, ...]:
        """The same in numbers and bytes."""
        places = [None if place is None else tuple(place) for place in (self.read, self.written)]
        items = [(item.at, item.offset, CODES[item.dtype], item.shape) for item in self.items]
        return (self.near, *places, items, self.ring)

    @classmethod
    def of(cls, bare: tuple[Any, ...]) -> Cargo:
        """What was said in numbers and bytes."""
        near, read, written, listed, ring = bare
        items = tuple(Item(at, offset, DTYPES[code], shape) for at, offset, code, shape in listed)
        return cls(near, _place(read), _place(written), items, ring)


def _place(bare: tuple[int, int] | None) -> Place | None:
    return None if bare is None else Place(*bare)


class _Ring:
    """Memory that is written round and round."""

    def __init__(self, memory: DeviceMemory, generation: int) -> None:
        self.memory, self.generation = memory, generation
        self.known = False
        """Whether the other side has opened it."""
        self.written = self.read = 0

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes go; None where that would write over what was not read."""
        start, room = self.written, self.memory.nbytes
        if start % room + nbytes > room:
            start = aligned(start, room)
        if self.read >= self.written:
            self.read = start
        if start + nbytes - self.read > room:
            return None
        self.written = start + nbytes
        return start % room


class Hold:
    """One side's memory on a device that both sides of a line work on."""

    def __init__(self, device: torch.device, *, home: bool) -> None:
        self.device = device
        self._home = home
        """Whether it is this side that decides."""
        self.near = False
        """Whether tensors are to cross in this way."""
        self._out: _Ring | None = None
        self._left: list[_Ring] = []
        """Rings that were too small, until they have been read."""
        self._inside: dict[int, DeviceMemory] = {}
        self._read: Place | None = None

    def load(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Cargo]:
        """Tensors that have to be sent otherwise, and where the others lie, which are there when this returns."""
        mine = [at for at, tensor in enumerate(tensors) if self.near and tensor.device == self.device]
        sizes = [aligned(tensors[at].nbytes) for at in mine]
        total = sum(sizes)
        ring = self._ring(total) if total else None
        if ring is None:
            return list(tensors), Cargo(self.near, self._read)
        start = ring.take(total)
        assert start is not None
        items, offset = [], start
        for at, size in zip(mine, sizes, strict=True):
            items.append(Item(at, offset, tensors[at].dtype, tuple(tensors[at].shape)))
            offset += size
        full = [item for item in items if tensors[item.at].numel()]
        with torch.no_grad():
            torch._foreach_copy_([_tensor(ring.memory, item) for item in full], [tensors[i.at] for i in full])
        wait_for(self.device)
        rest = [tensor for at, tensor in enumerate(tensors) if at not in set(mine)]
        handle = None if ring.known else (ring.memory.handle, ring.memory.nbytes)
        return rest, Cargo(self.near, self._read, Place(ring.generation, ring.written), tuple(items), handle)

    def unload(self, sent: Sequence[Tensor], cargo: Cargo, shore: Shore | None) -> list[Tensor]:
        """The tensors of a message, those that lie in the other side's ring among them, in memory of their own."""
        if not self._home:
            self.near = cargo.near
        self._note(cargo.read)
        if cargo.written is None:
            return list(sent)
        assert shore is not None
        if cargo.ring is not None and cargo.written.generation not in self._inside:
            self._inside = {cargo.written.generation: open_shared(*cargo.ring, self.device)}
        memory = self._inside[cargo.written.generation]
        rest = iter(sent)
        items = {item.at: item for item in cargo.items}
        found = []
        for at in range(len(sent) + len(items)):
            item = items.get(at)
            found.append(next(rest) if item is None else shore.bring(_tensor(memory, item)))
        wait_for(self.device)
        self._read = cargo.written
        return found

    def _note(self, read: Place | None) -> None:
        """The other side has read so far."""
        if read is None or self._out is None:
            return
        for ring in (*self._left, self._out):
            if ring.generation == read.generation:
                ring.known, ring.read = True, max(ring.read, read.end)
        self._left = [ring for ring in self._left if ring.generation >= read.generation and ring.read < ring.written]

    def _ring(self, nbytes: int) -> _Ring | None:
        """A ring with room for so many bytes; None where the device has no memory for one."""
        ring = self._out
        if ring is not None and _has_room(ring, nbytes):
            return ring
        before, generation = (ring.memory.nbytes, ring.generation) if ring is not None else (0, 0)
        size = max(aligned(nbytes + nbytes // 4, GRAIN), 2 * before if nbytes <= before else 0)
        try:
            memory = allocate(size, self.device)
        except Refused:
            return None
        if ring is not None:
            self._left.append(ring)
        self._out = _Ring(memory, generation + 1)
        return self._out


def allocate(nbytes: int, device: torch.device) -> DeviceMemory:
    """Memory that can be shared; where there is none left, after torch has given back what it does not use."""
    try:
        return DeviceMemory.create(nbytes, device)
    except Refused:
        torch.cuda.empty_cache()
        return DeviceMemory.create(nbytes, device)


def open_shared(handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
    """The memory of another process, which was tried before; `CannotShare` where it is refused now."""
    try:
        return DeviceMemory.open(handle, nbytes, device)
    except Refused as refused:
        raise CannotShare(str(refused)) from refused


def _has_room(ring: _Ring, nbytes: int) -> bool:
    before = ring.written, ring.read
    fits = ring.take(nbytes) is not None
    ring.written, ring.read = before
    return fits


def _tensor(memory: DeviceMemory, item: Item) -> Tensor:
    nbytes = item.dtype.itemsize
    for size in item.shape:
        nbytes *= size
    if not nbytes:
        return torch.empty(item.shape, dtype=item.dtype, device=memory.device)
    return memory.tensor(item.offset, nbytes).view(item.dtype).view(item.shape)
