"""Anonymous shared memory passed by file descriptor, and ring buffers in it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.cuda_driver import pin_memory, unpin_memory
from instep.errors import EngineError
from instep.runtime.locks import ForkSafeLock

_CGROUP_ROOT, _SELF_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""A limit above this is none; the kernel writes a number near 2**63 for that."""


def available_memory() -> int:
    """How many bytes can still be had before the system, or the container, begins to end processes."""
    return min([_free_memory(), *(limit - used for limit, used in _cgroup_limits())])


def check_available(nbytes: int, what: str) -> None:
    """Raise where memory of that size cannot be had: taking it all the same would get this process killed."""
    free = available_memory()
    if nbytes > free:
        raise EngineError(
            f"{what} needs {_format_bytes(nbytes)} of shared memory, and {_format_bytes(max(0, free))} are free here "
            f"(the smaller of the system's available memory and the container's limit)."
        )


def _format_bytes(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:,} bytes"


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """The limit of each group around this process that has one, and what the group uses of it.

    Pages of files that nobody has looked at lately are not counted as used: the kernel gives them up first.
    """
    groups = _SELF_CGROUP.read_text("utf-8") if _SELF_CGROUP.exists() else ""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            here = root / str(folder).lstrip("/")
            limit, used = _read_int(here / names[0]), _read_int(here / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, used - _inactive_file_bytes(here / "memory.stat")


def _read_int(path: Path) -> int | None:
    """What a control file says; None where there is no such file, as in many containers, or it says `max`."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file_bytes(path: Path) -> int:
    counts: dict[str, int] = {}
    try:
        for line in path.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            counts[name] = int(count)
    except OSError:
        return 0
    return counts.get("total_inactive_file", counts.get("inactive_file", 0))


class _Mapping(mmap.mmap):
    """A mapping that owns its file descriptor. Whoever holds a tensor in it holds it, and with the last one it goes."""

    fd: int
    address: int
    pinned: torch.device | None = None
    """The accelerator that knows the pages."""
    _fork_count = -1
    """How many forks had led to the process in which this came to be shared."""
    pinnable: bool
    """Not twice; and never where pages are copied on write, for then this process would have its own from then on."""

    @classmethod
    def create(cls, fd: int, nbytes: int, shared: bool) -> _Mapping:
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        # The descriptor is ours to keep: from 3.13 on, mmap need not keep another.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        try:
            mapping = cls(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **options)
        except BaseException:
            os.close(fd)
            raise
        mapping.fd, mapping.pinnable = fd, shared
        mapping.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if shared:
            _shared_mappings[mapping.address] = nbytes, fd
            mapping._fork_count = _fork_count
        return mapping

    def is_shared(self) -> bool:
        """Whether others see what is written here, and did not only before a fork."""
        return self._fork_count == _fork_count

    def remap_from(self, other: _Mapping) -> None:
        """Own another one's descriptor, which owns this one's then, and show its memory at this address.

        After an interruption, and where another thread forks meanwhile, it may be called again.
        """
        self.fd, other.fd = other.fd, self.fd
        _shared_mappings[self.address] = len(self), self.fd
        if not _remap(self.address, len(self), self.fd, mmap.MAP_SHARED):
            del _shared_mappings[self.address]
            raise EngineError(f"memory cannot be shared with workers: {os.strerror(ctypes.get_errno())}.")
        self._fork_count = _fork_count

    def __del__(self) -> None:
        if hasattr(self, "address"):
            if self.pinned is not None:
                unpin_memory(self.pinned, self.address)
            _shared_mappings.pop(self.address, None)
            os.close(self.fd)


class SharedMemory:
    """A piece of memory that other processes can map; tensors made from it keep it alive."""

    def __init__(self, mapping: _Mapping, nbytes: int) -> None:
        self._mapping = mapping
        self.nbytes = nbytes

    @classmethod
    def create(cls, nbytes: int, what: str = "a tensor that is shared with the workers") -> SharedMemory:
        """New memory, all zero. It takes real memory only where it is written to."""
        nbytes = max(1, nbytes)
        check_available(nbytes, what)
        fd = os.memfd_create("instep", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(_Mapping.create(fd, nbytes, shared=True), nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int, writable: bool) -> SharedMemory:
        """The memory behind a descriptor, which is taken over, also where this fails.

        Memory that is not writable is copied on write: its owner's later writes are seen on pages that were not
        written here, and what is written here is seen here only.
        """
        return cls(_Mapping.create(fd, max(1, nbytes), shared=writable), max(1, nbytes))

    @property
    def fd(self) -> int:
        """The descriptor to send; it stays this memory's own."""
        return self._mapping.fd

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """A part of the memory as bytes, with a storage of exactly that size."""
        if not nbytes:  # frombuffer refuses to make nothing
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)

    def view(self) -> memoryview:
        """The memory for Python's own bytes."""
        return memoryview(self._mapping)

    def share(self) -> None:
        """See to it that others can see what is written here, also in a forked child, where this is a private copy.

        There it is put into new memory, once, and at the same address: whoever has a tensor in it keeps it.
        """
        with _share_lock:
            if not self._mapping.is_shared():
                new = SharedMemory.create(self.nbytes, "what a forked child shares with workers of its own")
                new.view()[:] = self.view()
                self._mapping.remap_from(new._mapping)

    def pin(self, device: torch.device) -> None:
        """Keep the pages where they are, so that copies to and from an accelerator are fast, where that can be had."""
        mapping = self._mapping
        if mapping.pinnable:
            mapping.pinnable = False
            mapping.pinned = device if pin_memory(device, mapping.address, self.nbytes) else None


_share_lock = ForkSafeLock()
_fork_count = 0
"""How many forks lead from the first process to this one."""
_shared_mappings: dict[int, tuple[int, int]] = {}
"""The size and the descriptor of every mapping that others see the writes of, by address."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def _remap(address: int, nbytes: int, fd: int, how: int) -> bool:
    """Whether memory behind a descriptor could be put where other memory was."""
    mapped = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, how | _MAP_FIXED, fd, 0)
    return mapped not in (None, _MAP_FAILED)


def _make_private_in_child() -> None:
    """A forked child (a DataLoader's worker) sees its parent's memory, and never writes into it.

    It is no snapshot, as a child's other memory is: pages that the child has not written show what the parent writes
    later, until `share` puts them into memory of the child's own. A copy of all at every fork would cost too much.
    """
    global _fork_count
    collects = gc.isenabled()
    gc.disable()  # a finalizer would change the table, and unmap an address that is about to be mapped again
    for address, (nbytes, fd) in _shared_mappings.items():
        # No room for a private copy: then nothing may be written at all, and a write ends the child, not the truth.
        if not _remap(address, nbytes, fd, mmap.MAP_PRIVATE) and _libc.mprotect(address, nbytes, mmap.PROT_READ):
            os._exit(70)
    _shared_mappings.clear()
    _fork_count += 1
    if collects:
        gc.enable()


os.register_at_fork(after_in_child=_make_private_in_child)


class RingLocation(NamedTuple):
    """Where in which ring a message's data lie."""

    generation: int
    size: int
    """Of the whole memory, in bytes."""
    start: int
    """Offset in the memory."""
    end: int
    """The position in the ring after the data, counted from the ring's beginning and never wrapped."""


NO_LOCATION = RingLocation(0, 0, 0, 0)
ALIGNMENT = 64
_RING_HEADER_BYTES = 4096
"""Bytes before the ring."""
_MIN_RING_BYTES = 1 << 20
_READ_COUNTER, _ATTACHED_FLAG = 0, 1


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """So many bytes, or as few more as end where the next thing may begin."""
    return -(-nbytes // to) * to


class _Ring:
    """A ring of memory after a page with two counters: how far it was read, and whether the receiver has mapped it."""

    def __init__(self, memory: SharedMemory, generation: int) -> None:
        self.memory = memory
        self.generation = generation
        self.capacity = memory.nbytes - _RING_HEADER_BYTES
        self.counters = memory.view()[:16].cast("Q")
        self.written = self.restart = 0
        """The sender's own: how far it has written, and where it began anew when all was read."""

    def block(self, place: RingLocation, nbytes: int) -> memoryview:
        return self.memory.view()[place.start : place.start + nbytes]

    def reserve(self, nbytes: int) -> RingLocation | None:
        """A place for that many bytes in one piece; None where that would write over what was not read."""
        read, start = max(self.counters[_READ_COUNTER], self.restart), self.written
        empty = read >= start
        # An empty ring begins anew: the same pages again, which are mapped and in the cache.
        if empty or start % self.capacity + nbytes > self.capacity:
            start = align(start, self.capacity)
        if start + nbytes - (start if empty else read) > self.capacity:
            return None
        if empty:
            self.restart = start
        self.written = start + align(nbytes)
        return RingLocation(
            self.generation, self.memory.nbytes, _RING_HEADER_BYTES + start % self.capacity, self.written
        )


class RingWriter:
    """The sender's side of a ring, where it writes what is too large for a frame.

    Nothing is written over before it was read. Where there is no room a larger ring takes over: the sender never
    waits for the receiver.
    """

    def __init__(self) -> None:
        self._ring: _Ring | None = None

    def reserve(self, nbytes: int, writer: torch.device | None = None) -> tuple[RingLocation, memoryview]:
        """A place for that many bytes, taken at once: an interruption later wastes it and harms nothing.

        `writer` is the accelerator that writes into it, if one does.
        """
        ring = self._ring
        place = ring.reserve(nbytes) if ring is not None else None
        if ring is None or place is None:
            ring = self._ring = self._grow(ring, nbytes)
            place = ring.reserve(nbytes)
            assert place is not None
        if writer is not None:
            ring.memory.pin(writer)
        return place, ring.block(place, nbytes)

    @staticmethod
    def _grow(ring: _Ring | None, nbytes: int) -> _Ring:
        before, generation = (ring.capacity, ring.generation) if ring is not None else (0, 0)
        capacity = max(_MIN_RING_BYTES, align(nbytes + nbytes // 4, 4096), 2 * before if nbytes <= before else 0)
        return _Ring(
            SharedMemory.create(_RING_HEADER_BYTES + capacity, "what is sent to another process"), generation + 1
        )

    def fd_to_send(self) -> int | None:
        """The descriptor, to be sent along with every message until the receiver has noted that it has it."""
        ring = self._ring
        return None if ring is None or ring.counters[_ATTACHED_FLAG] else ring.memory.fd


class RingReader:
    """The receiver's side of a ring."""

    def __init__(self) -> None:
        self._ring: _Ring | None = None

    def attach(self, place: RingLocation, fd: int) -> None:
        """Take over the descriptor of the ring that a message names; one that is here already is closed."""
        ring = self._ring
        if ring is not None and place.generation == ring.generation:
            os.close(fd)
        else:
            ring = self._ring = _Ring(SharedMemory.attach(fd, place.size, writable=True), place.generation)
        ring.counters[_ATTACHED_FLAG] = 1

    def block(self, place: RingLocation, nbytes: int) -> memoryview:
        """A message's data; `ValueError` where they lie in memory that is not here, or would not lie in it."""
        ring = self._ring
        if ring is None or (place.generation, place.size) != (ring.generation, ring.memory.nbytes):
            raise ValueError("it lies in memory that was never handed over")
        if place.start < _RING_HEADER_BYTES or place.start + nbytes > ring.memory.nbytes:
            raise ValueError("it would lie outside the memory that was handed over")
        return ring.block(place, nbytes)

    def pin(self, device: torch.device) -> None:
        """An accelerator reads the ring."""
        if self._ring is not None:
            self._ring.memory.pin(device)

    def release(self, place: RingLocation) -> None:
        """All up to this message may be written over: it, and any before it that were lost."""
        if self._ring is not None:
            self._ring.counters[_READ_COUNTER] = place.end
