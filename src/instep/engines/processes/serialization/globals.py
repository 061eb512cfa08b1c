"""Tracks globals and class attributes that the peer was sent, and finds those that changed."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import marshal
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.engines.processes.serialization.by_reference import functions_of, is_by_reference, make_module
from instep.engines.processes.serialization.reducers import has_strided_data, is_plain
from instep.replicas.object_graph import (
    EMPTY_CELL,
    cell_contents,
    is_numeric_array,
    mutable_storage,
    references_of,
    walk,
)


class _Marker(enum.Enum):
    ABSENT = "absent"
    UNSENT = "unsent"


ABSENT = _Marker.ABSENT
"""The value of a name that does not exist. It can be pickled."""
GLOBALS, CLASS = "globals", "class"
"""Kinds of tracked mappings: a global namespace, the attributes of a class."""
_MAX_PARTS = 2000
_MAX_DIGEST_BYTES = 16 * 1024
_MAX_CHECKSUM_BYTES = 2**20
"""Larger tensors are compared by version only."""
_COMPARED_BY_IDENTITY = (
    *(type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device),
    logging.Logger,  # each process has its own, which caches the enabled levels
)
_MODULE_ATTRIBUTES = ("__name__", "__package__", "__path__", "__file__")
_UNTRACKED = {"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__"}
_UNTRACKED |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__", "__slots__"}
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)

TrackerKey = tuple[str, int]
"""The kind of a tracked mapping, and the id of the namespace or class."""


class ValueSnapshot(NamedTuple):
    """A value and its fingerprint when it was sent. Holding the value keeps its `id()` from being reused."""

    value: Any
    fingerprint: Any

    def matches(self, value: Any) -> bool:
        """Whether a value equals the snapshot."""
        if value is self.value:
            return self.fingerprint is None or fingerprint_of(value) == self.fingerprint
        return type(value) is type(self.value) and is_plain(value) and bool(value == self.value)


def take_snapshot(value: Any) -> ValueSnapshot:
    """Snapshot a value."""
    return ValueSnapshot(value, fingerprint_of(value))


def fingerprint_of(value: Any) -> Any:
    """A fingerprint that changes when a value changes in place; None if it cannot change or is too large.

    Plain containers, and objects whose attributes are plain, are compared by their bytes. Otherwise, the fingerprint
    has the items and attributes of all objects that can be reached from the value: plain values as they are, other
    objects by `id()`. Small tensors and arrays are compared by checksum, because writes through ``.data`` and by fused
    optimizers do not change the version counter. Of functions, closure variables are compared.
    """
    if _is_fixed(value):
        return None
    storage = None if isinstance(value, _FUNCTIONS) else mutable_storage(value)
    digest = None if storage is None else plain_digest(storage)
    if digest is not None and len(digest) <= _MAX_DIGEST_BYTES:
        return digest
    parts: list[tuple[Any, ...]] = []
    count = 0
    for visit in walk([(None, value)], _references, skip=_is_fixed):
        parts.append(_fingerprint_one(visit.value))
        count += len(parts[-1])
        if count > _MAX_PARTS:
            return None
    return None if parts == [(id(value),)] and storage is None else parts


def plain_digest(value: Any) -> bytes | None:
    """The bytes of a number, a string, or a builtin container of them; None for other values."""
    if isinstance(value, (types.CodeType, memoryview)):
        return None
    try:
        return marshal.dumps(value, 2)  # later versions depend on reference counts
    except ValueError:
        return None


def _is_fixed(value: Any) -> bool:
    """Whether a value is compared by identity or, if it is plain, by value."""
    if is_plain(value) or isinstance(value, _COMPARED_BY_IDENTITY) or value is ABSENT:
        return True
    return isinstance(value, _FUNCTIONS) and not any(map(_closure_cells, functions_of(value)))


def _closure_cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """The closure cells, by name, of a function that is sent by value. The cell that `super()` uses is left out."""
    if not function.__closure__ or is_by_reference(function):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return {name: cell for name, cell in cells if name != "__class__"}


def _references(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, nn.Module):
        return list(vars(value).items())
    if isinstance(value, _FUNCTIONS):
        cells = [cell for function in functions_of(value) for cell in _closure_cells(function).items()]
        return [(name, read_cell(cell)) for name, cell in cells]
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return list(enumerate(value.ravel().tolist()))
    return references_of(value)


def _fingerprint_one(value: Any) -> tuple[Any, ...]:
    """The fingerprint of one object, without that of objects that it references."""
    if isinstance(value, Tensor):
        version = -1 if value.is_inference() else value._version
        return id(value), version, value.requires_grad, _tensor_checksum(value)
    if is_numeric_array(value):
        return id(value), value.shape, _array_checksum(value)
    return (id(value), *((_identity(key), _identity(item)) for key, item in _references(value)))


def _identity(value: Any) -> Any:
    return (type(value), value) if is_plain(value) else id(value)


@functools.lru_cache(maxsize=256)
def _byte_array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The ctypes type of a buffer. An uncached one is a reference cycle, which only the garbage collector frees."""
    return ctypes.c_char * nbytes


def _tensor_checksum(tensor: Tensor) -> int | None:
    """A checksum of the values of a small contiguous CPU tensor. It runs no operation of torch."""
    if tensor.device.type != "cpu" or not has_strided_data(tensor) or not tensor.is_contiguous():
        return None
    if not 0 < tensor.nbytes <= _MAX_CHECKSUM_BYTES:
        return None
    return zlib.crc32(_byte_array(tensor.nbytes).from_address(tensor.data_ptr()))


def _array_checksum(array: Any) -> int:
    as_bytes: Any = np.ascontiguousarray(array).view(np.uint8)
    return zlib.crc32(as_bytes) if array.size else 0


class SentValueTracker:
    """Names of one mapping, with the values that the peer has."""

    def __init__(self, mapping: Mapping[str, Any], *, include_new: bool = False) -> None:
        self._mapping = mapping
        self._include_new = include_new
        """Whether names that were never sent count as changed."""
        self._sent: dict[str, ValueSnapshot] = {}
        self._size = len(mapping)
        self._fast_check: tuple[tuple[str, ...], tuple[Any, ...], tuple[ValueSnapshot, ...]] | None = None

    def mark_sent(self, snapshots: Mapping[str, ValueSnapshot]) -> None:
        """Record values as sent."""
        self._sent.update(snapshots)
        self._size = len(self._mapping)
        self._fast_check = None

    def mark_all_unsent(self) -> None:
        """Record all values as not sent."""
        self.mark_sent({name: ValueSnapshot(_Marker.UNSENT, None) for name in self._sent})

    def is_current(self, name: str) -> bool:
        """Whether the peer has the current value of a name."""
        before = self._sent.get(name)
        return before is not None and before.matches(self._mapping.get(name, ABSENT))

    def names(self) -> list[str]:
        """The tracked names."""
        return list(self._sent)

    def changed(self) -> dict[str, Any]:
        """Names whose values the peer does not have, with the current values."""
        if self._is_unchanged():
            return {}
        current = {name: self._mapping.get(name, ABSENT) for name in self._sent}
        changed = {name: value for name, value in current.items() if not self._sent[name].matches(value)}
        if self._include_new:
            new_names = self._mapping.keys() - self._sent.keys() - _UNTRACKED
            changed.update((name, self._mapping[name]) for name in new_names)
        self._size = len(self._mapping)
        return changed

    def _is_unchanged(self) -> bool:
        """Fast check: the same objects, and the mutable ones have the same fingerprints."""
        if self._fast_check is None:
            snapshots = self._sent.values()
            values = tuple(snapshot.value for snapshot in snapshots)
            mutable = tuple(snapshot for snapshot in snapshots if snapshot.fingerprint is not None)
            self._fast_check = tuple(self._sent), values, mutable
        names, values, mutable = self._fast_check
        if self._include_new and len(self._mapping) != self._size:
            return False
        if not all(map(is_, map(self._mapping.get, names, repeat(ABSENT)), values)):
            return False
        return all(snapshot.matches(snapshot.value) for snapshot in mutable)


class SentValues:
    """Globals and class attributes that the peer was sent."""

    def __init__(self) -> None:
        self._trackers: dict[TrackerKey, SentValueTracker] = {}

    def track(self, key: TrackerKey, mapping: Mapping[str, Any]) -> None:
        """Start to track a mapping."""
        if key not in self._trackers:
            self._trackers[key] = SentValueTracker(mapping, include_new=key[0] == CLASS)

    def mark_sent(self, key: TrackerKey, values: Mapping[str, ValueSnapshot]) -> None:
        """Record values as sent."""
        self._trackers[key].mark_sent(values)

    def is_current(self, key: TrackerKey, name: str) -> bool:
        """Whether the peer has the current value of a name."""
        return key in self._trackers and self._trackers[key].is_current(name)

    def changed(self) -> list[tuple[TrackerKey, str, Any]]:
        """Names whose values the peer does not have, with the current values."""
        return [(key, *change) for key, tracker in self._trackers.items() for change in tracker.changed().items()]

    def mark_all_unsent(self) -> None:
        """Record all globals as not sent. Attributes of a class are sent with the class."""
        for (kind, _), tracker in self._trackers.items():
            if kind == GLOBALS:
                tracker.mark_all_unsent()


def snapshot_attributes(cls: type) -> dict[str, ValueSnapshot]:
    """Snapshots of the tracked attributes of a class."""
    return {name: take_snapshot(value) for name, value in vars(cls).items() if name not in _UNTRACKED}


class Namespaces:
    """Global namespaces by id: those of this process, and copies of the peer's. The sign of an id tells them apart."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._ids: dict[int, int] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._received: dict[int, SentValueTracker] = {}
        """Values received for the peer's namespaces."""

    def id_of(self, namespace: dict[str, Any]) -> int:
        """The id of a namespace; a new one if it has none."""
        number = self._ids.get(id(namespace))
        if number is None:
            number = self._sign * (len(self._namespaces) + 1)
            self._register(number, namespace)
        return number

    def is_local(self, number: int) -> bool:
        """Whether a namespace belongs to this process."""
        return number * self._sign > 0

    def module_attributes(self, number: int) -> dict[str, Any]:
        """The attributes that every copy of a namespace has: ``__name__``, ``__file__`` and the like."""
        namespace = self._namespaces[number]
        return {name: namespace[name] for name in _MODULE_ATTRIBUTES if name in namespace}

    def receive(self, number: int, values: Mapping[str, Any]) -> None:
        """Assign received values."""
        namespace = self.get_or_create(number, {})
        for name, value in values.items():
            if value is ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = value

    def watch_received(self, number: int, names: Iterable[str]) -> None:
        """Track writes of functions in this process to received names."""
        if not self.is_local(number):
            namespace = self._namespaces[number]
            tracker = self._received.setdefault(number, SentValueTracker(namespace))
            tracker.mark_sent({name: take_snapshot(namespace.get(name, ABSENT)) for name in names})

    def received_values(self) -> Iterator[tuple[str, Any]]:
        """Received names with their values in this process."""
        for number, tracker in self._received.items():
            yield from ((name, self._namespaces[number].get(name)) for name in tracker.names())

    def modified(self) -> list[str]:
        """Received names that were written in this process."""
        return [name for tracker in self._received.values() for name in tracker.changed()]

    def get_or_create(self, number: int, attributes: dict[str, Any]) -> dict[str, Any]:
        """The namespace with an id; a new one, in a module with these attributes, if there is none."""
        namespace = self._namespaces.get(number)
        if namespace is None:
            module = self._modules[number] = make_module(str(attributes.get("__name__", "unknown")), attributes)
            namespace = vars(module)
            self._register(number, namespace)
        return namespace

    def get_module(self, number: int, attributes: dict[str, Any]) -> types.ModuleType:
        """The module of the namespace with an id."""
        self.get_or_create(number, attributes)
        return self._modules[number]

    def register_module(self, module: types.ModuleType) -> None:
        """Register the namespace of a module of this process."""
        self._modules[self.id_of(vars(module))] = module

    def _register(self, number: int, namespace: dict[str, Any]) -> None:
        self._ids[id(namespace)] = number
        self._namespaces[number] = namespace


def snapshot_cell(cell: types.CellType) -> ValueSnapshot:
    """A snapshot of a cell that is sent with a module. Modules and tensors in it are sent as parts of that module."""
    value = read_cell(cell)
    return ValueSnapshot(value, None) if isinstance(value, (nn.Module, Tensor)) else take_snapshot(value)


def read_cell(cell: types.CellType) -> Any:
    """The contents of a closure cell; `ABSENT` if it is empty."""
    contents = cell_contents(cell)
    return ABSENT if contents is EMPTY_CELL else contents
