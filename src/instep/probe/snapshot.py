"""Snapshot and rollback of the Python objects and random generators that `forward` can reach."""

from __future__ import annotations

import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.replicas.object_graph import (
    EMPTY_CELL,
    MAX_OBJECTS,
    Contents,
    cell_contents,
    is_atomic,
    is_unchanged,
    mutable_storage,
    read_contents,
    walk,
    write_contents,
)
from instep.structure.tree import SCALARS

# Other threads may use these objects at the same time, so they are not restored.
_CONCURRENT_MODULES = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading", "torch.utils.data")
_CONTAINER_TYPES = (list, dict, set, deque)
_SKIPPED_TYPES = (Tensor, nn.Module, types.BuiltinFunctionType, weakref.ref)


class SnapshotTooLarge(Exception):
    """The module references `MAX_OBJECTS` objects or more."""


class Snapshot:
    """The contents of all objects reachable from the attributes and classes of modules, except tensors."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._containers: list[tuple[Any, Contents]] = []
        """Containers and attribute dictionaries, with their contents."""
        self._cells: list[tuple[types.CellType, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        roots: list[Any] = []
        for module in modules:
            self._containers.append((module.__dict__, read_contents(module.__dict__)))
            roots.extend(module.__dict__.values())
        for cls in {cls for module in modules for cls in type(module).__mro__}:
            if not cls.__module__.startswith(("torch.", "builtins")):
                roots.extend(self._functions_of(cls))
        count = 0
        for count, visit in enumerate(walk((("", root) for root in roots), skip=_is_skipped), start=1):  # noqa: B007
            self._save(visit.value)
        if count >= MAX_OBJECTS:
            raise SnapshotTooLarge("the module references more objects than can be restored")

    def _functions_of(self, cls: type) -> list[Any]:
        """The functions and containers of a class, and the global containers that its functions use.

        Saves the global scalars that the functions use.
        """
        functions = [item for item in cls.__dict__.values() if isinstance(item, types.FunctionType)]
        containers: list[Any] = [item for item in cls.__dict__.values() if type(item) in _CONTAINER_TYPES]
        for function in functions:
            for name in function.__code__.co_names:
                value = function.__globals__.get(name, self)
                if type(value) in _CONTAINER_TYPES:
                    containers.append(value)
                elif type(value) in SCALARS:
                    self._globals.append((function.__globals__, name, value))
        return [*containers, *functions]

    def _save(self, item: Any) -> None:
        if isinstance(item, torch.Generator):
            self._generators.append((item, item.get_state()))
        elif isinstance(item, np.ndarray):
            self._arrays.append((item, item.copy()))
        elif isinstance(item, types.FunctionType):
            cells = [(cell, cell_contents(cell)) for cell in item.__closure__ or ()]
            self._cells += [(cell, content) for cell, content in cells if content is not EMPTY_CELL]
        elif (storage := mutable_storage(item)) is not None:
            self._containers.append((storage, read_contents(storage)))

    def restore(self) -> None:
        """Restore everything that has changed."""
        for container, contents in self._containers:
            if not is_unchanged(container, contents):
                write_contents(container, contents)
        for cell, content in self._cells:
            cell.cell_contents = content
        for array, values in self._arrays:
            if array.flags.writeable and not np.array_equal(array, values):
                array[...] = values
        for namespace, name, value in self._globals:
            if namespace.get(name) is not value:
                namespace[name] = value
        for generator, state in self._generators:
            generator.set_state(state)

    def changed(self) -> list[tuple[Any, Contents]]:
        """The containers and arrays that have changed, with their saved contents."""
        arrays = [
            (array, Contents((), (values,))) for array, values in self._arrays if not np.array_equal(array, values)
        ]
        return [pair for pair in self._containers if not is_unchanged(*pair)] + arrays

    def used_rng(self) -> bool:
        """Whether a generator that the module references has advanced."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)


def _is_skipped(item: Any) -> bool:
    if is_atomic(item) or isinstance(item, _SKIPPED_TYPES):
        return True
    return type(item).__module__.startswith(_CONCURRENT_MODULES)


class RngSnapshot:
    """The states of the global random generators of torch, Python and NumPy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._initial = (*self._capture_torch(), random.getstate(), np.random.get_state())
        self._call_generators: list[tuple[torch.Generator, Tensor]] = []

    def track(self, generators: Iterable[torch.Generator]) -> None:
        """Also save the states of the generators among a call's arguments."""
        self._call_generators = [(generator, generator.get_state()) for generator in generators]

    def _capture_torch(self) -> tuple[Tensor, Tensor | None]:
        device_state = None
        if self._device.type != "cpu":
            device_state = torch.get_device_module(self._device).get_rng_state(self._device)
        return torch.get_rng_state(), device_state

    def torch_has_advanced(self) -> bool:
        """Whether a generator of torch has advanced."""
        if any(not torch.equal(generator.get_state(), state) for generator, state in self._call_generators):
            return True
        for now, before in zip(self._capture_torch(), self._initial[:2], strict=True):
            if now is not None and before is not None and not torch.equal(now, before):
                return True
        return False

    def host_state(self) -> Any:
        """The states of the generators of Python and NumPy, which can be compared; None if they have not advanced."""
        now, before = [_comparable(random.getstate(), np.random.get_state()), _comparable(*self._initial[2:])]
        return None if now == before else now

    def reseed(self, seed: int) -> None:
        """Seed every generator. `restore` restores them."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator, _ in self._call_generators:
            generator.manual_seed(seed)

    def restore(self) -> None:
        """Restore the state of every generator."""
        for generator, state in self._call_generators:
            generator.set_state(state)
        cpu, device, python, numpy = self._initial
        torch.set_rng_state(cpu)
        if device is not None:
            torch.get_device_module(self._device).set_rng_state(device, self._device)
        random.setstate(python)
        np.random.set_state(numpy)


def _comparable(python: Any, numpy: Any) -> tuple[Any, ...]:
    """The states of the generators of Python and NumPy, with the array of NumPy's as bytes."""
    return python, numpy[1].tobytes(), *numpy[2:]
