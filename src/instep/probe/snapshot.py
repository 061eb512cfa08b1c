"""Snapshot and rollback of the Python objects and random generators that `forward` can reach."""

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

from instep.replicas.object_graph import (
    Contents,
    attribute_storage,
    extra_attributes,
    is_atomic,
    is_unchanged,
    read_contents,
    write_contents,
)
from instep.structure.tree import SCALARS, attributes_of

MAX_OBJECTS = 100_000
_LEAF_TYPES = (Tensor, nn.Module, types.BuiltinFunctionType)
# Objects that other threads may be at work on: what they hold is not ours to put back.
_CONCURRENT_MODULES = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "torch.utils.data")
_CONTAINER_TYPES = (list, dict, set, deque)


class SnapshotTooLarge(Exception):
    """There is more behind a module than can be looked at."""


class Snapshot:
    """Everything that can be reached from some modules' attributes and classes, without their tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._visited: dict[int, Any] = {}
        self._containers: list[tuple[Any, Contents]] = []
        """Containers, attributes among them, with what they held."""
        self._cells: list[tuple[types.CellType, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        pending: list[Any] = []
        for module in modules:
            self._save_container(module.__dict__)
            pending.extend(module.__dict__.values())
        for cls in {cls for module in modules for cls in type(module).__mro__}:
            if not cls.__module__.startswith(("torch.", "builtins")):
                pending.extend(self._functions_of(cls))
        while pending:
            pending.extend(self._visit(pending.pop()))

    def _save_container(self, container: Any) -> None:
        self._containers.append((container, read_contents(container)))

    def _functions_of(self, cls: type) -> list[Any]:
        """A class's own functions; the plain globals that they name are kept too."""
        functions = [item for item in cls.__dict__.values() if isinstance(item, types.FunctionType)]
        found: list[Any] = [item for item in cls.__dict__.values() if type(item) in _CONTAINER_TYPES]
        for function in functions:
            for name in function.__code__.co_names:
                value = function.__globals__.get(name, self)
                if type(value) in _CONTAINER_TYPES:
                    found.append(value)
                elif type(value) in SCALARS:
                    self._globals.append((function.__globals__, name, value))
        return [*found, *functions]

    def _visit(self, item: Any) -> Iterable[Any]:
        """Remember what one object holds, and say what else that leads to."""
        if is_atomic(item) or isinstance(item, _LEAF_TYPES) or id(item) in self._visited:
            return ()
        if type(item).__module__.startswith(_CONCURRENT_MODULES):
            return ()
        self._visited[id(item)] = item
        if len(self._visited) > MAX_OBJECTS:
            raise SnapshotTooLarge("the module leads to more objects than can be put back")
        if isinstance(item, torch.Generator):
            self._generators.append((item, item.get_state()))
        elif isinstance(item, np.ndarray):
            self._arrays.append((item, item.copy()))
            return self._visit_attributes(item)
        elif isinstance(item, (dict, list, set, deque)):
            self._save_container(item)
            return (*read_contents(item).keys, *read_contents(item).items, *self._visit_attributes(item))
        elif isinstance(item, (tuple, frozenset)):
            return (*item, *self._visit_attributes(item))
        elif isinstance(item, types.FunctionType):
            return self._visit_function(item)
        elif isinstance(item, types.MethodType):
            return (item.__func__, item.__self__)
        elif isinstance(item, functools.partial):
            return (item.func, *item.args, *item.keywords.values())
        else:
            return self._visit_object(item)
        return ()

    def _visit_attributes(self, item: Any) -> Iterable[Any]:
        attributes = extra_attributes(item)
        if attributes is None:
            return ()
        self._save_container(attributes)
        return attributes.values()

    def _visit_object(self, item: Any) -> Iterable[Any]:
        holder = attribute_storage(item)
        if holder is None:
            return ()
        self._save_container(holder)
        return attributes_of(item).values()

    def _visit_function(self, item: types.FunctionType) -> list[Any]:
        found = [item.__defaults__, item.__kwdefaults__, *self._visit_attributes(item)]
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
        for container, contents in self._containers:
            if not is_unchanged(container, contents):
                write_contents(container, contents)
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
        return [pair for pair in self._containers if not is_unchanged(*pair)] + arrays

    def used_rng(self) -> bool:
        """Whether numbers were drawn from a generator that the module holds."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)


class RngSnapshot:
    """The state of every generator that belongs to the process, as it was: torch's, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._initial = self._capture()
        self._call_generators: list[tuple[torch.Generator, Tensor]] = []

    def track(self, generators: Iterable[torch.Generator]) -> None:
        """Keep an eye on generators that a call is given, too."""
        self._call_generators = [(generator, generator.get_state()) for generator in generators]

    def _capture(self) -> tuple[Tensor, Tensor | None, Any, Any]:
        far = None
        if self._device.type != "cpu":
            far = torch.get_device_module(self._device).get_rng_state(self._device)
        return torch.get_rng_state(), far, random.getstate(), np.random.get_state()

    def has_advanced(self) -> bool:
        """Whether any number was drawn."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._call_generators):
            return True
        near, far, python, numpy = self._capture()
        then = self._initial
        if not torch.equal(near, then[0]) or python != then[2]:
            return True
        if far is not None and then[1] is not None and not torch.equal(far, then[1]):
            return True
        return bool(numpy[2] != then[3][2] or not np.array_equal(numpy[1], then[3][1]))

    def restore(self) -> None:
        """Put every generator back."""
        for generator, state in self._call_generators:
            generator.set_state(state)
        near, far, python, numpy = self._initial
        torch.set_rng_state(near)
        if far is not None:
            torch.get_device_module(self._device).set_rng_state(far, self._device)
        random.setstate(python)
        np.random.set_state(numpy)
