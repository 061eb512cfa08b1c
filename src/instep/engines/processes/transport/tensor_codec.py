"""Encodes tensors as metadata and bytes, and decodes them."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from instep.engines.processes.transport.copy_streams import DeviceReceiver
from instep.engines.processes.transport.shared_memory import align
from instep.errors import EngineError

INLINE_ALIGNMENT = 16
"""Alignment of small tensors in the payload, and of the payload in the frame. Complex numbers need it."""
_CPU = torch.device("cpu")
_MEMMOVE_BYTES = 4 << 20
"""Size up to which this thread copies alone. Waking torch's threads would take longer."""

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
"""Added to the dtype code of a tensor on an accelerator."""


class TensorMetadata(NamedTuple):
    """What the receiver needs to rebuild a tensor from its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    on_accelerator: bool
    """Whether the tensor was sent from an accelerator."""


def encode_metadata(tensor: Tensor) -> bytes:
    """Encode the metadata of a tensor."""
    if tensor.dtype not in DTYPE_CODES or tensor.layout != torch.strided or tensor.is_meta:
        raise EngineError(f"cannot send a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} as bytes.")
    return _pack_metadata(tensor.dtype, tensor.shape, tensor.device.type != "cpu")


@lru_cache(maxsize=1024)
def _pack_metadata(dtype: torch.dtype, shape: tuple[int, ...], on_accelerator: bool) -> bytes:
    return struct.pack(f"<BB{len(shape)}q", DTYPE_CODES[dtype] | _ON_ACCELERATOR * on_accelerator, len(shape), *shape)


@lru_cache(maxsize=256)
def decode_metadata(data: bytes, count: int) -> tuple[TensorMetadata, ...]:
    """Decode the metadata of the `count` tensors of a message. Raises `ValueError` or `struct.error` if invalid."""
    decoded, start = [], 0
    for _ in range(count):
        code, ndim = struct.unpack_from("<BB", data, start)
        shape = struct.unpack_from(f"<{ndim}q", data, start + 2)
        dtype = DTYPES.get(code & ~_ON_ACCELERATOR)
        if dtype is None or any(size < 0 for size in shape):
            raise ValueError("invalid tensor metadata")
        nbytes = math.prod(shape, start=dtype.itemsize)
        decoded.append(TensorMetadata(dtype, shape, nbytes, bool(code & _ON_ACCELERATOR)))
        start += 2 + 8 * ndim
    if start != len(data):
        raise ValueError("tensor metadata of the wrong length")
    return tuple(decoded)


def tensor_bytes(tensor: Tensor, nbytes: int) -> bytes:
    """The data of a small tensor as contiguous bytes, padded to `INLINE_ALIGNMENT`."""
    if not _is_contiguous_cpu(tensor):
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.contiguous().cpu()
    return ctypes.string_at(tensor.data_ptr(), nbytes).ljust(align(nbytes, INLINE_ALIGNMENT), b"\0")


def write_tensors(buffer: memoryview, tensors: Sequence[tuple[Tensor, int]], alignment: int) -> None:
    """Copy tensors of known sizes in bytes into a buffer, one after the other.

    Copies from an accelerator are asynchronous.
    """
    base, offset = address_of(buffer), 0
    for tensor, nbytes in tensors:
        if nbytes <= _MEMMOVE_BYTES and _is_contiguous_cpu(tensor):
            ctypes.memmove(base + offset, tensor.data_ptr(), nbytes)
        else:
            with torch.no_grad():
                target = _view_as_tensor(buffer, offset, tensor.dtype, tensor.shape)
                target.copy_(tensor.detach(), non_blocking=tensor.device.type != "cpu")
        offset += align(nbytes, alignment)


def _is_contiguous_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def read_tensor(
    buffer: memoryview, base: int, offset: int, metadata: TensorMetadata, receiver: DeviceReceiver | None
) -> Tensor:
    """Copy a tensor out of a buffer whose address is `base`: to the receiver's device, or to the CPU without one."""
    dtype, shape, nbytes, _ = metadata
    if offset + nbytes > len(buffer):
        raise ValueError("tensors longer than the message")
    if receiver is not None and nbytes:
        return receiver.copy_to_device(_view_as_tensor(buffer, offset, dtype, shape))
    tensor = torch.empty(shape, dtype=dtype, device=_CPU if receiver is None else receiver.device)
    if nbytes <= _MEMMOVE_BYTES:
        ctypes.memmove(tensor.data_ptr(), base + offset, nbytes)
    else:
        tensor.copy_(_view_as_tensor(buffer, offset, dtype, shape))
    return tensor


def address_of(buffer: memoryview) -> int:
    """The address of a buffer's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


def _view_as_tensor(buffer: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A part of a buffer as a tensor, which must not be empty."""
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
