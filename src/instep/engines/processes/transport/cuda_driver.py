"""CUDA driver calls for IPC memory handles and page-locked host memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALLOCATION_GRANULARITY = 2 << 20
"""Sizes of allocations are multiples of this.

The driver places smaller allocations in a common block of this size, and an IPC handle shares the whole block.
"""
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE, _HOST_REGISTER_DEVICE_MAP = 1, 2
_WAIT_GREATER_OR_EQUAL = 0
"""`cuStreamWaitValue32` waits until the word minus the value, as a signed number, is not negative."""


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
        stream_operation = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        library.cuStreamWriteValue32_v2.argtypes = library.cuStreamWaitValue32_v2.argtypes = stream_operation
    except (OSError, AttributeError):
        return None
    return library


def _call_driver(name: str, *args: Any) -> None:
    code = int(getattr(_driver(), name)(*args))
    if code:
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


def write_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Queue the write of a 32-bit word, at an address of the device, after the work of a stream so far."""
    _call_driver("cuStreamWriteValue32_v2", stream.cuda_stream, address, value, 0)


def wait_for_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Let the later work of a stream wait until a 32-bit word has reached a value. Words may wrap around."""
    _call_driver("cuStreamWaitValue32_v2", stream.cuda_stream, address, value, _WAIT_GREATER_OR_EQUAL)


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
        return torch.as_tensor(_CudaArray(self, self._address + offset, nbytes), device=self.device)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _release(self.device, "cuMemFree_v2" if self._is_owner else "cuIpcCloseMemHandle", self._address)


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
