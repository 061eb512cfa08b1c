"""What is asked of CUDA's driver itself: memory that other processes open, and pages that stay where they are.

Torch's own ways of sharing device memory between processes leave files behind when a process is killed. The driver's
handles are 64 bytes that travel like any others, and what was opened by them goes with the process.

A call that the driver refuses harms nobody: its errors are its own, and torch does not meet them later.
"""

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

HANDLE = 64
"""Bytes of a handle."""
GRAIN = 2 << 20
"""Memory is taken in pieces of so many bytes."""
_LAZY_PEER = 1
_PORTABLE = 1
_MESSAGES = {1: "invalid value", 2: "out of memory", 201: "invalid context", 801: "not supported", 999: "unknown"}


class Refused(Exception):
    """The driver said no; the text says to what, and why."""


class Handle(ctypes.Structure):
    """What another process opens memory by."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE),)


@cache
def _library() -> Any:
    """The driver; None where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, Handle, ctypes.c_uint)
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


def _ask(name: str, *args: Any) -> None:
    code = int(getattr(_library(), name)(*args))
    if code:
        raise Refused(f"{name}: CUDA error {code} ({_MESSAGES.get(code, _text(code))})")


def _text(code: int) -> str:
    text = ctypes.c_char_p()
    found = _library().cuGetErrorString(ctypes.c_int(code), ctypes.byref(text)) == 0
    return text.value.decode() if found and text.value is not None else "no text"


@cache
def _context(ordinal: int) -> ctypes.c_void_p:
    """The context that torch works in, which is the device's primary one."""
    if _library() is None:
        raise Refused("the driver's library (libcuda.so.1) is not there")
    torch.cuda.init()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _ask("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    _ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def _inside(ordinal: int) -> Iterator[None]:
    """Make a device's context this thread's own, for the length of a `with` block."""
    _ask("cuCtxPushCurrent_v2", _context(ordinal))
    try:
        yield
    finally:
        _ask("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def pin(device: torch.device, address: int, nbytes: int) -> bool:
    """Whether pages are from now on known to an accelerator, which copies them several times as fast then."""
    if device.type != "cuda":
        return False
    try:
        with _inside(device.index or 0):
            _ask("cuMemHostRegister_v2", address, nbytes, _PORTABLE)
    except Refused:  # a limit on locked memory: copies work all the same, only slower
        return False
    return True


def unpin(device: torch.device, address: int) -> None:
    """Forget pages, whose memory is about to go."""
    _let_go(device, "cuMemHostUnregister", address)


def _let_go(device: torch.device, how: str, address: int) -> None:
    """Give something back, unless the driver does so by itself, or it is that of the process that forked this one."""
    if not sys.is_finalizing() and os.getpid() == _owner:
        with suppress(Refused), _inside(device.index or 0):
            _ask(how, address)


_owner = os.getpid()


class DeviceMemory:
    """A piece of an accelerator's memory that other processes can open; tensors made from it keep it alive."""

    def __init__(self, device: torch.device, address: int, nbytes: int, handle: bytes, own: bool) -> None:
        """Use `create` or `open`."""
        self.device, self.nbytes, self.handle = device, nbytes, handle
        self._address, self._own = address, own

    @classmethod
    def create(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """New memory, with whatever was in it; `Refused` where it cannot be had or not be shared.

        The driver cuts smaller pieces out of larger ones, and would share all of such a larger one: so none is smaller.
        """
        address, handle = ctypes.c_uint64(), Handle()
        with _inside(device.index or 0):
            _ask("cuMemAlloc_v2", ctypes.byref(address), -(-max(1, nbytes) // GRAIN) * GRAIN)
            try:
                _ask("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except Refused:
                _ask("cuMemFree_v2", address)
                raise
        return cls(device, int(address.value), max(1, nbytes), bytes(handle), own=True)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """The memory of another process."""
        address = ctypes.c_uint64()
        with _inside(device.index or 0):
            _ask("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(handle), _LAZY_PEER)
        return cls(device, int(address.value), nbytes, handle, own=False)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """A part of the memory as bytes, with a storage of exactly that size."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_Part(self, self._address + offset, nbytes), device=self.device)

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            _let_go(self.device, "cuMemFree_v2" if self._own else "cuIpcCloseMemHandle", self._address)


class _Part:
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
