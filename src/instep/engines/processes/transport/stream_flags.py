"""Words in shared host memory that order the CUDA streams of several processes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch

from instep.engines.processes.transport.cuda_driver import (
    StreamOperation,
    map_host_memory,
    operation_array,
    queue_operations,
    unpin_memory,
    wait_operation,
    write_operation,
)
from instep.engines.processes.transport.shared_memory import SharedMemory

_STRIDE = 128
"""Bytes between two words, so that no two are in one cache line."""
_WORD = struct.Struct("<I")
_MODULUS = 1 << 32


class StreamFlags:
    """Counters that a stream of one process increases and streams of other processes wait for, without their hosts.

    A wait for a number that never comes cannot be interrupted. So the words are in host memory, which outlives every
    process but the one that created it, and `store` releases the waits on behalf of a process that died. Numbers are
    compared cyclically: the difference of two that are compared has to be less than 2**31.
    """

    def __init__(self, memory: SharedMemory, device: torch.device) -> None:
        """Use `create` or `attach`. Raises `DriverError` if the device cannot map the memory."""
        self._memory, self._device = memory, device
        self._address = map_host_memory(device, memory.address, memory.nbytes)
        self._operations: dict[tuple[int, ...], ctypes.Array[StreamOperation]] = {}
        """The operations of `signal_and_wait` by its words. Used by one call at a time."""

    @classmethod
    def create(cls, count: int, device: torch.device) -> StreamFlags:
        """New words, which are zero."""
        return cls(SharedMemory.create(count * _STRIDE, "words that order the streams of several processes"), device)

    @classmethod
    def attach(cls, fd: int, count: int, device: torch.device) -> StreamFlags:
        """The words of another process. Takes ownership of the descriptor."""
        return cls(SharedMemory.attach(fd, count * _STRIDE, writable=True), device)

    @property
    def fd(self) -> int:
        """The descriptor to send to other processes."""
        return self._memory.fd

    def signal(self, index: int, value: int, stream: int) -> None:
        """Set a word after the work that is queued on a stream, which is given by its handle."""
        operation = write_operation(self._address + index * _STRIDE, value % _MODULUS)
        queue_operations(self._device, stream, operation_array(operation))

    def wait(self, index: int, value: int, stream: int) -> None:
        """Let the work that is queued on a stream from now on wait until a word has reached a value."""
        operation = wait_operation(self._address + index * _STRIDE, value % _MODULUS)
        queue_operations(self._device, stream, operation_array(operation))

    def signal_and_wait(self, index: int, others: Sequence[int], value: int, stream: int) -> None:
        """Set a word, then wait until others have reached the same value. One thread at a time may call it."""
        key = (index, *others)
        operations = self._operations.get(key)
        if operations is None:
            waits = [wait_operation(self._address + other * _STRIDE, 0) for other in others]
            operations = operation_array(write_operation(self._address + index * _STRIDE, 0), *waits)
            self._operations[key] = operations
        value %= _MODULUS
        for operation in operations:
            operation.value = value
        queue_operations(self._device, stream, operations)

    def has_reached(self, index: int, value: int) -> bool:
        """Whether a word has reached a value."""
        word: int = _WORD.unpack_from(self._memory, index * _STRIDE)[0]
        return (word - value) % _MODULUS < _MODULUS // 2

    def store(self, index: int, value: int) -> None:
        """Set a word at once, from the host."""
        _WORD.pack_into(self._memory, index * _STRIDE, value % _MODULUS)

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            unpin_memory(self._device, self._memory.address)
