"""Reads 0-d tensors of a call's outputs on the host, with one transfer for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from instep.structure.tree import tensors_in

Scalar: TypeAlias = float | int | bool | complex


def read_scalars(tensors: Sequence[Tensor]) -> list[Scalar]:
    """The values of 0-d tensors. Synchronizes once for each device that holds any of them."""
    values: list[Scalar] = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        # Every value becomes two 64-bit words, so that tensors of all dtypes share one transfer and stay exact.
        words = [_to_words(tensors[index].detach()) for index in indices]
        for index, row in zip(indices, _transfer(torch.stack(words)), strict=True):
            values[index] = _from_words(row, tensors[index].dtype)
    return values


def _transfer(words: Tensor) -> Tensor:
    """Copy to the host; the only place that synchronizes."""
    return words.cpu()


def _to_words(value: Tensor) -> Tensor:
    if value.is_complex():
        return torch.view_as_real(value.to(torch.complex128)).contiguous().view(torch.int64)
    word = value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)
    return torch.stack([word, torch.zeros_like(word)])


def _from_words(words: Tensor, dtype: torch.dtype) -> Scalar:
    if dtype.is_complex:
        real, imaginary = words.view(torch.float64).tolist()
        return complex(real, imaginary)
    if dtype.is_floating_point:
        return float(words.view(torch.float64)[0])
    value = int(words[0])
    if dtype is torch.bool:
        return bool(value)
    return value + (1 << 64) if dtype is torch.uint64 and value < 0 else value


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
