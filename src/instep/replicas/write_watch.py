"""Detection of writes to trainable tensors and of changes of their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from instep.runtime.torch_private import make_tensor_guard
from instep.structure.shapes import is_dense

_data_ptr = torch._C.TensorBase.data_ptr
_shape = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride
_get_requires_grad = attrgetter("requires_grad")
get_version: Callable[[Tensor], int] = attrgetter("_version")


class MemoryLayout:
    """The addresses, shapes, strides and `requires_grad` flags of tensors at construction."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._dense = list(filter(is_dense, tensors))
        self._pointers = list(map(_data_ptr, self._dense))
        self._metadata = self._read_metadata()
        self._same_metadata = make_tensor_guard(self._dense)
        self._has_non_dense = len(self._dense) < len(self._tensors)

    def _read_metadata(self) -> list[Any]:
        return [*map(_get_requires_grad, self._tensors), *map(_shape, self._dense), *map(_stride, self._dense)]

    def is_unchanged(self) -> bool:
        """Whether every tensor still has the same address and metadata."""
        if list(map(_data_ptr, self._dense)) != self._pointers:
            return False
        return (not self._has_non_dense and self._same_metadata()) or self._read_metadata() == self._metadata


TensorPair = tuple[Tensor, Tensor]
"""A trainable tensor of the source, and its counterpart on a replica."""


class WriteDetector:
    """Notices writes to what stands for trainable tensors of the source, between `begin` and `found`.

    In-place operations move a version counter, which replicas that share memory with the source share too, so that one
    of them is enough to see it. `p.data = x` moves none, but gives a leaf other memory.
    """

    def __init__(self, pairs: Sequence[TensorPair]) -> None:
        leaves = [(source, held) for source, held in pairs if held is not source and held.is_leaf]
        counters = {_counter_id(source, held): (source, held) for source, held in pairs if not held.is_inference()}
        self._pairs = [*counters.values(), *leaves]
        self._counted = [held for _, held in counters.values()]
        self._leaves = [held for _, held in leaves]
        self._pointers = list(map(_data_ptr, self._leaves))
        self._before: list[int] = []

    def begin(self) -> None:
        self._before = [*map(get_version, self._counted), *self._pointers]

    def written(self) -> list[TensorPair]:
        """Pairs that were written in place or got new memory. Replicas that share memory are listed once."""
        now = [*map(get_version, self._counted), *map(_data_ptr, self._leaves)]
        if now == self._before:
            return []
        return [pair for pair, then, later in zip(self._pairs, self._before, now, strict=True) if then != later]


def _counter_id(source: Tensor, held: Tensor) -> int:
    """Identifies the version counter of a replica's tensor."""
    return id(source) if held.data_ptr() == source.data_ptr() else id(held)


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors may overlap."""
    (start, stop), (first, last) = _byte_range(one), _byte_range(other)
    return max(start, first) < min(stop, last)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The memory from a tensor's first element to the end of its last; none for one without such memory."""
    if not is_dense(tensor) or not tensor.numel():
        return 0, 0
    steps = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def memory_key(value: Any) -> Any:
    """A key that is equal for views of the same memory with the same metadata; None if a tensor must stay separate."""
    if type(value) is not Tensor or value.requires_grad or not is_dense(value) or not value.numel():
        return None
    read_as = value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()
    return value.data_ptr(), *read_as


def deduplicate_views(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of which those that are the same memory, read the same way, are one tensor.

    A batch that was given twice has become two views of it. Those that need a gradient stay two: each gets its own.
    """
    if sum(type(value) is Tensor for value in (*args, *kwargs.values())) < 2:
        return args, kwargs
    known: dict[Any, Tensor] = {}

    def one(value: Any) -> Any:
        reading = memory_key(value)
        return value if reading is None else known.setdefault(reading, value)

    return [one(value) for value in args], {name: one(value) for name, value in kwargs.items()}
