"""State with one row per sample that one call leaves on the module for the next: a recurrent hidden state.

`state={"hidden": "cat"}` declares such state: each replica gets the rows of its samples, and the rows that the replicas
leave are concatenated. Without a rule it is unknown whether a sample reads only its own row. A call that may read
undeclared state therefore runs on one device, with the state's tensors instrumented. If the call reads them before it
overwrites them, later calls run on one device too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from instep.replicas.diff import MISSING
from instep.replicas.names import module_names
from instep.replicas.state.code_reads import code_reads_attribute
from instep.runtime.locks import run_uninterrupted
from instep.structure.tree import Path, flatten_one_level

T = TypeVar("T")
Attribute = tuple[nn.Module, str]
"""A module, and the name of one of its attributes or buffers."""
CallKey = tuple[int, str]
"""The fingerprint of the module's configuration, and the name of the method."""

_MAX_CHECKS = 8
_MAX_CACHED = 256


@dataclass
class CarriedValue:
    """An attribute, buffer or dictionary entry whose tensors have a batch dim."""

    module: nn.Module | None
    """The owner; None for a dictionary entry, which is never split."""
    name: str
    """The attribute; for an entry, the attribute that holds the dictionary."""
    path: str
    dims: dict[Path, int]
    """The batch dim of each tensor, by its path inside the value."""
    is_declared: bool = False
    """Whether a `"cat"` rule says that each sample has its own row."""
    container: dict[Any, Any] | None = None
    key: Any = None
    was_read: dict[CallKey, bool] = field(default_factory=dict)
    """Whether an instrumented call read the value before it overwrote it."""

    @property
    def attribute(self) -> Attribute:
        assert self.module is not None  # dictionary entries are never split
        return self.module, self.name

    @property
    def value(self) -> Any:
        if self.container is not None:
            return self.container.get(self.key, MISSING)
        if self.module is None:
            return MISSING
        buffers: dict[str, Any] = self.module._buffers
        return (buffers if self.name in buffers else self.module.__dict__).get(self.name, MISSING)

    def leaves(self) -> list[tuple[Tensor, int]]:
        """Its tensors that have a batch dim, each with that dim."""
        return [(tensor, self.dims[path]) for path, tensor in tensors_by_path(self.value) if path in self.dims]

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """One shard per replica. Shards are copies."""

        def shard(value: Any, path: Path, start: int, size: int) -> Any:
            if isinstance(value, Tensor):
                return value.narrow(self.dims[path], start, size).clone() if path in self.dims else value
            node = flatten_one_level(value)
            if node is None:
                return value
            children = zip(node.keys, node.children, strict=True)
            return node.unflatten([shard(child, (*path, key), start, size) for key, child in children])

        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [shard(self.value, (), start, size) for start, size in zip(starts, sizes, strict=True)]

    def is_read(self, call: CallKey) -> bool | None:
        """Whether calls of this kind read the value; None if that has to be checked."""
        if call not in self.was_read and len(self.was_read) >= _MAX_CHECKS:
            return any(self.was_read.values())
        return self.was_read.get(call)


@dataclass(frozen=True)
class CarriedSelection:
    """How one call treats carried state."""

    split: Sequence[CarriedValue] = ()
    """Values of which each replica gets the rows of its samples."""
    one_device: Sequence[CarriedValue] = ()
    """Values that cannot be split; if there are any, the call runs on one device."""
    unchecked: Sequence[CarriedValue] = ()
    """Values that the call may read; if there are any, it runs through `CarriedState.run_and_detect_reads`."""


@dataclass
class CarriedState:
    """All carried values of one source module."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    values: dict[tuple[int, str], CarriedValue] = field(default_factory=dict)
    """By the id of the owner (a module or a dictionary) and the name. An entry keeps its owner alive."""

    def __post_init__(self) -> None:
        self._read_cache: dict[tuple[str, int], bool] = {}

    def record(self, module: nn.Module, name: str, path: str, dims: Mapping[Path, tuple[int, int]]) -> None:
        """Register an attribute that was merged along batch dims."""
        batch_dims = {p: dim for p, (_, dim) in dims.items()}
        recorded = self.values.get((id(module), name))
        if recorded is None:
            self.values[id(module), name] = CarriedValue(module, name, path, batch_dims, self._is_declared(path))
        else:
            recorded.path, recorded.dims = path, batch_dims

    def record_entry(
        self, container: dict[Any, Any], key: Any, attribute: str, path: str, dims: Mapping[Path, tuple[int, int]]
    ) -> None:
        """Register a dictionary entry that was merged along batch dims."""
        batch_dims = {p: dim for p, (_, dim) in dims.items()}
        value = CarriedValue(None, attribute, path, batch_dims, container=container, key=key)
        self.values.setdefault((id(container), str(key)), value)

    @property
    def is_used(self) -> bool:
        """Whether a call may read state of the previous one that follows the batch."""
        return bool(self.values) or "cat" in self.rules.values()

    def select(
        self,
        source: nn.Module,
        modules: Sequence[nn.Module],
        sizes: Sequence[int],
        containers: Collection[int],
        call: CallKey,
    ) -> CarriedSelection:
        """The carried values that matter for a call with shards of these sizes.

        Args:
            source: The wrapped module.
            modules: All its modules, registered or not.
            sizes: The number of samples of each replica.
            containers: The ids of the containers that the modules hold.
            call: The configuration and the method of the call.
        """
        if "cat" in self.rules.values():
            self._add_declared(source, modules, sum(sizes))
        if not self.values:
            return CarriedSelection()
        owners = {*map(id, modules), *containers}
        self.values = {key: value for key, value in self.values.items() if key[0] in owners}
        groups: dict[str, list[CarriedValue]] = {"split": [], "one_device": [], "unchecked": []}
        for value in self.values.values():
            group = self._group(value, modules, sum(sizes), call)
            if group is not None:
                groups[group].append(value)
        return CarriedSelection(**groups)

    def needs_one_device(
        self, modules: Sequence[nn.Module], sizes: Sequence[int], containers: Collection[int], call: CallKey
    ) -> bool:
        """Whether such a call reads, or may read, recorded state that cannot be split. Changes nothing."""
        owners = {*map(id, modules), *containers}
        return any(
            key[0] in owners and self._group(value, modules, sum(sizes), call) in ("one_device", "unchecked")
            for key, value in self.values.items()
        )

    def _group(self, value: CarriedValue, modules: Sequence[nn.Module], total: int, call: CallKey) -> str | None:
        """The field of `CarriedSelection` to which a value belongs; None if the call does not read it."""
        leaves = value.leaves()
        if not leaves:
            return None
        if value.is_declared:
            return "split" if all(tensor.shape[dim] == total for tensor, dim in leaves) else "one_device"
        if not self._may_be_read(value.name, modules, call[0]):
            return None
        is_read = value.is_read(call)
        return "unchecked" if is_read is None else "one_device" if is_read else None

    def _is_declared(self, path: str) -> bool:
        return any(rule == "cat" and fnmatchcase(path, pattern) for pattern, rule in self.rules.items())

    def _add_declared(self, source: nn.Module, modules: Sequence[nn.Module], total: int) -> None:
        """Register declared attributes that no call has set yet; their batch dim is the one of size `total`."""
        for module, prefix in zip(modules, module_names(source, modules), strict=True):
            for name, value in (*module.__dict__.items(), *module._buffers.items()):
                path = f"{prefix}.{name}" if prefix else name
                if (id(module), name) in self.values or not self._is_declared(path):
                    continue
                dims = {p: t.shape.index(total) for p, t in tensors_by_path(value) if list(t.shape).count(total) == 1}
                if dims:
                    self.values[id(module), name] = CarriedValue(module, name, path, dims, is_declared=True)

    def _may_be_read(self, name: str, modules: Sequence[nn.Module], fingerprint: int) -> bool:
        """Whether code of the modules reads an attribute of this name. A replaced layer has another fingerprint."""
        key = name, fingerprint
        if key not in self._read_cache:
            if len(self._read_cache) >= _MAX_CACHED:
                self._read_cache.clear()
            self._read_cache[key] = code_reads_attribute(modules, name)
        return self._read_cache[key]

    def run_and_detect_reads(
        self, values: Sequence[CarriedValue], call: CallKey, run: Callable[[], T]
    ) -> tuple[T, list[CarriedValue]]:
        """Run a call on one device. Returns its output, and the values that it read before it overwrote them."""
        detectors = [_ReadDetector(value) for value in values]
        try:
            for detector in detectors:
                detector.attach()
            output = run()
        finally:
            run_uninterrupted(*[detector.detach for detector in detectors])
        for detector in detectors:
            detector.value.was_read[call] = detector.has_read()
        return output, [value for value in values if value.was_read[call]]


class _InstrumentedTensor(Tensor):
    """A plain tensor whose class was changed while one call runs, so that torch reports every use of it."""

    detector: ClassVar[_ReadDetector]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for used in types:
            if issubclass(used, _InstrumentedTensor):
                used.detector.used = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _ReadDetector:
    """Detects whether a call uses the tensors of a carried value before it replaces them."""

    def __init__(self, value: CarriedValue) -> None:
        self.value = value
        self.used = False
        self._object = value.value
        self._tensors = [tensor for tensor, _ in value.leaves()]
        self._is_plain = all(type(tensor) is Tensor for tensor in self._tensors)
        self._references = 0

    def attach(self) -> None:
        if self._is_plain:
            self._references = self._count_references()
            instrumented = type("InstrumentedTensor", (_InstrumentedTensor,), {"detector": self})
            for tensor in self._tensors:
                tensor.__class__ = instrumented

    def detach(self) -> None:
        if self._is_plain:
            for tensor in self._tensors:
                tensor.__class__ = Tensor

    def has_read(self) -> bool:
        """Whether the call used a tensor, or stored a reference to it elsewhere (`self.previous = self.hidden`)."""
        if self.used or not self._is_plain:
            return True
        released = 0 if self.value.value is self._object else 1
        return self._count_references() > self._references - released

    def _count_references(self) -> int:
        inner = [tensor for tensor in self._tensors if tensor is not self._object]
        return sys.getrefcount(self._object) + sum(map(sys.getrefcount, inner))


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors of a structure, with the keys that lead to each."""
    if isinstance(value, Tensor):
        yield path, value
        return
    node = flatten_one_level(value)
    if node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from tensors_by_path(child, (*path, key))
