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

HANDLE_BYTES = 64
"""Bytes of a handle."""
ALLOCATION_GRANULARITY = 2 << 20
"""Memory is taken in pieces of so many bytes."""
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1
_ERROR_TEXTS = {1: "invalid value", 2: "out of memory", 201: "invalid context", 801: "not supported", 999: "unknown"}


class DriverError(Exception):
    """The driver said no; the text says to what, and why."""


class IpcHandle(ctypes.Structure):
    """What another process opens memory by."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    """The driver; None where there is none."""
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
    except (OSError, AttributeError):
        return None
    return library


def _call_driver(name: str, *args: Any) -> None:
    code = int(getattr(_driver(), name)(*args))
    if code:
        raise DriverError(f"{name}: CUDA error {code} ({_ERROR_TEXTS.get(code, _error_text(code))})")


def _error_text(code: int) -> str:
    text = ctypes.c_char_p()
    found = _driver().cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0
    return text.value.decode() if found and text.value is not None else "no text"


@cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    """The context that torch works in, which is the device's primary one."""
    if _driver() is None:
        raise DriverError("the driver's library (libcuda.so.1) is not there")
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call_driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _current_context(ordinal: int) -> Iterator[None]:
    """Make a device's context this thread's own, for the length of a `with` block."""
    _call_driver("cuCtxPushCurrent_v2", _primary_context(ordinal))
    try:
        yield
    finally:
        _call_driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def pin_memory(device: torch.device, address: int, nbytes: int) -> bool:
    """Whether pages are from now on known to an accelerator, which copies them several times as fast then."""
    if device.type != "cuda":
        return False
    try:
        with _current_context(device.index or 0):
            _call_driver("cuMemHostRegister_v2", address, nbytes, _HOST_REGISTER_PORTABLE)
    except DriverError:  # a limit on locked memory: copies work all the same, only slower
        return False
    return True


def unpin_memory(device: torch.device, address: int) -> None:
    """Forget pages, whose memory is about to go."""
    _release(device, "cuMemHostUnregister", address)


def _release(device: torch.device, how: str, address: int) -> None:
    """Give something back, unless the driver does so by itself, or it is that of the process that forked this one."""
    if not sys.is_finalizing() and os.getpid() == _owner_pid:
        with suppress(DriverError), _current_context(device.index or 0):
            _call_driver(how, address)


_owner_pid = os.getpid()


class DeviceMemory:
    """A piece of an accelerator's memory that other processes can open; tensors made from it keep it alive."""

    def __init__(self, device: torch.device, address: int, nbytes: int, handle: bytes, owns: bool) -> None:
        """Use `create` or `open`."""
        self.device, self.nbytes, self.handle = device, nbytes, handle
        self._address, self._owns = address, owns

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """New memory, with whatever was in it; `Refused` where it cannot be had or not be shared.

        The driver cuts smaller pieces out of larger ones, and would share all of such a larger one: so none is smaller.
        """
        address, handle = ctypes.c_uint64(), IpcHandle()
        with _current_context(device.index or 0):
            _call_driver(
                "cuMemAlloc_v2",
                ctypes.byref(address),
                -(-max(1, nbytes) // ALLOCATION_GRANULARITY) * ALLOCATION_GRANULARITY,
            )
            try:
                _call_driver("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except DriverError:
                _call_driver("cuMemFree_v2", address)
                raise
        return cls(device, int(address.value), max(1, nbytes), bytes(handle), owns=True)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """The memory of another process."""
        address = ctypes.c_uint64()
        with _current_context(device.index or 0):
            _call_driver(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(address),
                IpcHandle.from_buffer_copy(handle),
                _LAZY_ENABLE_PEER_ACCESS,
            )
        return cls(device, int(address.value), nbytes, handle, owns=False)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """A part of the memory as bytes, with a storage of exactly that size."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_CudaArray(self, self._address + offset, nbytes), device=self.device)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _release(self.device, "cuMemFree_v2" if self._owns else "cuIpcCloseMemHandle", self._address)


class _CudaArray:
    """A part of a piece of memory, as torch takes it from others; whoever holds the tensor holds the memory."""

    def __init__(self, memory: DeviceMemory, address: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
