"""Detection of writes to tensors and objects, and of changes of the memory of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from instep.replicas.object_graph import (
    Contents,
    is_unchanged,
    mutable_storage,
    read_contents,
    tensors_equal,
    write_contents,
)
from instep.runtime.modes import set_inference_mode
from instep.runtime.torch_private import make_tensor_guard
from instep.structure.shapes import is_dense

K = TypeVar("K")

data_ptr = torch._C.TensorBase.data_ptr
_shape = torch._C.TensorBase.size
_stride = torch._C.TensorBase.stride
_get_requires_grad = attrgetter("requires_grad")
get_version: Callable[[Tensor], int] = attrgetter("_version")


class MemoryLayout:
    """The addresses, shapes, strides and `requires_grad` flags of tensors at construction."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._dense = list(filter(is_dense, tensors))
        self._pointers = list(map(data_ptr, self._dense))
        self._metadata = self._read_metadata()
        self._same_metadata = make_tensor_guard(self._dense)
        self._has_non_dense = len(self._dense) < len(self._tensors)

    def _read_metadata(self) -> list[Any]:
        return [*map(_get_requires_grad, self._tensors), *map(_shape, self._dense), *map(_stride, self._dense)]

    def is_unchanged(self) -> bool:
        """Whether every tensor still has the same address and metadata."""
        if list(map(data_ptr, self._dense)) != self._pointers:
            return False
        return (not self._has_non_dense and self._same_metadata()) or self._read_metadata() == self._metadata


class WriteDetector(Generic[K]):
    """Detects writes to tensors since it was created or reset.

    In-place operations increment the version counter of a tensor. `p.data = x` does not, but changes the address of a
    leaf (`read=data_ptr`). Other writes through `.data`, and those of fused optimizers, change neither: `SavedValues`
    detects them.
    """

    def __init__(
        self, keys: Sequence[K], tensors: Sequence[Tensor], read: Callable[[Tensor], int] = get_version
    ) -> None:
        """Inference tensors have no version counter (see `from_pairs`)."""
        self._keys, self._tensors, self._read = keys, tensors, read
        self._before = list(map(read, tensors))

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[K, Tensor]]) -> WriteDetector[K]:
        """A detector for tensors with keys. Inference tensors are left out."""
        keys, tensors = [], []
        for key, tensor in pairs:
            if not tensor.is_inference():
                keys.append(key)
                tensors.append(tensor)
        return cls(keys, tensors)

    def reset(self) -> None:
        """Forget the writes so far."""
        self._before = list(map(self._read, self._tensors))

    def written(self) -> list[K]:
        """The keys of the tensors that were written."""
        now = list(map(self._read, self._tensors))
        if now == self._before:
            return []
        return [key for key, then, later in zip(self._keys, self._before, now, strict=True) if then != later]


class SavedValues(Generic[K]):
    """Copies of tensors, to detect writes that no version counter shows, and to undo them."""

    def __init__(self, tensors: Iterable[tuple[K, Tensor]] = ()) -> None:
        self._saved = [(key, tensor, tensor.detach().clone()) for key, tensor in tensors]

    def __bool__(self) -> bool:
        return bool(self._saved)

    def watch_copy(self, key: K, copy: Tensor) -> None:
        """Also watch a copy of the tensor with this key, if it is on the same device."""
        self._saved += [
            (key, copy, values)
            for other, tensor, values in self._saved
            if other == key and copy is not tensor and copy.device == values.device
        ][:1]

    def changed(self, *, cpu_only: bool = False) -> list[K]:
        """The keys of the tensors with other values. `cpu_only` avoids synchronizing with accelerators."""
        return [
            key
            for key, tensor, copy in self._saved
            if not (cpu_only and tensor.device.type != "cpu") and not tensors_equal(tensor, copy)
        ]

    def restore(self, keys: Collection[K]) -> None:
        """Give the tensors with these keys their saved values. Version counters are not incremented."""
        for key, tensor, copy in self._saved:
            if key in keys:
                with torch.no_grad(), set_inference_mode(tensor.is_inference()):
                    tensor.data.copy_(copy)


class ObjectSnapshot(NamedTuple):
    """The contents of one mutable object, to detect and undo changes in place."""

    value: Any
    storage: Any
    """See `mutable_storage`."""
    contents: Contents

    @classmethod
    def of(cls, value: Any) -> ObjectSnapshot | None:
        """A snapshot of an object; None if it cannot be changed in place."""
        storage = mutable_storage(value)
        return None if storage is None else cls(value, storage, read_contents(storage))

    def is_unchanged(self) -> bool:
        """Whether the object has the same contents. Cached properties that it has computed since do not count."""
        return is_unchanged(self.storage, self.contents) or self._only_cached()

    def _only_cached(self) -> bool:
        if self.storage is self.value:
            return False
        members = (item for cls in type(self.value).__mro__ for item in vars(cls).items())
        cached = {name for name, member in members if isinstance(member, functools.cached_property)}
        old = self.contents.by_key()
        rest = {key: item for key, item in self.storage.items() if key in old or key not in cached}
        return rest.keys() == old.keys() and all(item is old[key] for key, item in rest.items())

    def restore(self) -> None:
        """Undo all changes."""
        if not self.is_unchanged():
            write_contents(self.storage, self.contents)


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory of two tensors may overlap."""
    (start, stop), (first, last) = _byte_range(one), _byte_range(other)
    return max(start, first) < min(stop, last)


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the end; both 0 for a tensor without strided memory."""
    if not is_dense(tensor) or not tensor.numel():
        return 0, 0
    steps = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size()


def memory_key(value: Any) -> Any:
    """A key that is equal for views of the same memory with the same metadata; None if a tensor must stay separate."""
    if type(value) is not Tensor or value.requires_grad or not is_dense(value) or not value.numel():
        return None
    metadata = value.shape, value.stride(), value.dtype, value.device, value.is_conj(), value.is_neg()
    return value.data_ptr(), *metadata


def deduplicate_views(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Replace arguments that are equal views of the same memory by one tensor.

    Splitting makes two views of a batch that was passed twice. Views that need a gradient stay separate.
    """
    if sum(type(value) is Tensor for value in (*args, *kwargs.values())) < 2:
        return args, kwargs
    tensors: dict[Any, Tensor] = {}

    def unique(value: Any) -> Any:
        key = memory_key(value)
        return value if key is None else tensors.setdefault(key, value)

    return [unique(value) for value in args], {name: unique(value) for name, value in kwargs.items()}
