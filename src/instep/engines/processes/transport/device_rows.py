"""All-gather of small rows on a GPU that several processes use, ordered by their streams.

Every replica has two slots in device memory and a flag. To take part in a collective it queues a copy of its row to a
slot and a signal with the number of the collective, and then waits for the other flags, all on its stream. Two slots
are enough: a stream that reaches collective n + 2 has seen every other stream reach n + 1, i.e. finish reading n.

No host waits for another one. So a replica may be ahead of the others, and they find out whether all call the same
collectives by comparing labels: whoever comes last sees a difference. A replica that leaves too early signals all
numbers of the call, so that no stream waits for ever; the call then fails.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import lru_cache

import torch
from torch import Tensor

from instep.engines.processes.transport.cuda_driver import DeviceMemory, current_raw_stream
from instep.engines.processes.transport.cuda_ipc import allocate_shared, open_shared, poison
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.engines.processes.transport.stream_flags import StreamFlags

SLOT_BYTES = 256 * 1024
"""Maximum size of a row."""
CALL_NUMBERS = 1 << 20
"""A call's numbers are its base plus 1, 2, ..., less than this."""
_LABELS = 1024
"""Number of last labels of a replica that are kept."""
_NUMBER, _LEFT, _FIRST_LABEL = 0, 1, 2
"""Words of a replica's header: its last number, the base of the call that it has left, and digests of labels."""
_HEADER_WORDS = _FIRST_LABEL + _LABELS
_MAX_VIEWS = 256


@lru_cache(maxsize=4096)
def _digest(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)


class DeviceRowMemory:
    """Slots, flags and headers of up to `capacity` replicas on one device. The parent owns them."""

    def __init__(self, slots: DeviceMemory, flags: StreamFlags, headers: SharedMemory, capacity: int) -> None:
        """Use `create` or `attach`."""
        self.slots, self.flags, self.header_memory = slots, flags, headers
        self.capacity, self.device = capacity, slots.device
        self.owner_pid = os.getpid()
        words = headers.view().cast("q")
        self.headers = [words[i * _HEADER_WORDS : (i + 1) * _HEADER_WORDS] for i in range(capacity)]
        self.base = 0
        """In the parent: the base of the current call."""
        self._lock = threading.Lock()
        self._views: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}

    @classmethod
    def create(cls, capacity: int, device: torch.device) -> DeviceRowMemory:
        """Raises `DriverError` if the memory cannot be allocated or shared."""
        return cls(
            allocate_shared(2 * capacity * SLOT_BYTES, device),
            StreamFlags.create(capacity, device),
            SharedMemory.create(8 * capacity * _HEADER_WORDS, "the headers of collectives"),
            capacity,
        )

    @classmethod
    def attach(cls, handle: bytes, fds: list[int], capacity: int, device: torch.device) -> DeviceRowMemory:
        """The memory of the parent. Takes ownership of the descriptors, those of the flags and of the headers."""
        return cls(
            open_shared(handle, 2 * capacity * SLOT_BYTES, device),
            StreamFlags.attach(fds[0], capacity, device),
            SharedMemory.attach(fds[1], 8 * capacity * _HEADER_WORDS, writable=True),
            capacity,
        )

    @property
    def fds(self) -> list[int]:
        """The descriptors to send to a worker."""
        return [self.flags.fd, self.header_memory.fd]

    def start_call(self) -> int:
        """Start a call or a backward, in the parent; returns its base."""
        with self._lock:
            self.base += CALL_NUMBERS
            return self.base

    def fence(self) -> None:
        """Order this thread's memory accesses before it and after it."""
        for _ in range(2):
            self._lock.acquire()
            self._lock.release()

    def views(self, count: int, row: Tensor) -> list[Tensor]:
        """Both slots of `count` replicas for rows like this one, each as `[count, *row.shape]`."""
        key = count, row.shape, row.dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            nbytes = self.capacity * SLOT_BYTES
            blocks = [self.slots.tensor(parity * nbytes, nbytes).view(row.dtype) for parity in (0, 1)]
            rows = [block.view(self.capacity, -1)[:count, : row.numel()] for block in blocks]
            views = self._views[key] = [block.view(count, *row.shape) for block in rows]
        return views

    def release(self, index: int, base: int, *, lost: bool = True) -> None:
        """In the parent: signal all numbers of a call on behalf of a worker, unless the next call has begun.

        If its rows are `lost` because it died, they become NaN.
        """
        with self._lock:
            if base == self.base:
                if lost:
                    poison(self.slots)
                self.flags.store(index, base + CALL_NUMBERS - 1)


def fits_device_slot(row: Tensor, device: torch.device) -> bool:
    """Whether a row can be exchanged through a slot of a device. All replicas decide alike: their rows are alike."""
    return row.device == device and 0 < row.nbytes <= SLOT_BYTES


class DeviceRowExchange:
    """One replica's part in one call, or one backward, that uses a `DeviceRowMemory`."""

    def __init__(self, memory: DeviceRowMemory, base: int, index: int, count: int) -> None:
        self.memory, self.base = memory, base
        self._index, self._count = index, count
        self._number = base
        self._header = memory.headers[index]
        self._peers = [i for i in range(count) if i != index]

    @property
    def num_started(self) -> int:
        """The number of collectives so far."""
        return self._number - self.base

    def gather(self, label: str, row: Tensor) -> Tensor | None:
        """Queue an all-gather. None if another replica has left or has called another collective."""
        memory = self.memory
        number = self._number = self._number + 1
        digest = _digest(label)
        self._header[_FIRST_LABEL + number % _LABELS] = digest
        self._header[_NUMBER] = number
        memory.fence()
        for peer in self._peers:
            header = memory.headers[peer]
            if header[_LEFT] == self.base and header[_NUMBER] < number:
                return None
            ahead = header[_NUMBER] - number
            if 0 <= ahead < _LABELS - 1 and header[_FIRST_LABEL + number % _LABELS] != digest:
                return None
        rows = memory.views(self._count, row)[number & 1]
        rows[self._index].copy_(row)
        memory.flags.signal_and_wait(self._index, self._peers, number, current_raw_stream(memory.device))
        return rows

    def leave(self, failed: bool) -> None:
        """End the replica's part. Signals all numbers of the call if another replica's stream may wait for them."""
        self._header[_LEFT] = self.base
        self.memory.fence()
        if failed or any(self.memory.headers[peer][_NUMBER] > self._number for peer in self._peers):
            stream = current_raw_stream(self.memory.device)
            self.memory.flags.signal(self._index, self.base + CALL_NUMBERS - 1, stream)

    def counts(self) -> list[int]:
        """The number of collectives that each replica has begun in this call."""
        return [max(0, self.memory.headers[i][_NUMBER] - self.base) for i in range(self._count)]
