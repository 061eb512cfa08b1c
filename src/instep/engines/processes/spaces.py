"""The globals that functions read which cross by value, on both sides of a line, and what of them has changed."""

from __future__ import annotations

import ctypes
import logging
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.engines.processes.by_value import new_module
from instep.engines.processes.reducers import has_plain_memory, is_plain

ABSENT, _NEVER = object(), object()
_PARTS_AT_MOST = 2000
_READ_AT_MOST = 2**20
"""Bytes of a tensor whose values are looked at."""
_BY_IDENTITY = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device),
    logging.Logger,  # one of its name in every process, which notes for itself what it has been asked
)
_ABOUT = ("__name__", "__package__", "__path__", "__file__")
_NOT_WATCHED = {"__dict__", "__weakref__", "__doc__", "__abstractmethods__", "_abc_impl", "__annotations__"}
_NOT_WATCHED |= {"__dataclass_fields__", "__dataclass_params__", "__match_args__", "__parameters__", "__slots__"}
_CONTAINERS = (dict, list, set, np.ndarray, Tensor)


class Seen(NamedTuple):
    """A value as it was when it was sent; it is kept, so that no other object can take its place in memory."""

    value: Any
    look: Any

    def still(self, value: Any) -> bool:
        """Whether a value is what was sent."""
        if value is self.value:
            return self.look is None or look_of(value) == self.look
        return type(value) is type(self.value) and is_plain(value) and bool(value == self.value)


def seen(value: Any) -> Seen:
    """A value as it is now."""
    return Seen(value, look_of(value))


def look_of(value: Any) -> Any:
    """Something that compares equal as long as a value has not changed in place; None where it cannot change.

    Containers and objects are looked into up to a number of parts, tensors by their version and, up to a size, by a
    checksum as arrays are: writes through `.data`, and those of fused optimizers, move no version. Beyond that number,
    a value counts as changed only when its name is bound to another.
    """
    if is_plain(value) or isinstance(value, _BY_IDENTITY) or value is ABSENT:
        return None
    try:
        look = _look(value, [_PARTS_AT_MOST], {})
        return None if look == (id(value),) and not isinstance(value, _CONTAINERS) else look
    except _TooMuch:
        return None


class _TooMuch(Exception):
    """There is too much to look at."""


def _look(value: Any, left: list[int], inside: dict[int, Any]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise _TooMuch
    if is_plain(value):
        return type(value), value
    if isinstance(value, _BY_IDENTITY) or id(value) in inside:
        return id(value)
    inside[id(value)] = value
    if isinstance(value, Tensor):
        version = -1 if value.is_inference() else value._version
        return id(value), version, value.requires_grad, _values(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return id(value), tuple(_look(held, left, inside) for held in value.ravel().tolist())
        return id(value), value.shape, _checksum(value)
    parts: list[Any] = [id(value)]
    if isinstance(value, dict):
        parts += [(_look(key, left, inside), _look(held, left, inside)) for key, held in value.items()]
    elif isinstance(value, (list, tuple)):
        parts += [_look(held, left, inside) for held in value]
    elif isinstance(value, (set, frozenset)):
        parts += [frozenset(_look(held, left, inside) for held in value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts += [(name, _look(held, left, inside)) for name, held in attributes.items()]
    return tuple(parts)


def _values(tensor: Tensor) -> int | None:
    """A checksum of a tensor's values, where they lie in one piece and are not too many. No operation is run for it."""
    if tensor.device.type != "cpu" or not has_plain_memory(tensor) or not tensor.is_contiguous():
        return None
    if not 0 < tensor.nbytes <= _READ_AT_MOST:
        return None
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _checksum(array: Any) -> int:
    bytes_of: Any = np.ascontiguousarray(array).view(np.uint8)
    return zlib.crc32(bytes_of) if array.size else 0


class Watch:
    """What the other side was told of some names of one dictionary."""

    def __init__(self, names: Mapping[str, Any], sent: dict[str, Seen], also_new: bool) -> None:
        self._names = names
        self._sent = sent
        self._also_new = also_new
        self._size = len(names)
        self._quick: tuple[tuple[str, ...], tuple[Any, ...], tuple[Seen, ...]] | None = None

    def tell(self, news: dict[str, Seen]) -> None:
        """The other side has been sent these."""
        self._sent.update(news)
        self._size = len(self._names)
        self._quick = None

    def doubt(self) -> None:
        """The other side may have none of it."""
        self.tell({name: Seen(_NEVER, None) for name in self._sent})

    def told(self, name: str) -> bool:
        """Whether the other side has the present value of a name."""
        before = self._sent.get(name)
        return before is not None and before.still(self._names.get(name, ABSENT))

    def names(self) -> list[str]:
        """The names that it was told of."""
        return list(self._sent)

    def changed(self) -> dict[str, Any]:
        """The names whose values are no longer what the other side was told, with the value now."""
        if self._same():
            return {}
        present = {name: self._names.get(name, ABSENT) for name in self._sent}
        news = {name: value for name, value in present.items() if not self._sent[name].still(value)}
        if self._also_new:
            news.update((name, self._names[name]) for name in self._names.keys() - self._sent.keys() - _NOT_WATCHED)
        self._size = len(self._names)
        return news

    def _same(self) -> bool:
        """A quick look: whether the very same objects are there, and those that can change in place have not."""
        if self._quick is None:
            values = tuple(before.value for before in self._sent.values())
            self._quick = tuple(self._sent), values, tuple(b for b in self._sent.values() if b.look is not None)
        names, values, mutable = self._quick
        if self._also_new and len(self._names) != self._size:
            return False
        if not all(map(is_, map(self._names.get, names, repeat(ABSENT)), values)):
            return False
        return all(before.still(before.value) for before in mutable)


class Spaces:
    """The dictionaries of globals on one side of a line, by number: our own (of one sign) and the other side's."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._number: dict[int, int] = {}
        self._space: dict[int, dict[str, Any]] = {}
        self._module: dict[int, types.ModuleType] = {}
        self._received: dict[int, Watch] = {}
        """Of the other side's dictionaries, what it sent."""
        self._watches: dict[int, Watch] = {}
        """Of our own dictionaries, what the other side was told of each name that its functions read."""

    def number(self, space: dict[str, Any]) -> int:
        """The number of a dictionary, a new one for one that was never met."""
        number = self._number.get(id(space))
        if number is None:
            number = self._sign * (len(self._space) + 1)
            self._keep(number, space)
        return number

    def ours(self, number: int) -> bool:
        """Whether a dictionary belongs to this side, whose values are then the truth."""
        return number * self._sign > 0

    def about(self, number: int) -> dict[str, Any]:
        """What functions need of the module around them, whatever names they read."""
        space = self._space[number]
        return {name: space[name] for name in _ABOUT if name in space}

    def told(self, number: int, name: str) -> bool:
        """Whether the other side has the present value of a name."""
        watch = self._watches.get(number)
        return watch is not None and watch.told(name)

    def tell(self, news: dict[tuple[int, str], Seen]) -> None:
        """The other side has been sent these."""
        for (number, name), value in news.items():
            watch = self._watches.get(number)
            if watch is None:
                watch = self._watches[number] = Watch(self._space[number], {}, also_new=False)
            watch.tell({name: value})

    def changed(self) -> list[tuple[int, str, Any]]:
        """The names whose values are no longer what the other side was told, with the value now."""
        return [(number, *news) for number, watch in self._watches.items() for news in watch.changed().items()]

    def forget(self) -> None:
        """The other side may have none of it."""
        for watch in self._watches.values():
            watch.doubt()

    def receive(self, number: int, news: dict[str, Any]) -> None:
        """Take over values of names from the other side."""
        space = self._space[number]
        for name, value in news.items():
            if value is ABSENT:
                space.pop(name, None)
            else:
                space[name] = value

    def watch_received(self, number: int, names: Iterable[str]) -> None:
        """From now on see whether functions here write to names that were received."""
        space = self._space[number]
        if not self.ours(number):
            watch = self._received.get(number)
            if watch is None:
                watch = self._received[number] = Watch(space, {}, also_new=False)
            watch.tell({name: seen(space.get(name, ABSENT)) for name in names})

    def received(self) -> Iterator[tuple[str, Any]]:
        """The names of the other side's dictionaries that it sent, with their values here."""
        for number, watch in self._received.items():
            yield from ((name, self._space[number].get(name)) for name in watch.names())

    def written(self) -> list[str]:
        """The names whose values here are no longer what the other side sent."""
        return [name for watch in self._received.values() for name in watch.changed()]

    def get(self, number: int, about: dict[str, Any]) -> dict[str, Any]:
        """The dictionary with a number: our own, or the one that stands for it here."""
        space = self._space.get(number)
        if space is None:
            module = self._module[number] = new_module(str(about.get("__name__", "unknown")), about)
            space = vars(module)
            self._keep(number, space)
        return space

    def module(self, number: int, about: dict[str, Any]) -> types.ModuleType:
        """The module around the dictionary with a number."""
        self.get(number, about)
        return self._module[number]

    def keep_module(self, module: types.ModuleType) -> None:
        """Remember which module is around a dictionary of ours."""
        self._module[self.number(vars(module))] = module

    def _keep(self, number: int, space: dict[str, Any]) -> None:
        self._number[id(space)] = number
        self._space[number] = space


def attributes_of(cls: type) -> dict[str, Seen]:
    """The attributes of a class that are watched, as they are now: containers by what they hold, others by identity."""
    attributes = {name: value for name, value in vars(cls).items() if name not in _NOT_WATCHED}
    return {n: seen(v) if isinstance(v, _CONTAINERS) else Seen(v, None) for n, v in attributes.items()}
