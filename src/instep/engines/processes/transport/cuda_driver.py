"""CUDA driver calls for IPC memory handles and page-locked host memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

ALLOCATION_GRANULARITY = 2 << 20
"""Sizes of allocations are multiples of this.

The driver places smaller allocations in a common block of this size, and an IPC handle shares the whole block.
"""
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICE_MAP = 1, 2
_NON_BLOCKING = 1
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
"""Operations of `cuStreamBatchMemOp`. A wait ends when the word minus the value, as a signed number, is not negative.
"""
_HIGHEST_PRIORITY = -100
"""The driver takes the nearest priority that it has."""
_INVALID_CONTEXT = 201
"""`CUDA_ERROR_INVALID_CONTEXT`."""


class DriverError(Exception):
    """A driver call failed."""


class IpcHandle(ctypes.Structure):
    """The handle by which another process opens device memory (`CUipcMemHandle`)."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


@cache
def _driver() -> Any:
    """The driver library; None if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, IpcHandle, ctypes.c_uint)
        library.cuMemAlloc_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
        library.cuIpcCloseMemHandle.argtypes = (ctypes.c_uint64,)
        library.cuIpcGetMemHandle.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        library.cuMemHostRegister_v2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cuMemHostUnregister.argtypes = (ctypes.c_void_p,)
        library.cuCtxPushCurrent_v2.argtypes = (ctypes.c_void_p,)
        library.cuMemHostGetDevicePointer_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        library.cuStreamBatchMemOp_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
    except (OSError, AttributeError):
        return None
    return library


def _call_driver(name: str, *args: Any) -> None:
    code = int(getattr(_driver(), name)(*args))
    if code:
        _raise_driver_error(name, code)


def _raise_driver_error(name: str, code: int) -> NoReturn:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
    raise DriverError(f"{name}: CUDA error {code} ({(text.value or b'unknown').decode()})")


@cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    """The device's primary context, which torch uses."""
    if _driver() is None:
        raise DriverError("the driver library (libcuda.so.1) was not found")
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call_driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _current_context(ordinal: int) -> Iterator[None]:
    """Make a device's context current in this thread."""
    _call_driver("cuCtxPushCurrent_v2", _primary_context(ordinal))
    try:
        yield
    finally:
        _call_driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def pin_memory(device: torch.device, address: int, nbytes: int) -> bool:
    """Page-lock host memory for copies to and from a CUDA device. Returns whether it succeeded."""
    if device.type != "cuda":
        return False
    try:
        with _current_context(device.index or 0):
            _call_driver("cuMemHostRegister_v2", address, nbytes, _HOST_REGISTER_PORTABLE)
    except DriverError:  # a limit on locked memory: copies are only slower
        return False
    return True


def map_host_memory(device: torch.device, address: int, nbytes: int) -> int:
    """Page-lock host memory and map it into the device's address space. Returns its address there."""
    pointer = ctypes.c_uint64()
    with _current_context(device.index or 0):
        _call_driver("cuMemHostRegister_v2", address, nbytes, _HOST_REGISTER_PORTABLE | _HOST_REGISTER_DEVICE_MAP)
        try:
            _call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), address, 0)
        except DriverError:
            _call_driver("cuMemHostUnregister", address)
            raise
    return int(pointer.value)


class StreamOperation(ctypes.Structure):
    """One operation on a 32-bit word in memory, in the order of a stream (`CUstreamBatchMemOpParams`)."""

    _fields_ = (
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def write_operation(address: int, value: int) -> StreamOperation:
    """Writes a word, at an address of the device, after the work of the stream so far."""
    return StreamOperation(_WRITE_VALUE_32, address, value)


def wait_operation(address: int, value: int) -> StreamOperation:
    """Lets the later work of the stream wait until a word has reached a value. Words may wrap around."""
    return StreamOperation(_WAIT_VALUE_32, address, value)


def current_raw_stream(device: torch.device) -> int:
    """The handle of the current stream. Much faster than `torch.cuda.current_stream`."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return handle


def operation_array(*operations: StreamOperation) -> ctypes.Array[StreamOperation]:
    """Operations for `queue_operations`. Their values may be changed after each use."""
    return (StreamOperation * len(operations))(*operations)


def queue_operations(device: torch.device, stream: int, operations: ctypes.Array[StreamOperation]) -> None:
    """Queue operations on a stream of a device, in order."""
    ordinal = device.index or 0
    code = _INVALID_CONTEXT
    if stream or torch._C._cuda_getDevice() == ordinal:  # the default stream has the same handle on every device
        code = _driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0)
    if code == _INVALID_CONTEXT:  # this thread uses another device, or none yet
        with _current_context(ordinal):
            code = _driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0)
    if code:
        _raise_driver_error("cuStreamBatchMemOp", code)


def unpin_memory(device: torch.device, address: int) -> None:
    """Undo `pin_memory` before the memory is unmapped."""
    _release(device, "cuMemHostUnregister", address)


def _release(device: torch.device, function: str, address: int) -> None:
    """Release memory, except at interpreter exit, when the driver does it, and in a forked child."""
    if not sys.is_finalizing() and os.getpid() == _owner_pid:
        with suppress(DriverError), _current_context(device.index or 0):
            _call_driver(function, address)


_owner_pid = os.getpid()


class DeviceMemory:
    """CUDA memory that other processes can open by its handle. Tensors made from it keep it alive."""

    def __init__(self, device: torch.device, address: int, nbytes: int, handle: bytes, is_owner: bool) -> None:
        """Use `create` or `open`."""
        self.device, self.nbytes, self.handle = device, nbytes, handle
        self._address, self._is_owner = address, is_owner

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Allocate uninitialized memory. Raises `DriverError` if it cannot be allocated or shared."""
        address, handle = ctypes.c_uint64(), IpcHandle()
        allocated = -(-max(1, nbytes) // ALLOCATION_GRANULARITY) * ALLOCATION_GRANULARITY
        with _current_context(device.index or 0):
            _call_driver("cuMemAlloc_v2", ctypes.byref(address), allocated)
            try:
                _call_driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except DriverError:
                _call_driver("cuMemFree_v2", address)
                raise
        return cls(device, int(address.value), max(1, nbytes), bytes(handle), is_owner=True)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """Open memory of another process. Raises `DriverError` if it cannot be opened."""
        address, opened = ctypes.c_uint64(), IpcHandle.from_buffer_copy(handle)
        with _current_context(device.index or 0):
            _call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _LAZY_ENABLE_PEER_ACCESS)
        return cls(device, int(address.value), nbytes, handle, is_owner=False)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """A part of the memory as a uint8 tensor, with a storage of exactly that size."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        tensor = torch.as_tensor(_CudaArray(self, self._address + offset, nbytes), device=self.device)
        if tensor.data_ptr() != self._address + offset:
            raise DriverError("this torch copies memory of another device instead of using it")
        return tensor

    def fill(self, byte: int) -> None:
        """Set every byte, on a stream of its own, and wait for that."""
        with _current_context(self.device.index or 0):
            stream = _fill_stream(self.device.index or 0)
            size = ctypes.c_size_t(self.nbytes)
            _call_driver("cuMemsetD8Async", ctypes.c_uint64(self._address), ctypes.c_ubyte(byte), size, stream)
            _call_driver("cuStreamSynchronize", stream)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _release(self.device, "cuMemFree_v2" if self._is_owner else "cuIpcCloseMemHandle", self._address)


@cache
def _fill_stream(ordinal: int) -> ctypes.c_void_p:  # noqa: ARG001
    """A stream of the current context that waits for no other one. Its priority gives it a queue of its own."""
    stream = ctypes.c_void_p()
    flags, priority = ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(_HIGHEST_PRIORITY)
    _call_driver("cuStreamCreateWithPriority", ctypes.byref(stream), flags, priority)
    return stream


class _CudaArray:
    """A part of device memory, in the form that `torch.as_tensor` accepts. The tensor keeps the memory alive."""

    def __init__(self, memory: DeviceMemory, address: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
