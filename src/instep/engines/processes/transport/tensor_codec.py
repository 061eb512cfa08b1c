"""Encodes tensors as metadata and bytes, and decodes them."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver
from instep.engines.processes.transport.shared_memory import align
from instep.errors import EngineError

INLINE_ALIGNMENT = 16
"""What small tensors are aligned to in the payload, and the payload in the frame: complex numbers must be."""
_SINGLE_THREAD_COPY_BYTES = 4 << 20
"""Up to so many bytes this thread copies by itself: torch's threads would take longer to wake up."""

_DTYPE_NAMES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: dict[int, torch.dtype] = {
    n: getattr(torch, name) for n, name in enumerate(_DTYPE_NAMES) if hasattr(torch, name)
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ON_ACCELERATOR = 0x80
"""In the code of a tensor that lies on an accelerator."""


def encode_metadata(tensor: Tensor) -> bytes:
    """What is to be known of a tensor before its data are read."""
    if tensor.dtype not in DTYPE_CODES or tensor.layout != torch.strided or tensor.is_meta:
        raise EngineError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot be sent as it is.")
    return _pack_metadata(tensor.dtype, tensor.shape, tensor.device.type != "cpu")


@lru_cache(maxsize=1024)
def _pack_metadata(dtype: torch.dtype, shape: tuple[int, ...], afar: bool) -> bytes:
    return struct.pack(f"<BB{len(shape)}q", DTYPE_CODES[dtype] | _ON_ACCELERATOR * afar, len(shape), *shape)


@lru_cache(maxsize=256)
def decode_metadata(data: bytes, count: int) -> tuple[tuple[torch.dtype, tuple[int, ...], int, bool], ...]:
    """The dtype, the shape and the bytes of each tensor of a message, and whether it lay on an accelerator."""
    looks, at = [], 0
    for _ in range(count):
        code, dim = struct.unpack_from("<BB", data, at)
        shape = struct.unpack_from(f"<{dim}q", data, at + 2)
        afar, code = bool(code & _ON_ACCELERATOR), code & ~_ON_ACCELERATOR
        if code not in DTYPES or any(size < 0 for size in shape):
            raise ValueError("it describes no tensor")
        looks.append((DTYPES[code], shape, math.prod(shape, start=DTYPES[code].itemsize), afar))
        at += 2 + 8 * dim
    if at != len(data):
        raise ValueError("its tensors are not all described")
    return tuple(looks)


def tensor_bytes(tensor: Tensor, nbytes: int) -> bytes:
    """The data of a small tensor, whatever its strides and lazy bits, up to the next grain."""
    if not _is_contiguous_cpu(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return ctypes.string_at(tensor.data_ptr(), nbytes).ljust(align(nbytes, INLINE_ALIGNMENT), b"\0")


def write_tensors(page: memoryview, tensors: Sequence[tuple[Tensor, int]], alignment: int) -> None:
    """Copy tensors into memory, one after the other, whatever their strides and lazy bits.

    Copies from an accelerator may still be on their way.
    """
    base, offset = address_of(page), 0
    for tensor, nbytes in tensors:
        if nbytes <= _SINGLE_THREAD_COPY_BYTES and _is_contiguous_cpu(tensor):
            ctypes.memmove(base + offset, tensor.data_ptr(), nbytes)
        else:
            with torch.no_grad():
                there = _view_as_tensor(page, offset, tensor.dtype, tensor.shape)
                there.copy_(tensor.detach(), non_blocking=tensor.device.type != "cpu")
        offset += align(nbytes, alignment)


def _is_contiguous_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def read_tensor(
    page: memoryview,
    base: int,
    offset: int,
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    receiver: DeviceReceiver | None = None,
) -> Tensor:
    """A tensor of its own memory, with the data that lie at an offset of a page, which begins at `base`."""
    if offset + nbytes > len(page):
        raise ValueError("its tensors are longer than it is")
    if receiver is not None and nbytes:
        return receiver.copy_to_device(_view_as_tensor(page, offset, dtype, shape))
    tensor = torch.empty(shape, dtype=dtype, device="cpu" if receiver is None else receiver.device)
    if nbytes <= _SINGLE_THREAD_COPY_BYTES:
        ctypes.memmove(tensor.data_ptr(), base + offset, nbytes)
    else:
        tensor.copy_(_view_as_tensor(page, offset, dtype, shape))
    return tensor


def address_of(page: memoryview) -> int:
    """Where memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(page)) if len(page) else 0


def _view_as_tensor(page: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Memory as a tensor, which must have elements."""
    return torch.frombuffer(page, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
