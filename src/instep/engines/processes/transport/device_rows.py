"""All-gather of small rows in the memory of a GPU that several processes use or reach, ordered by their streams.

Every replica has two regions in device memory and a flag. To take part in a collective it queues the writing of its row
to one of them and a signal with the number of the collective, and then waits for the other flags, all on its stream.
The rows of a call lie one after the other, and start again at the beginning when no other row may fit: a stream that
reaches collective n + 2 has seen every other stream reach n + 1, i.e. finish reading n. Calls use the regions in turn.

No host waits for another one, so a replica may be ahead of the others. Each compares its label of a collective with
those of the replicas that were there before. A replica whose label differs, that fails, or that leaves while others are
ahead, signals all numbers of the call: no stream waits for ever, and the call fails.
"""

from __future__ import annotations

import hashlib
import os
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.cuda_driver import DeviceMemory, current_raw_stream
from instep.engines.processes.transport.cuda_ipc import allocate_shared, open_shared, poison
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.engines.processes.transport.stream_flags import StreamFlags
from instep.runtime.modes import set_inference_mode
from instep.runtime.shared_wait import MemoryFence

MAX_ROW_BYTES = 256 * 1024
"""Maximum size of a row."""
REGION_BYTES = 4 * MAX_ROW_BYTES
"""Memory for the rows of one replica in one call. At least three rows have to fit."""
_ALIGNMENT = 256
_MAX_VIEWS = 4096
"""Cached views of rows, one for each place, size and dtype."""
CALL_NUMBERS = 1 << 20
"""A call's numbers are its base plus 1, 2, ..., less than this. The last one stands for all of them."""
_LABELS = 1024
"""Number of last labels of a replica that are kept."""
_NUMBER, _LEFT, _REQUEST, _BASE, _FIRST_LABEL = 0, 1, 2, 3, 4
"""Words of a replica's header: its last number, the base of the call that it has left, the id and the base of its last
request, and digests of labels."""
_HEADER_WORDS = _FIRST_LABEL + _LABELS


class RowCall(NamedTuple):
    """A worker's part in a call."""

    request_id: int
    base: int


class DeviceRowMemory:
    """Regions, flags and headers of up to `capacity` replicas on one device. The parent owns them."""

    def __init__(self, device_memory: DeviceMemory, flags: StreamFlags, headers: SharedMemory, capacity: int) -> None:
        """Use `create` or `attach`."""
        self.device_memory, self.flags, self.header_memory = device_memory, flags, headers
        self.capacity, self.device = capacity, device_memory.device
        self.owner_pid = os.getpid()
        words = headers.view().cast("q")
        self.headers = [words[i * _HEADER_WORDS : (i + 1) * _HEADER_WORDS] for i in range(capacity)]
        self.base = 0
        """In the parent: the base of the current call."""
        self._completed_base = 0
        self._sent_requests = [RowCall(0, 0)] * capacity
        """In the parent: by replica, the last request that was sent."""
        self._is_released = False
        """In the parent: whether the waits for a worker were released in the current call."""
        self._stream: Any = None
        """The stream of this process's last collective."""
        self._raw_stream = -1
        self._call_lock = threading.Lock()
        self.fence = MemoryFence()
        with set_inference_mode(False):
            self.regions = device_memory.tensor(0, 2 * capacity * REGION_BYTES).view(2, capacity, REGION_BYTES)
            """The memory as bytes: both regions of each replica."""
        self._views: dict[tuple[int, int, int, int, torch.dtype], list[Tensor]] = {}

    @classmethod
    def create(cls, capacity: int, device: torch.device) -> DeviceRowMemory:
        """Raises `DriverError` if the memory cannot be allocated or shared."""
        return cls(
            allocate_shared(2 * capacity * REGION_BYTES, device),
            StreamFlags.create(capacity, device),
            SharedMemory.create(8 * capacity * _HEADER_WORDS, "the headers of collectives"),
            capacity,
        )

    @classmethod
    def attach(cls, handle: bytes, fds: list[int], capacity: int, device: torch.device) -> DeviceRowMemory:
        """The memory of the parent. Takes ownership of the descriptors, those of the headers and of the flags."""
        headers = SharedMemory.attach(fds[0], 8 * capacity * _HEADER_WORDS, writable=True)
        flags = StreamFlags.attach(fds[1], capacity, device)
        return cls(open_shared(handle, 2 * capacity * REGION_BYTES, device), flags, headers, capacity)

    @property
    def fds(self) -> list[int]:
        """The descriptors to send to a worker."""
        return [self.header_memory.fd, self.flags.fd]

    def start_call(self) -> int:
        """Start a call or a backward, in the parent; returns its base. Whether that is odd tells which region it uses.

        It uses the region of the last call again only if that had no collectives.
        """
        with self._call_lock:
            last_number = max(self.base, *(header[_NUMBER] for header in self.headers))
            region = (self.base + (last_number > self.base)) % 2
            if self._completed_base == self.base and not self._is_released:
                base = last_number + 1
            else:  # any number of it may be, or may still be, signalled
                base = self.base + CALL_NUMBERS
            self.base = base + (base + region) % 2
            self._is_released = False
            return self.base

    def set_request(self, index: int, request_id: int) -> None:
        """In the parent: record the request that makes a worker take part in the current call, before it is sent."""
        header = self.headers[index]
        header[_REQUEST] = 0  # the worker may just handle an error of an earlier request
        self.fence()
        header[_BASE] = self.base
        self.fence()
        header[_REQUEST] = request_id

    def confirm_request(self, index: int, request_id: int) -> RowCall:
        """In the parent: record that the request was sent, so that the others may wait for the worker."""
        with self._call_lock:
            request = self._sent_requests[index] = RowCall(request_id, self.base)
            return request

    def complete_call(self, base: int) -> bool:
        """In the parent: record that a call has ended on all replicas, each with the same number of collectives.

        Returns False if rows were lost, because a worker has died.
        """
        with self._call_lock:
            if self._is_released:
                return False
            self._completed_base = base
            return True

    def rows(self, region: int, count: int, offset: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """The rows of `count` replicas at an offset in their regions: as `[count, numel]`, and each of them."""
        key = region, count, offset, numel, dtype
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            with set_inference_mode(False):
                rows = _rows_at(self.regions[region, :count], offset, numel, dtype)
                views = self._views[key] = [rows, *rows.unbind()]
        return views

    def current_stream(self) -> int:
        """The handle of the current stream, which waits for the stream of the last collective if it is another one."""
        stream = current_raw_stream(self.device)
        if stream != self._raw_stream:
            current = torch.cuda.current_stream(self.device)
            if self._stream is not None:  # it may still read the rows
                current.wait_stream(self._stream)
            self._stream, self._raw_stream = current, stream
        return stream

    def release_request(self, index: int, request: RowCall, *, results_lost: bool) -> None:
        """In the parent: release all waits for a worker that died, unless another one has taken its place.

        Rows that somebody waits for become NaN. `results_lost` says whether the worker ended before the results of an
        earlier call were complete: then streams may also wait for rows of that call.
        """
        with self._call_lock:
            if self._sent_requests[index] != request:
                return
            if request.base == self.base and (results_lost or self.base != self._completed_base):
                self._release(index, self.base + CALL_NUMBERS - 1)
            elif results_lost:  # the next call has begun: only waits of earlier calls end
                self._release(index, self.base)

    def release_unsent(self, index: int, base: int) -> None:
        """In the parent: release all waits for a replica that failed before its request was sent.

        In the order of the stream, which has seen all earlier signals of the worker. A worker that has received its
        request releases the waits itself.
        """
        with self._call_lock:
            if base == self.base != self._sent_requests[index].base:
                self.flags.signal(index, base + CALL_NUMBERS - 1, self.current_stream())
                self._is_released = True

    def can_send(self, index: int, *, again: bool) -> bool:
        """In the parent: whether a worker can still take part in the current call.

        It cannot if the waits for the worker before it were released, nor, if the request is sent `again` to a
        replacement, if the worker before it has exchanged rows. Then all waits for it are released.
        """
        with self._call_lock:
            can_send = not self.flags.has_reached(index, self.base + CALL_NUMBERS - 1)
            if again and self.headers[index][_NUMBER] > self.base:
                can_send = False
            if not can_send:
                self._release(index, self.base + CALL_NUMBERS - 1)
            elif again:
                self._sent_requests[index] = RowCall(0, 0)  # the end of the worker before has no effect any more
            return can_send

    def _release(self, index: int, number: int) -> None:
        """Signal all numbers up to one on behalf of a worker that died. All rows become NaN."""
        poison(self.device_memory)
        self.flags.store(index, number)
        self._is_released = True

    def fail_request(self, request_id: int) -> None:
        """In a worker: after an error in a request, release all waits for its replica."""
        for index, header in enumerate(self.headers):
            last_number = header[_BASE] + CALL_NUMBERS - 1
            self.fence()
            if header[_REQUEST] == request_id:
                header[_NUMBER] = last_number  # the request cannot be sent again
                self.flags.signal(index, last_number, self.current_stream())


@lru_cache(maxsize=4096)
def label_digest(label: str) -> int:
    """The 64 bits by which replicas compare the labels of a collective."""
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little", signed=True)


def fits_device_row(nbytes: int) -> bool:
    """Whether a row of this size is exchanged on a device. All replicas decide alike: their rows are alike."""
    return 0 < nbytes <= MAX_ROW_BYTES


def _rows_at(regions: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    return regions[:, offset : offset + numel * dtype.itemsize].view(dtype)


class RowPlace(NamedTuple):
    """Where the rows of a collective are in the regions."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class RowLog:
    """The results of a call's exchanges of rows. Those on a device are copied from the regions together."""

    def __init__(self) -> None:
        self._rows: list[Tensor | RowPlace] = []
        self._copies: list[tuple[int, Tensor]] = []
        """Copies of the regions, each with the number of rows up to which it has them."""

    def append(self, rows: Tensor | RowPlace) -> None:
        self._rows.append(rows)

    def copy_regions(self, regions: Tensor) -> None:
        """Copy the rows that were added since the last copy."""
        start = self._copies[-1][0] if self._copies else 0
        ends = [
            place.offset + place.shape.numel() * place.dtype.itemsize
            for place in self._rows[start:]
            if isinstance(place, RowPlace)
        ]
        if ends:
            self._copies.append((len(self._rows), regions[:, : _align(max(ends))].clone()))

    def on_host(self) -> list[Tensor]:
        """The results that were not exchanged on a device."""
        return [rows for rows in self._rows if isinstance(rows, Tensor)]

    def all(self) -> list[Tensor]:
        """All results in order, each as `[count, *row.shape]`."""
        results, copies = [], list(self._copies)
        for at, rows in enumerate(self._rows):
            while copies and copies[0][0] <= at:
                copies.pop(0)
            if isinstance(rows, RowPlace):
                regions = copies[0][1]
                rows = _rows_at(regions, rows.offset, rows.shape.numel(), rows.dtype).view(len(regions), *rows.shape)
            results.append(rows)
        return results


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class DeviceRowExchange:
    """One replica's part in one call, or one backward, that uses a `DeviceRowMemory`."""

    def __init__(self, memory: DeviceRowMemory, base: int, index: int, count: int) -> None:
        self.memory, self.base = memory, base
        self._index, self._count = index, count
        self._number = base
        self._header = memory.headers[index]
        self._peers = [i for i in range(count) if i != index]
        self._region = base % 2
        self._offset = 0
        """Where the last row ends."""

    def accepts(self, row: Tensor) -> bool:
        """Whether a row is exchanged on the device."""
        return row.device == self.memory.device and fits_device_row(row.nbytes)

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """The memory for this replica's next row. None if that is not exchanged on the device."""
        nbytes = numel * dtype.itemsize
        if device != self.memory.device or not fits_device_row(nbytes):
            return None
        self.memory.current_stream()
        views = self.memory.rows(self._region, self._count, self._next_offset(), numel, dtype)
        return views[1 + self._index]

    def _next_offset(self) -> int:
        return self._offset if self._offset + MAX_ROW_BYTES <= REGION_BYTES else 0

    def gather(self, label: str, row: Tensor, log: RowLog | None = None) -> Tensor | None:
        """Queue an all-gather. None if another replica has left or has called another collective."""
        memory = self.memory
        number = self._number = self._number + 1
        digest = label_digest(label)
        self._header[_FIRST_LABEL + number % _LABELS] = digest
        self._header[_NUMBER] = number
        memory.fence()
        for peer in self._peers:
            header = memory.headers[peer]
            has_left = header[_LEFT] == self.base and header[_NUMBER] < number
            is_kept = 0 <= header[_NUMBER] - number < _LABELS - 1
            if has_left or (is_kept and header[_FIRST_LABEL + number % _LABELS] != digest):
                self._signal_all()  # the other replica's host may wait for its device
                return None
        offset, stream = self._next_offset(), memory.current_stream()
        end = _align(offset + row.nbytes)
        # Before the signal, after which other replicas may write their next row: if that is at the beginning of the
        # region, the rows so far are logged now, and this one with the next.
        if log is not None and (offset < self._offset or end + MAX_ROW_BYTES > REGION_BYTES):
            log.copy_regions(memory.regions[self._region, : self._count])
        numel, shape, dtype = row.numel(), row.shape, row.dtype
        views = memory.rows(self._region, self._count, offset, numel, dtype)
        rows, own = views[0], views[1 + self._index]
        if row.data_ptr() != own.data_ptr():
            own.copy_(row.reshape(-1))
        self._offset = end
        memory.flags.signal_and_wait(self._index, self._peers, number, stream)
        if log is not None:
            log.append(RowPlace(offset, shape, dtype))
        return rows if row.ndim == 1 else rows.view(self._count, *shape)

    def leave(self, failed: bool, log: RowLog | None = None) -> None:
        """End the replica's part. Signals all numbers of the call if another replica's stream may wait for them."""
        try:
            if log is not None and self._offset and not failed:
                self.memory.current_stream()
                log.copy_regions(self.memory.regions[self._region, : self._count])
        finally:
            self._header[_LEFT] = self.base
            self.memory.fence()
            if failed or any(self.memory.headers[peer][_NUMBER] > self._number for peer in self._peers):
                self._signal_all()

    def _signal_all(self) -> None:
        """Signal all numbers of the call: no other stream waits for this replica any more."""
        self.memory.flags.signal(self._index, self.base + CALL_NUMBERS - 1, self.memory.current_stream())

    def counts(self) -> list[int]:
        """The number of collectives that each replica has begun in this call."""
        return [max(0, self.memory.headers[i][_NUMBER] - self.base) for i in range(self._count)]
