"""Reads 0-d tensors of a call's outputs on the host, with one transfer for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.structure.tree import tensors_in

Scalar: TypeAlias = float | int | bool | complex


def read_scalars(tensors: Sequence[Tensor]) -> list[Scalar]:
    """The values of 0-d tensors. Synchronizes once for each device that holds any of them."""
    return ScalarTransfer(tensors).wait()


class ScalarTransfer:
    """A transfer of 0-d tensors to the host: one for each device that holds any of them.

    On CUDA it is queued on the current stream, and `wait` waits for it, not for what was queued afterwards.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._transfers: list[tuple[list[int], Callable[[], Tensor]]] = []
        """For each device: the indices of its tensors, and a function that waits for their words."""
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for indices in by_device.values():
            # Every value becomes 64-bit words, so that tensors of all dtypes share one transfer and stay exact.
            words = [word for index in indices for word in _to_words(tensors[index].detach())]
            self._transfers.append((indices, _start_transfer(torch.stack(words))))

    def wait(self) -> list[Scalar]:
        """The values of the tensors, in their order."""
        values: list[Scalar] = [0] * len(self._dtypes)
        for indices, wait in self._transfers:
            copy = wait()
            words = zip(copy.tolist(), copy.view(torch.float64).tolist(), strict=True)
            for index in indices:
                values[index] = _from_words(words, self._dtypes[index])
        return values


def _start_transfer(words: Tensor) -> Callable[[], Tensor]:
    """Start to copy words to the host. Only the function that it returns waits for a device."""
    if words.device.type != "cuda":
        return lambda: words.cpu()
    copy = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True).copy_(words, non_blocking=True)
    copied = torch.cuda.current_stream(words.device).record_event()

    def wait() -> Tensor:
        copied.synchronize()
        return copy

    return wait


def _to_words(value: Tensor) -> Sequence[Tensor]:
    if value.is_complex():
        return torch.view_as_real(value.to(torch.complex128)).contiguous().view(torch.int64).unbind()
    return (value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64),)


def _from_words(words: Iterator[tuple[int, float]], dtype: torch.dtype) -> Scalar:
    """The next value. Each word is given as an integer and as a float."""
    integer, number = next(words)
    if dtype.is_complex:
        return complex(number, next(words)[1])
    if dtype.is_floating_point:
        return number
    if dtype is torch.bool:
        return bool(integer)
    return integer + (1 << 64) if dtype is torch.uint64 and integer < 0 else integer


class HostScalars:
    """Host values of the 0-d tensors in the outputs of a call.

    The first access reads all of them at once. Outputs that are merged on the device alone cost no transfer.
    """

    def __init__(self, outputs: Iterable[Any] = ()) -> None:
        self._outputs = tuple(outputs)
        self._values: dict[int, tuple[Tensor, Scalar]] = {}

    def read(self, tensors: Sequence[Tensor]) -> list[Scalar]:
        """The values of 0-d tensors, which need not all be outputs."""
        missing = {id(tensor): tensor for tensor in tensors if id(tensor) not in self._values}
        if not self._values:
            outputs = [tensor for output in self._outputs for tensor in tensors_in(output)]
            missing |= {id(tensor): tensor for tensor in outputs if is_readable(tensor)}
        if missing:
            for tensor, value in zip(missing.values(), read_scalars(list(missing.values())), strict=True):
                self._values[id(tensor)] = tensor, value  # the reference keeps the id valid
        return [self._values[id(tensor)][1] for tensor in tensors]

    def are_equal(self, tensors: Sequence[Tensor]) -> bool:
        """Whether 0-d tensors have one dtype and one value, or are all NaN."""
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            return False
        values = self.read(tensors)
        return all(value == values[0] for value in values) or all(value != value for value in values)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor is 0-d and dense."""
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return plain and tensor.ndim == 0
