"""All-gather of small rows through memory that all processes of a call map.

Every replica has a header and two slots. To take part in a collective it writes its row to a slot, then the number of
the collective to its header, and waits until the other headers have that number. Two slots are enough: a replica that
reaches collective n + 2 has seen every other replica reach n + 1, i.e. finish reading n.

Nothing is reported through this memory except that rows will not arrive: another replica has returned or failed, or
has called another collective. The replicas then exchange the same rows by messages, and the parent, which knows what
every replica does, raises the error.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from instep.engines.processes.transport.device_rows import DeviceRowMemory, label_digest
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.runtime.affinity import thread_spin_seconds
from instep.runtime.modes import set_inference_mode
from instep.runtime.shared_wait import MemoryFence, wait_until

_MAX_VIEWS = 256
"""Cached views of slots, one for each shape and dtype of rows."""
SLOT_BYTES = 64 * 1024
"""Maximum size of a row."""
_HEADER_BYTES = 128
_NUMBER, _LEFT, _LABELS = 0, 1, 2
"""Words of a replica's header: the number of the collective that it has reached, the base of the call that it has left,
and the digests of the labels of its last two collectives."""
_CURRENT, _BROKEN = 0, 1
"""Words of the parent's header, which precedes those of the replicas: the bases of the call that runs, and of the last
call in which a replica failed."""
_CALL_SHIFT = 32
"""A call's numbers start at its base, a multiple of `1 << _CALL_SHIFT`."""


def fits_slot(row: Tensor) -> bool:
    """Whether a row is exchanged through the memory. All replicas decide alike: their rows are alike."""
    return row.device.type == "cpu" and 0 < row.nbytes <= SLOT_BYTES


class RowMemory:
    """The memory of up to `capacity` replicas."""

    def __init__(self, memory: SharedMemory, capacity: int, memory_id: int = 0) -> None:
        self.memory, self.capacity = memory, capacity
        self.memory_id = memory_id
        """The id by which the parent's requests refer to it."""
        self.device_rows: DeviceRowMemory | None = None
        """Memory for rows on a device that all replicas use."""
        self.owner_pid = os.getpid()
        self._calls = 0
        headers = memory.view()[: _HEADER_BYTES * (capacity + 1)].cast("q")
        words = _HEADER_BYTES // 8
        self.parent_header, *self.headers = [headers[i * words : (i + 1) * words] for i in range(capacity + 1)]
        self._views: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}
        self.fence = MemoryFence()

    @classmethod
    def create(cls, capacity: int, memory_id: int) -> RowMemory:
        nbytes = _slots_offset(capacity) + 2 * capacity * SLOT_BYTES
        return cls(SharedMemory.create(nbytes, "the memory for collectives"), capacity, memory_id)

    @classmethod
    def attach(cls, fd: int, nbytes: int, capacity: int) -> RowMemory:
        """Map the memory of a descriptor, and take ownership of it."""
        return cls(SharedMemory.attach(fd, nbytes, writable=True), capacity)

    def start_call(self) -> int:
        """Start a call or a backward, in the parent; returns its base. An earlier call ends."""
        self._calls += 1
        base = self.parent_header[_CURRENT] = self._calls << _CALL_SHIFT
        return base

    def slots(self, count: int, shape: torch.Size, dtype: torch.dtype) -> list[Tensor]:
        """Both slots of `count` replicas for rows of a shape and dtype, each as `[count, *shape]`."""
        key = count, shape, dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            offset, nbytes = _slots_offset(self.capacity), self.capacity * SLOT_BYTES
            with set_inference_mode(False):
                blocks = [self.memory.tensor(offset + parity * nbytes, nbytes).view(dtype) for parity in (0, 1)]
                rows = [block.view(self.capacity, -1)[:count, : shape.numel()] for block in blocks]
                views = self._views[key] = [row.view(count, *shape) for row in rows]
        return views


def _slots_offset(capacity: int) -> int:
    page = 4096
    return -(-_HEADER_BYTES * (capacity + 1) // page) * page


class RowExchange:
    """One replica's part in one call, or one backward, that uses a `RowMemory`.

    Args:
        base: The call's first number (see `RowMemory.start_call`).
        index: The replica.
        count: The number of replicas.
        num_replayed: The number of collectives that have completed. A worker that replaces another one replays them,
            and writes nothing meanwhile: replicas may still read what the other one wrote.
    """

    def __init__(self, memory: RowMemory, base: int, index: int, count: int, num_replayed: int = 0) -> None:
        self._memory, self.base, self._count = memory, base, count
        self._index = index
        self._number = base
        self._first_number = base + num_replayed + 1
        self._header = memory.headers[index]
        self._peers = [header for i, header in enumerate(memory.headers[:count]) if i != index]
        self._slots: Tensor

    @property
    def num_completed(self) -> int:
        """The number of collectives before the current one."""
        return max(0, self._number - self.base - 1)

    def begin(self, label: str) -> None:
        """Begin a collective whose data is sent in another way."""
        self._number += 1
        self._publish(f"exchange: {label}")

    def skip(self) -> None:
        """Count a collective that is replayed."""
        self._number += 1

    def put(self, label: str, row: Tensor) -> None:
        """Begin an all-gather."""
        self._number += 1
        self._slots = self._memory.slots(self._count, row.shape, row.dtype)[self._number & 1]
        if not self._is_replaying():
            self._slots[self._index].copy_(row)
        self._publish(label)

    def _is_replaying(self) -> bool:
        return self._number < self._first_number

    def _publish(self, label: str) -> None:
        if not self._is_replaying():
            self._header[_LABELS + (self._number & 1)] = label_digest(label)
            self._memory.fence()
            self._header[_NUMBER] = self._number

    def has_arrived(self, index: int) -> bool:
        """Whether a replica has begun the current collective. It may have begun the next one too."""
        return 0 <= self._memory.headers[index][_NUMBER] - self._number <= 1

    def is_blocked(self) -> bool:
        """Whether the current collective cannot complete: a replica that is awaited has left, or the call is broken."""
        parent = self._memory.parent_header
        if parent[_CURRENT] != self.base or parent[_BROKEN] == self.base:
            return True
        left = [peer for peer in self._peers if peer[_LEFT] == self.base]
        self._memory.fence()  # the number is written first
        return any(not 0 <= peer[_NUMBER] - self._number <= 1 for peer in left)

    def wait(self, on_idle: Callable[[], bool]) -> Tensor | None:
        """Wait for the rows of the all-gather that was begun; None if they will not arrive.

        `on_idle` is called from time to time in a long wait, and returns whether to stop waiting.
        """
        if self._is_replaying():  # the first run did not call this
            return None
        number = self._number
        for peer in self._peers:
            if not 0 <= peer[_NUMBER] - number <= 1 and not self._wait_for(peer, on_idle):
                return None
        self._memory.fence()
        at = _LABELS + (number & 1)
        label = self._header[at]
        # A replica that has begun the next collective has found all labels equal.
        if any(peer[at] != label and peer[_NUMBER] == number for peer in self._peers):
            return None
        return self._slots.clone()

    def _wait_for(self, peer: memoryview, on_idle: Callable[[], bool]) -> bool:
        number = self._number
        return wait_until(
            lambda: 0 <= peer[_NUMBER] - number <= 1, self.is_blocked, on_idle, spin=thread_spin_seconds()
        )

    def leave(self) -> None:
        """End the replica's part: it begins no further collective."""
        self._memory.fence()
        self._header[_LEFT] = self.base

    def break_call(self) -> None:
        """Let all replicas of the call stop waiting; called by the parent."""
        self._memory.parent_header[_BROKEN] = self.base
