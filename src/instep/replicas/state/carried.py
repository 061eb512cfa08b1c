"""State with one row per sample that one call leaves on the module for the next."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from instep.replicas.diff import MISSING
from instep.replicas.names import module_names
from instep.structure.tree import Path, flatten_one_level

SPLIT, WHOLE, ONE_DEVICE, UNKNOWN = "cut", "whole", "alone", "unsure"
_MAX_COMPARISONS = 8
_MAX_CODE_OBJECTS = 20_000


@dataclass
class CarriedValue:
    """An attribute, a buffer or an entry of a dictionary that followed the batch when it was set, and the dims in which
    its tensors did."""

    module: nn.Module | None
    """None for an entry of a dictionary, which is never cut: replicas have the whole, or the module itself runs."""
    name: str
    path: str
    dims: dict[Path, int]
    verdict: str = UNKNOWN
    container: dict[Any, Any] | None = None
    key: Any = None
    comparisons: int = 0
    """How many comparisons there were."""
    verdicts_by_fingerprint: dict[int, str] = field(default_factory=dict)
    """What comparisons showed, by the kind that the module was of: in another mode it may be read in another way."""
    unread_fingerprint: int | None = None
    """The kind that the module was of when a comparison showed that nothing reads it, which says nothing of others."""

    @property
    def owner_dict(self) -> dict[str, Any]:
        """The dictionary that it is in."""
        if self.module is None:
            return {}
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else self.module.__dict__

    @property
    def value(self) -> Any:
        if self.container is not None:
            return self.container.get(self.key, MISSING)
        return self.owner_dict.get(self.name, MISSING)

    def leaves(self) -> list[tuple[Tensor, int]]:
        """Its tensors that follow the batch, each with the dim."""
        return [(tensor, self.dims[path]) for path, tensor in tensors_by_path(self.value) if path in self.dims]

    def split(self, sizes: Sequence[int]) -> list[Any]:
        """One part for each replica, in memory of its own."""

        def part(value: Any, path: Path, start: int, size: int) -> Any:
            if isinstance(value, Tensor):
                return value.narrow(self.dims[path], start, size).clone() if path in self.dims else value
            node = flatten_one_level(value)
            if node is None:
                return value
            inside = zip(node.keys, node.children, strict=True)
            return node.unflatten([part(child, (*path, key), start, size) for key, child in inside])

        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [part(self.value, (), start, size) for start, size in zip(starts, sizes, strict=True)]


@dataclass
class CarriedState:
    """Every slot that is known of one source module."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    values: dict[tuple[int, str], CarriedValue] = field(default_factory=dict)
    _read_cache: dict[str, bool] = field(default_factory=dict)

    def record(self, module: nn.Module, name: str, path: str, dims: Mapping[Path, tuple[int, int]]) -> None:
        """An attribute was merged from tensors that follow the batch in these dims."""
        known = self.values.get((id(module), name))
        verdict = known.verdict if known is not None else SPLIT if self._is_declared(path) else UNKNOWN
        made = CarriedValue(module, name, path, {p: dim for p, (_, dim) in dims.items()}, verdict)
        if known is not None:
            made.comparisons, made.unread_fingerprint, made.verdicts_by_fingerprint = (
                known.comparisons,
                known.unread_fingerprint,
                known.verdicts_by_fingerprint,
            )
        self.values[id(module), name] = made

    def record_entry(
        self, table: dict[Any, Any], key: Any, attribute: str, path: str, dims: Mapping[Path, tuple[int, int]]
    ) -> None:
        """An entry of a dictionary on the module was merged from tensors that follow the batch in these dims."""
        known = self.values.get((id(table), str(key)))
        if known is None and not self._is_declared(path):
            found = {p: dim for p, (_, dim) in dims.items()}
            self.values[id(table), str(key)] = CarriedValue(None, attribute, path, found, container=table, key=key)

    def _is_declared(self, path: str) -> bool:
        return any(rule == "cat" and fnmatchcase(path, pattern) for pattern, rule in self.rules.items())

    def _add_declared(self, source: nn.Module, modules: Sequence[nn.Module], total: int) -> None:
        """Take tensors that a rule says are joined as carried, also before any call has set them."""
        for module, prefix in zip(modules, module_names(source, modules), strict=True):
            for name, value in (*module.__dict__.items(), *module._buffers.items()):
                path = f"{prefix}.{name}" if prefix else name
                if (id(module), name) in self.values or not self._is_declared(path):
                    continue
                found = {p: t.shape.index(total) for p, t in tensors_by_path(value) if list(t.shape).count(total) == 1}
                if found:
                    self.values[id(module), name] = CarriedValue(module, name, path, found, SPLIT)

    def select(
        self,
        source: nn.Module,
        modules: Sequence[nn.Module],
        sizes: Sequence[int],
        containers: Collection[int],
        kind: int,
    ) -> tuple[list[CarriedValue], str]:
        """The slots that matter in a call with shards of these sizes, and whether they can be cut for it.

        `containers` are the ids of those that the modules hold, `kind` is what the source is of now.
        """
        if "cat" in self.rules.values():
            self._add_declared(source, modules, sum(sizes))
        gone = [
            key
            for key, slot in self.values.items()
            if slot.container is not None and id(slot.container) not in containers
        ]
        for key in gone:
            del self.values[key]
        for slot in self.values.values():
            if kind in slot.verdicts_by_fingerprint:
                slot.verdict = slot.verdicts_by_fingerprint[kind]
            elif (
                slot.verdict in (SPLIT, WHOLE) and slot.verdicts_by_fingerprint and slot.comparisons < _MAX_COMPARISONS
            ):
                slot.verdict = UNKNOWN
            if (
                slot.verdict == WHOLE
                and slot.unread_fingerprint not in (None, kind)
                and slot.comparisons < _MAX_COMPARISONS
            ):
                slot.verdict = UNKNOWN
        slots = self._values_in_use(modules) if self.values else []
        for slot in slots:
            fits = slot.module is None or all(tensor.shape[dim] == sum(sizes) for tensor, dim in slot.leaves())
            if slot.verdict == ONE_DEVICE or not fits:
                return slots, ONE_DEVICE
        return slots, UNKNOWN if any(slot.verdict == UNKNOWN for slot in slots) else SPLIT

    def _values_in_use(self, modules: Sequence[nn.Module]) -> list[CarriedValue]:
        """The slots that hold something which some code of the modules may read, and which not every replica has."""
        held = [slot for slot in self.values.values() if slot.verdict != WHOLE and slot.leaves()]
        return [slot for slot in held if slot.verdict == SPLIT or self._is_read(slot.name, modules)]

    def _is_read(self, name: str, modules: Sequence[nn.Module]) -> bool:
        if name not in self._read_cache:
            self._read_cache[name] = code_reads_attribute(modules, name)
        return self._read_cache[name]


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a structure, with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    node = flatten_one_level(value)
    if node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from tensors_by_path(child, (*path, key))


def code_reads_attribute(modules: Sequence[nn.Module], name: str) -> bool:
    """Whether some code of the modules', other than torch's own, may read an attribute of this name.

    That is the code of their classes, of functions that they hold, and of functions and classes which these name.
    """
    classes = {cls for module in modules for cls in type(module).__mro__}
    held = [value for module in modules for value in module.__dict__.values()]
    return any(_code_object_reads(code, name) for code in _iter_code_objects([*classes, *held]))


def _is_user_code(thing: Any) -> bool:
    """Whether a class or function is part of a program: not of Python, torch, or this library."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    theirs = root in ("torch", "numpy", "instep", "builtins") or root in sys.stdlib_module_names
    return root == "__main__" or not theirs


def _iter_code_objects(values: Iterable[Any]) -> Iterator[types.CodeType]:
    """The code of functions that can be reached from some values without running anything."""
    pending, seen = list(values), set[int]()
    while pending and len(seen) < _MAX_CODE_OBJECTS:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            pending.append(value.__func__)
        elif isinstance(value, property):
            pending += [value.fget, value.fset]
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args]
        elif type(value) in (list, tuple):
            pending += [item for item in value if callable(item)]
        elif type(value) is dict:
            pending += [item for item in value.values() if callable(item)]
        elif isinstance(value, type):
            pending += vars(value).values() if _is_user_code(value) else ()
        elif isinstance(value, types.FunctionType) and _is_user_code(value):
            yield value.__code__
            pending += [cell.cell_contents for cell in value.__closure__ or () if _is_filled_cell(cell)]
            named = [value.__globals__.get(name) for name in value.__code__.co_names]
            pending += [item for item in named if isinstance(item, (type, types.FunctionType))]


def _is_filled_cell(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not filled yet
        return False


def _code_object_reads(code: types.CodeType, name: str) -> bool:
    if name in code.co_consts:
        return True
    if name in code.co_names:
        loads = ("LOAD_ATTR", "LOAD_METHOD")
        if any(step.opname in loads and step.argval == name for step in dis.get_instructions(code)):
            return True
    return any(_code_object_reads(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))
