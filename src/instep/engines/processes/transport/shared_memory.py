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
_NO_LIMIT = 1 << 60
"""Larger limits mean none: cgroup v1 reports a number near 2**63."""


def available_memory() -> int:
    """Bytes that can be allocated before the kernel starts to kill processes of the system or the container."""
    system = _read_counters(Path("/proc/meminfo"))["MemAvailable"] * 1024
    return min([system, *(limit - used for limit, used in _cgroup_limits())])


def check_available(nbytes: int, purpose: str) -> None:
    """Raise `EngineError` if there is not enough memory. Writing to it would get this process killed."""
    available = available_memory()
    if nbytes > available:
        raise EngineError(
            f"{purpose} needs {_format_bytes(nbytes)} of shared memory, but only {_format_bytes(max(0, available))} "
            f"are available (the smaller of the system's available memory and the container's limit).\n"
            f"Use smaller batches, fewer replicas or engine='threads', or raise the container's limit."
        )


def _format_bytes(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:,} bytes"


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """The memory limit and the usage of each cgroup (v1 or v2) that contains this process and has a limit.

    The usage excludes inactive pages of files, which the kernel reclaims first.
    """
    groups = _SELF_CGROUP.read_text("utf-8") if _SELF_CGROUP.exists() else ""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "memory" if controllers else _CGROUP_ROOT
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        group = PurePosixPath(path)
        for ancestor in (group, *group.parents):
            folder = root / str(ancestor).lstrip("/")
            limit, used = (_read_int(folder / name) for name in names)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                counters = _read_counters(folder / "memory.stat")
                yield limit, used - counters.get("total_inactive_file", counters.get("inactive_file", 0))


def _read_int(path: Path) -> int | None:
    """The number in a control file; None if it holds `max` or does not exist, as in many containers."""
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_counters(path: Path) -> dict[str, int]:
    """The counters in a kernel file that has a name and a number in each line; empty if it does not exist."""
    try:
        lines = path.read_text("ascii").splitlines()
    except OSError:
        return {}
    return {name.rstrip(":"): int(number) for name, number, *_ in map(str.split, lines)}


class SharedMemory(mmap.mmap):
    """Memory that other processes can map. It owns its file descriptor; tensors made from it keep it alive."""

    fd: int
    """The descriptor to send to other processes."""
    address: int
    _pinned_for: torch.device | None = None
    _can_pin: bool
    """False after the first attempt, and for private mappings: pinning would copy their pages."""
    _shared_at_fork = -1
    """The value of `_fork_count` when this mapping became shared; -1 if it is private."""

    @classmethod
    def create(cls, nbytes: int, purpose: str = "a tensor that is shared with the workers") -> SharedMemory:
        """New memory filled with zeros. Pages are allocated when they are first written to."""
        nbytes = max(1, nbytes)
        check_available(nbytes, purpose)
        fd = os.memfd_create("instep", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return cls.attach(fd, nbytes, writable=True)

    @classmethod
    def attach(cls, fd: int, nbytes: int, writable: bool) -> SharedMemory:
        """Map the memory of a descriptor. Takes ownership of the descriptor, even on failure.

        Without `writable` the mapping is private (copy-on-write): writes are visible here only, and later writes of
        the owner are visible on pages that were not written here.
        """
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        # This object keeps the descriptor: mmap need not duplicate it (from Python 3.13 on).
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        try:
            memory = cls(fd, max(1, nbytes), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **options)
        except BaseException:
            os.close(fd)
            raise
        memory.fd, memory._can_pin = fd, writable
        memory.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if writable:
            _shared_mappings[memory.address] = memory.nbytes, fd
            memory._shared_at_fork = _fork_count
        return memory

    @property
    def nbytes(self) -> int:
        return len(self)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """A part of the memory as a uint8 tensor, with a storage of exactly that size."""
        if not nbytes:  # frombuffer requires at least one element
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=offset)

    def view(self) -> memoryview:
        """The memory as bytes."""
        return memoryview(self)

    def share(self) -> None:
        """Make writes visible to other processes again after a fork, in the child, where the mapping is private.

        The child's contents are moved to new shared memory, which is mapped at the same address: existing tensors stay
        valid. Does nothing if the mapping is already shared. After an interruption it can be called again.
        """
        with _share_lock:
            if self._shared_at_fork == _fork_count:
                return
            new = SharedMemory.create(self.nbytes, "memory that a forked child shares with its own workers")
            new.view()[:] = self.view()
            self.fd, new.fd = new.fd, self.fd
            _shared_mappings[self.address] = self.nbytes, self.fd
            if not _remap(self.address, self.nbytes, self.fd, mmap.MAP_SHARED):
                del _shared_mappings[self.address]
                raise EngineError(f"cannot share memory with workers: mmap: {os.strerror(ctypes.get_errno())}.")
            self._shared_at_fork = _fork_count

    def pin(self, device: torch.device) -> None:
        """Page-lock the memory, if possible: copies between it and an accelerator are several times as fast."""
        if self._can_pin:
            self._can_pin = False
            self._pinned_for = device if pin_memory(device, self.address, self.nbytes) else None

    def __del__(self) -> None:
        if hasattr(self, "address"):
            if self._pinned_for is not None:
                unpin_memory(self._pinned_for, self.address)
            _shared_mappings.pop(self.address, None)
            os.close(self.fd)


_share_lock = ForkSafeLock()
_fork_count = 0
"""Number of forks between the first process and this one."""
_shared_mappings: dict[int, tuple[int, int]] = {}
"""Size and descriptor of each shared (not private) mapping, by address."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def _remap(address: int, nbytes: int, fd: int, flags: int) -> bool:
    """Replace the mapping at an address. Returns whether it succeeded."""
    mapped = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0)
    return mapped not in (None, _MAP_FAILED)


def _make_private_in_child() -> None:
    """Make all mappings private in a forked child (a `DataLoader` worker), so that it cannot write to its parent's.

    This is not a snapshot: pages that the child has not written show later writes of the parent, until `share` copies
    them. Copying everything at each fork would cost too much.
    """
    global _fork_count
    gc_enabled = gc.isenabled()
    gc.disable()  # a finalizer would change the table, and unmap an address that is about to be mapped again
    for address, (nbytes, fd) in _shared_mappings.items():
        # If a private mapping is impossible, make the memory read-only: a write then kills the child.
        if not _remap(address, nbytes, fd, mmap.MAP_PRIVATE) and _libc.mprotect(address, nbytes, mmap.PROT_READ):
            os._exit(70)
    _shared_mappings.clear()
    _fork_count += 1
    if gc_enabled:
        gc.enable()


os.register_at_fork(after_in_child=_make_private_in_child)


ALIGNMENT = 64


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of `to`."""
    return -(-nbytes // to) * to


class RingAllocator:
    """Allocates contiguous blocks in a ring buffer. Positions count all bytes since the start, without wrapping."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = self.read = 0
        """Positions up to which data was written, and up to which the receiver has read."""

    def reserve(self, nbytes: int) -> int | None:
        """The offset of a block; None if unread data is in the way. `written` is then the position after the block."""
        start = self.written
        is_empty = self.read >= start
        # An empty ring restarts at offset 0, so that the same pages are used, which are mapped and cached.
        if is_empty or start % self.capacity + nbytes > self.capacity:
            start = align(start, self.capacity)
        if is_empty:
            self.read = start
        if start + nbytes - self.read > self.capacity:
            return None
        self.written = start + align(nbytes)
        return start % self.capacity


class RingLocation(NamedTuple):
    """Where the data of a message is."""

    generation: int
    """The number of the ring. A larger ring replaces one that is full."""
    size: int
    """Size of the ring's memory."""
    start: int
    """Offset of the data in the memory."""
    end: int
    """Position in the ring after the data (see `RingAllocator`)."""


NO_LOCATION = RingLocation(0, 0, 0, 0)
_RING_HEADER_BYTES = 4096
"""Size of the page before the ring. It holds the two 64-bit counters below."""
_MIN_RING_BYTES = 1 << 20
_READ_POSITION, _ATTACHED = 0, 1
"""Indices of the counters, which the receiver writes: its read position, and whether it has mapped the memory."""


class _Ring:
    """The memory of a ring buffer."""

    def __init__(self, memory: SharedMemory, generation: int) -> None:
        self.memory = memory
        self.generation = generation
        self.counters = memory.view()[:16].cast("Q")
        self.allocator = RingAllocator(memory.nbytes - _RING_HEADER_BYTES)
        """Used by the sender."""

    def block(self, location: RingLocation, nbytes: int) -> memoryview:
        return self.memory.view()[location.start : location.start + nbytes]


class RingWriter:
    """The sender's end of a ring buffer.

    Data is never overwritten before it was read. If there is no space, a larger ring takes over: the sender never waits
    for the receiver.
    """

    def __init__(self) -> None:
        self._ring: _Ring | None = None

    def reserve(self, nbytes: int, device: torch.device | None = None) -> tuple[RingLocation, memoryview]:
        """Reserve a block. If the caller is interrupted later, the block is wasted, which does no harm.

        `device` is the accelerator that copies data into the block, if any.
        """
        ring, offset = self._ring, None
        if ring is not None:
            ring.allocator.read = max(ring.allocator.read, ring.counters[_READ_POSITION])
            offset = ring.allocator.reserve(nbytes)
        if ring is None or offset is None:
            ring = self._ring = self._grow(ring, nbytes)
            offset = ring.allocator.reserve(nbytes)
            assert offset is not None
        if device is not None:
            ring.memory.pin(device)
        start = _RING_HEADER_BYTES + offset
        location = RingLocation(ring.generation, ring.memory.nbytes, start, ring.allocator.written)
        return location, ring.block(location, nbytes)

    @staticmethod
    def _grow(ring: _Ring | None, nbytes: int) -> _Ring:
        before, generation = (ring.allocator.capacity, ring.generation) if ring is not None else (0, 0)
        capacity = max(_MIN_RING_BYTES, align(nbytes + nbytes // 4, 4096), 2 * before if nbytes <= before else 0)
        memory = SharedMemory.create(_RING_HEADER_BYTES + capacity, "data that is sent to another process")
        return _Ring(memory, generation + 1)

    def fd_to_send(self) -> int | None:
        """The descriptor of the ring, which is sent with every message until the receiver has attached it."""
        ring = self._ring
        return None if ring is None or ring.counters[_ATTACHED] else ring.memory.fd


class RingReader:
    """The receiver's end of a ring buffer."""

    def __init__(self) -> None:
        self._ring: _Ring | None = None

    def attach(self, location: RingLocation, fd: int) -> None:
        """Attach the ring of a message. Takes ownership of its descriptor."""
        ring = self._ring
        if ring is not None and location.generation == ring.generation:
            os.close(fd)
        else:
            memory = SharedMemory.attach(fd, location.size, writable=True)
            ring = self._ring = _Ring(memory, location.generation)
        ring.counters[_ATTACHED] = 1

    def block(self, location: RingLocation, nbytes: int) -> memoryview:
        """The data of a message. Raises `ValueError` if the location is not in the attached ring."""
        ring = self._ring
        if ring is None or (location.generation, location.size) != (ring.generation, ring.memory.nbytes):
            raise ValueError("its ring buffer was not attached")
        if location.start < _RING_HEADER_BYTES or location.start + nbytes > ring.memory.nbytes:
            raise ValueError("its data is outside of the ring buffer")
        return ring.block(location, nbytes)

    def pin(self, device: torch.device) -> None:
        """Page-lock the ring for copies to an accelerator."""
        if self._ring is not None:
            self._ring.memory.pin(device)

    def release(self, location: RingLocation) -> None:
        """Allow the sender to overwrite this message and all earlier ones."""
        if self._ring is not None:
            self._ring.counters[_READ_POSITION] = location.end
