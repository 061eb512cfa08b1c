"""Where trainable tensors lie in memory, and whether anybody moved them or wrote to them.

`p.data = x` on the source leaves replicas with the old memory; a `forward` that writes to a trainable parameter does so
once for every replica. Both are looked for at every call, so each look is one pass in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from instep.private import look_alike
from instep.structure.shapes import is_dense

_pointer = torch._C.TensorBase.data_ptr
_shape = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride
_needs_gradient = attrgetter("requires_grad")
version_of: Callable[[Tensor], int] = attrgetter("_version")


class Lay:
    """How some tensors lay in memory when this was made, and whether they took a gradient."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._memory = list(filter(is_dense, tensors))
        self._pointers = list(map(_pointer, self._memory))
        self._metadata = self._read()
        self._look_alike = look_alike(self._memory)
        self._others = len(self._memory) < len(self._tensors)

    def _read(self) -> list[Any]:
        return [*map(_needs_gradient, self._tensors), *map(_shape, self._memory), *map(_stride, self._memory)]

    def holds(self) -> bool:
        """Whether every tensor still has the same memory, read the same way."""
        if list(map(_pointer, self._memory)) != self._pointers:
            return False
        return (not self._others and self._look_alike()) or self._read() == self._metadata


Pair = tuple[Tensor, Tensor]
"""A trainable tensor of the source, and what a replica holds in its place."""


class Writes:
    """Notices writes to what stands for trainable tensors of the source, between `begin` and `found`.

    In-place operations move a version counter, which replicas that share memory with the source share too, so that one
    of them is enough to see it. `p.data = x` moves none, but gives a leaf other memory.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        leaves = [(source, held) for source, held in pairs if held is not source and held.is_leaf]
        counters = {_counter(source, held): (source, held) for source, held in pairs if not held.is_inference()}
        self._pairs = [*counters.values(), *leaves]
        self._counted = [held for _, held in counters.values()]
        self._leaves = [held for _, held in leaves]
        self._pointers = list(map(_pointer, self._leaves))
        self._before: list[int] = []

    def begin(self) -> None:
        self._before = [*map(version_of, self._counted), *self._pointers]

    def found(self) -> list[Pair]:
        """What was written in place or given other memory; where replicas share memory, as one of them holds it."""
        now = [*map(version_of, self._counted), *map(_pointer, self._leaves)]
        if now == self._before:
            return []
        return [pair for pair, then, later in zip(self._pairs, self._before, now, strict=True) if then != later]


def _counter(source: Tensor, held: Tensor) -> int:
    """A name for the version counter of what a replica holds."""
    return id(source) if held.data_ptr() == source.data_ptr() else id(held)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    (start, stop), (first, last) = _stretch(one), _stretch(other)
    return max(start, first) < min(stop, last)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    """The memory from a tensor's first element to the end of its last; none for one without such memory."""
    if not is_dense(tensor) or not tensor.numel():
        return 0, 0
    steps = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def reading_of(value: Any) -> Any:
    """What is equal for tensors that are the same memory, read the same way; None for one that stays by itself."""
    if type(value) is not Tensor or value.requires_grad or not is_dense(value) or not value.numel():
        return None
    read_as = value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()
    return value.data_ptr(), *read_as


def once_each(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of which those that are the same memory, read the same way, are one tensor.

    A batch that was given twice has become two views of it. Those that need a gradient stay two: each gets its own.
    """
    if sum(type(value) is Tensor for value in (*args, *kwargs.values())) < 2:
        return args, kwargs
    known: dict[Any, Tensor] = {}

    def one(value: Any) -> Any:
        reading = reading_of(value)
        return value if reading is None else known.setdefault(reading, value)

    return [one(value) for value in args], {name: one(value) for name, value in kwargs.items()}
