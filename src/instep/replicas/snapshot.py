"""What `forward` can reach and change besides tensors, as it was, and put back.

Replicas share what holds no tensor with the source: lists, dictionaries, helper objects, closures, generators. A trial
run may change them, and nobody is to see that.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.replicas.contents import Contents, beside, contents_of, holder_of, holds_still, put
from instep.replicas.opaque import is_opaque
from instep.structure.tree import SCALARS, attributes_of

MOST = 100_000
_ENDS = (Tensor, nn.Module, types.BuiltinFunctionType)
# Objects that other threads may be at work on: what they hold is not ours to put back.
_BUSY = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "torch.utils.data")
_PLAIN = (list, dict, set, deque)


class TooMuch(Exception):
    """There is more behind a module than can be looked at."""


class Snapshot:
    """Everything that can be reached from some modules' attributes and classes, without their tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._seen: dict[int, Any] = {}
        self._held: list[tuple[Any, Contents]] = []
        """Containers, attributes among them, with what they held."""
        self._cells: list[tuple[types.CellType, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        pending: list[Any] = []
        for module in modules:
            self._hold(module.__dict__)
            pending.extend(module.__dict__.values())
        for cls in {cls for module in modules for cls in type(module).__mro__}:
            if not cls.__module__.startswith(("torch.", "builtins")):
                pending.extend(self._functions_of(cls))
        while pending:
            pending.extend(self._keep(pending.pop()))

    def _hold(self, container: Any) -> None:
        self._held.append((container, contents_of(container)))

    def _functions_of(self, cls: type) -> list[Any]:
        """A class's own functions; the plain globals that they name are kept too."""
        functions = [item for item in cls.__dict__.values() if isinstance(item, types.FunctionType)]
        found: list[Any] = [item for item in cls.__dict__.values() if type(item) in _PLAIN]
        for function in functions:
            for name in function.__code__.co_names:
                value = function.__globals__.get(name, self)
                if type(value) in _PLAIN:
                    found.append(value)
                elif type(value) in SCALARS:
                    self._globals.append((function.__globals__, name, value))
        return [*found, *functions]

    def _keep(self, item: Any) -> Iterable[Any]:
        """Remember what one object holds, and say what else that leads to."""
        if is_opaque(item) or isinstance(item, _ENDS) or id(item) in self._seen:
            return ()
        if type(item).__module__.startswith(_BUSY):
            return ()
        self._seen[id(item)] = item
        if len(self._seen) > MOST:
            raise TooMuch("the module leads to more objects than can be put back")
        if isinstance(item, torch.Generator):
            self._generators.append((item, item.get_state()))
        elif isinstance(item, np.ndarray):
            self._arrays.append((item, item.copy()))
        elif isinstance(item, (dict, list, set, deque)):
            self._hold(item)
            return (*contents_of(item).keys, *contents_of(item).items, *self._beside(item))
        elif isinstance(item, (tuple, frozenset)):
            return (*item, *self._beside(item))
        elif isinstance(item, types.FunctionType):
            return self._function(item)
        elif isinstance(item, types.MethodType):
            return (item.__func__, item.__self__)
        elif isinstance(item, functools.partial):
            return (item.func, *item.args, *item.keywords.values())
        else:
            return self._object(item)
        return ()

    def _beside(self, item: Any) -> Iterable[Any]:
        attributes = beside(item)
        if attributes is None:
            return ()
        self._hold(attributes)
        return attributes.values()

    def _object(self, item: Any) -> Iterable[Any]:
        holder = holder_of(item)
        if holder is None:
            return ()
        self._hold(holder)
        return attributes_of(item).values()

    def _function(self, item: types.FunctionType) -> list[Any]:
        found = [item.__defaults__, item.__kwdefaults__]
        for cell in item.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._cells.append((cell, content))
            found.append(content)
        return found

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        for container, contents in self._held:
            if not holds_still(container, contents):
                put(container, contents)
        for cell, content in self._cells:
            cell.cell_contents = content
        for array, values in self._arrays:
            if array.flags.writeable and not np.array_equal(array, values):
                array[...] = values
        for space, name, value in self._globals:
            if space.get(name) is not value:
                space[name] = value
        for generator, state in self._generators:
            generator.set_state(state)

    def changed(self) -> list[tuple[Any, Contents]]:
        """The containers and arrays that are not as they were, each with what it held."""
        arrays = [(array, Contents((), (then,))) for array, then in self._arrays if not np.array_equal(array, then)]
        return [pair for pair in self._held if not holds_still(*pair)] + arrays

    def drew(self) -> bool:
        """Whether numbers were drawn from a generator that the module holds."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)


class Dice:
    """The state of every generator that belongs to the process, as it was: torch's, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._then = self._now()
        self._given: list[tuple[torch.Generator, Tensor]] = []

    def hold(self, generators: Iterable[torch.Generator]) -> None:
        """Keep an eye on generators that a call is given, too."""
        self._given = [(generator, generator.get_state()) for generator in generators]

    def _now(self) -> tuple[Tensor, Tensor | None, Any, Any]:
        far = None
        if self._device.type != "cpu":
            far = torch.get_device_module(self._device).get_rng_state(self._device)
        return torch.get_rng_state(), far, random.getstate(), np.random.get_state()

    def moved(self) -> bool:
        """Whether any number was drawn."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._given):
            return True
        near, far, python, numpy = self._now()
        then = self._then
        if not torch.equal(near, then[0]) or python != then[2]:
            return True
        if far is not None and then[1] is not None and not torch.equal(far, then[1]):
            return True
        return bool(numpy[2] != then[3][2] or not np.array_equal(numpy[1], then[3][1]))

    def restore(self) -> None:
        """Put every generator back."""
        for generator, state in self._given:
            generator.set_state(state)
        near, far, python, numpy = self._then
        torch.set_rng_state(near)
        if far is not None:
            torch.get_device_module(self._device).set_rng_state(far, self._device)
        random.setstate(python)
        np.random.set_state(numpy)
