"""Tracks globals, class attributes, closure and context variables that sent code reads, and finds what changed."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.engines.processes.serialization.by_reference import make_module
from instep.engines.processes.serialization.reducers import cell_contents, has_strided_data, is_plain

ABSENT, _UNSENT = object(), object()
_MAX_PARTS = 2000
_MAX_CHECKSUM_BYTES = 2**20
"""Larger tensors are compared by version only."""
_COMPARED_BY_IDENTITY = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
    logging.Logger,  # one of its name in every process, which notes for itself what it has been asked
)
_MODULE_ATTRIBUTES = ("__name__", "__package__", "__path__", "__file__")
_UNTRACKED = {"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__"}
_UNTRACKED |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__", "__slots__"}
_MUTABLE_TYPES = (dict, list, set, np.ndarray, Tensor)


class ValueSnapshot(NamedTuple):
    """A value and its fingerprint when it was sent. Holding the value keeps its id from being reused."""

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
    """A fingerprint that changes when a value changes in place; None for immutable values.

    Containers and objects are traversed up to `_MAX_PARTS` parts. Small tensors and arrays are compared by checksum,
    because writes through ``.data`` and by fused optimizers do not change the version counter. For larger values
    only assignment to the name is noticed.
    """
    if is_plain(value) or isinstance(value, _COMPARED_BY_IDENTITY) or value is ABSENT:
        return None
    try:
        look = _fingerprint(value, [_MAX_PARTS], {})
        return None if look == (id(value),) and not isinstance(value, _MUTABLE_TYPES) else look
    except _TooLarge:
        return None


class _TooLarge(Exception):
    """A value has too many parts."""


def _fingerprint(value: Any, left: list[int], inside: dict[int, Any]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise _TooLarge
    if is_plain(value):
        return type(value), value
    if isinstance(value, _COMPARED_BY_IDENTITY) or id(value) in inside:
        return id(value)
    inside[id(value)] = value
    if isinstance(value, Tensor):
        version = -1 if value.is_inference() else value._version
        return id(value), version, value.requires_grad, _tensor_checksum(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return id(value), tuple(_fingerprint(held, left, inside) for held in value.ravel().tolist())
        return id(value), value.shape, _array_checksum(value)
    parts: list[Any] = [id(value)]
    if isinstance(value, dict):
        parts += [(_fingerprint(key, left, inside), _fingerprint(held, left, inside)) for key, held in value.items()]
    elif isinstance(value, (list, tuple)):
        parts += [_fingerprint(held, left, inside) for held in value]
    elif isinstance(value, (set, frozenset)):
        parts += [frozenset(_fingerprint(held, left, inside) for held in value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts += [(name, _fingerprint(held, left, inside)) for name, held in attributes.items()]
    return tuple(parts)


@functools.lru_cache(maxsize=256)
def _byte_array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """The ctypes type of a buffer. An uncached one is a reference cycle, which only the garbage collector frees."""
    return ctypes.c_char * nbytes


def _tensor_checksum(tensor: Tensor) -> int | None:
    """A checksum of a tensor's values, where they lie in one piece and are not too many. No operation is run for it."""
    if tensor.device.type != "cpu" or not has_strided_data(tensor) or not tensor.is_contiguous():
        return None
    if not 0 < tensor.nbytes <= _MAX_CHECKSUM_BYTES:
        return None
    return zlib.crc32(_byte_array(tensor.nbytes).from_address(tensor.data_ptr()))


def _array_checksum(array: Any) -> int:
    bytes_of: Any = np.ascontiguousarray(array).view(np.uint8)
    return zlib.crc32(bytes_of) if array.size else 0


class ChangeTracker:
    """The values of some names of one mapping as the peer has them."""

    def __init__(self, names: Mapping[str, Any], sent: dict[str, ValueSnapshot], include_new: bool) -> None:
        self._mapping = names
        self._sent = sent
        self._include_new = include_new
        self._size = len(names)
        self._fast_check: tuple[tuple[str, ...], tuple[Any, ...], tuple[ValueSnapshot, ...]] | None = None

    def mark_sent(self, news: dict[str, ValueSnapshot]) -> None:
        """Record values as sent."""
        self._sent.update(news)
        self._size = len(self._mapping)
        self._fast_check = None

    def mark_all_unsent(self) -> None:
        """Record all values as not sent."""
        self.mark_sent({name: ValueSnapshot(_UNSENT, None) for name in self._sent})

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
        present = {name: self._mapping.get(name, ABSENT) for name in self._sent}
        news = {name: value for name, value in present.items() if not self._sent[name].matches(value)}
        if self._include_new:
            news.update((name, self._mapping[name]) for name in self._mapping.keys() - self._sent.keys() - _UNTRACKED)
        self._size = len(self._mapping)
        return news

    def _is_unchanged(self) -> bool:
        """Fast check: the same objects, and the mutable ones have the same fingerprints."""
        if self._fast_check is None:
            values = tuple(before.value for before in self._sent.values())
            self._fast_check = (
                tuple(self._sent),
                values,
                tuple(b for b in self._sent.values() if b.fingerprint is not None),
            )
        names, values, mutable = self._fast_check
        if self._include_new and len(self._mapping) != self._size:
            return False
        if not all(map(is_, map(self._mapping.get, names, repeat(ABSENT)), values)):
            return False
        return all(before.matches(before.value) for before in mutable)


class Namespaces:
    """Global namespaces by id: those of this process, and copies of the peer's. The sign of an id tells them apart."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._ids: dict[int, int] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._modules: dict[int, types.ModuleType] = {}
        self._received: dict[int, ChangeTracker] = {}
        """Values received for the peer's namespaces."""
        self._trackers: dict[int, ChangeTracker] = {}
        """Values sent of this process's namespaces."""

    def id_of(self, space: dict[str, Any]) -> int:
        """The id of a namespace; a new one if it has none."""
        number = self._ids.get(id(space))
        if number is None:
            number = self._sign * (len(self._namespaces) + 1)
            self._register(number, space)
        return number

    def is_local(self, number: int) -> bool:
        """Whether a namespace belongs to this process."""
        return number * self._sign > 0

    def module_attributes(self, number: int) -> dict[str, Any]:
        """What functions need of the module around them, whatever names they read."""
        space = self._namespaces[number]
        return {name: space[name] for name in _MODULE_ATTRIBUTES if name in space}

    def is_current(self, number: int, name: str) -> bool:
        """Whether the peer has the current value of a name."""
        watch = self._trackers.get(number)
        return watch is not None and watch.is_current(name)

    def mark_sent(self, news: dict[tuple[int, str], ValueSnapshot]) -> None:
        """Record values as sent."""
        for (number, name), value in news.items():
            watch = self._trackers.get(number)
            if watch is None:
                watch = self._trackers[number] = ChangeTracker(self._namespaces[number], {}, include_new=False)
            watch.mark_sent({name: value})

    def changed(self) -> list[tuple[int, str, Any]]:
        """Names whose values the peer does not have, with the current values."""
        return [(number, *news) for number, watch in self._trackers.items() for news in watch.changed().items()]

    def mark_all_unsent(self) -> None:
        """Record all values as not sent."""
        for watch in self._trackers.values():
            watch.mark_all_unsent()

    def receive(self, number: int, news: dict[str, Any]) -> None:
        """Assign received values."""
        space = self._namespaces[number]
        for name, value in news.items():
            if value is ABSENT:
                space.pop(name, None)
            else:
                space[name] = value

    def watch_received(self, number: int, names: Iterable[str]) -> None:
        """Track writes of functions in this process to received names."""
        space = self._namespaces[number]
        if not self.is_local(number):
            watch = self._received.get(number)
            if watch is None:
                watch = self._received[number] = ChangeTracker(space, {}, include_new=False)
            watch.mark_sent({name: take_snapshot(space.get(name, ABSENT)) for name in names})

    def received_values(self) -> Iterator[tuple[str, Any]]:
        """The names of the other side's dictionaries that it sent, with their values here."""
        for number, watch in self._received.items():
            yield from ((name, self._namespaces[number].get(name)) for name in watch.names())

    def modified(self) -> list[str]:
        """Received names that were written in this process."""
        return [name for watch in self._received.values() for name in watch.changed()]

    def get_or_create(self, number: int, about: dict[str, Any]) -> dict[str, Any]:
        """The dictionary with a number: our own, or the one that stands for it here."""
        space = self._namespaces.get(number)
        if space is None:
            module = self._modules[number] = make_module(str(about.get("__name__", "unknown")), about)
            space = vars(module)
            self._register(number, space)
        return space

    def get_module(self, number: int, about: dict[str, Any]) -> types.ModuleType:
        """The module around the dictionary with a number."""
        self.get_or_create(number, about)
        return self._modules[number]

    def register_module(self, module: types.ModuleType) -> None:
        """Remember which module is around a dictionary of ours."""
        self._modules[self.id_of(vars(module))] = module

    def _register(self, number: int, space: dict[str, Any]) -> None:
        self._ids[id(space)] = number
        self._namespaces[number] = space


def snapshot_attributes(cls: type) -> dict[str, ValueSnapshot]:
    """The attributes of a class that are watched, as they are now: containers by what they hold, others by identity."""
    attributes = {name: value for name, value in vars(cls).items() if name not in _UNTRACKED}
    return {
        n: take_snapshot(v) if isinstance(v, _MUTABLE_TYPES) else ValueSnapshot(v, None) for n, v in attributes.items()
    }


_SEPARATOR = ":"
"""Stands between the name of a method and that of a variable."""


class ClosureVariables(Mapping[str, Any]):
    """Closure variables of a class's methods, by method and variable name."""

    def __init__(self, cls: type) -> None:
        self.cells: dict[str, types.CellType] = {}
        for name, held in vars(cls).items():
            for function in _functions_of(held):
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                self.cells.update((f"{name}{_SEPARATOR}{word}", cell) for word, cell in cells if word != "__class__")

    def __getitem__(self, name: str) -> Any:
        held = cell_contents(self.cells[name])
        if not held:
            raise KeyError(name)
        return held[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


def _functions_of(held: Any) -> Iterator[types.FunctionType]:
    parts = (held.fget, held.fset, held.fdel) if isinstance(held, property) else (getattr(held, "__func__", held),)
    return (part for part in parts if isinstance(part, types.FunctionType))


def is_closure_name(name: str) -> bool:
    """Whether this is the name of a variable, and not of an attribute."""
    return _SEPARATOR in name


def set_closure_variable(cls: type, name: str, value: Any) -> None:
    """Set a variable that methods of a class read."""
    cell = ClosureVariables(cls).cells.get(name)
    if cell is not None:
        if value is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = value


def snapshot_cell(cell: types.CellType) -> ValueSnapshot:
    """A variable as it is now: modules and tensors by identity, other things by what they hold."""
    value = (*cell_contents(cell), ABSENT)[0]
    return ValueSnapshot(value, None) if isinstance(value, (nn.Module, Tensor)) else take_snapshot(value)


def cell_matches(cell: types.CellType, before: ValueSnapshot) -> bool:
    """Whether a variable is what was sent."""
    return before.matches((*cell_contents(cell), ABSENT)[0])


class ClassTracker:
    """Attributes of classes sent by value, as the peer has them."""

    def __init__(self) -> None:
        self._trackers: dict[int, tuple[type, ChangeTracker, ChangeTracker]] = {}

    def mark_sent(self, number: int, cls: type, attributes: dict[str, ValueSnapshot]) -> None:
        """The other side has been sent a class."""
        if not issubclass(cls, enum.Enum):
            variables = ClosureVariables(cls)
            looks = {name: snapshot_cell(cell) for name, cell in variables.cells.items()}
            watches = (
                ChangeTracker(vars(cls), attributes, include_new=True),
                ChangeTracker(variables, looks, include_new=False),
            )
            self._trackers[number] = (cls, *watches)

    def changed(self) -> list[tuple[int, type, dict[str, Any]]]:
        """The classes with attributes, or variables of methods, that differ from what was sent."""
        watches = ((number, cls, pair) for number, (cls, *pair) in self._trackers.items())
        changes = ((number, cls, {**pair[0].changed(), **pair[1].changed()}) for number, cls, pair in watches)
        return [change for change in changes if change[2]]
