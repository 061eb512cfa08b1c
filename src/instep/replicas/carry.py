"""State that follows the batch and is carried from one call to the next: the hidden state of a recurrent network.

A tensor that `forward` left on the module, one row a sample, is read by the next call sample by sample, or as a whole
(a memory of earlier samples). Only the program knows which. So the first call that may read one is computed three
times: the module itself gives the result, and the replicas, each with its samples' part, then each with the whole, are
compared with it. What came to the same is done from then on. `state={"h": "cat"}` says at once that it is cut.
"""

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

from instep.replicas.names import module_names
from instep.replicas.watch import MISSING
from instep.structure.tree import Path, open_node

CUT, WHOLE, ALONE, UNSURE = "cut", "whole", "alone", "unsure"
_MOST_TRIES = 8
_MOST_CODES = 20_000


@dataclass
class Slot:
    """An attribute, a buffer or an entry of a dictionary that followed the batch when it was set, and the dims in which
    its tensors did."""

    module: nn.Module | None
    """None for an entry of a dictionary, which is never cut: replicas have the whole, or the module itself runs."""
    name: str
    path: str
    dims: dict[Path, int]
    verdict: str = UNSURE
    table: dict[Any, Any] | None = None
    key: Any = None
    tries: int = 0
    """How many comparisons there were."""
    kinds: dict[int, str] = field(default_factory=dict)
    """What comparisons showed, by the kind that the module was of: in another mode it may be read in another way."""
    unread: int | None = None
    """The kind that the module was of when a comparison showed that nothing reads it, which says nothing of others."""

    @property
    def holder(self) -> dict[str, Any]:
        """The dictionary that it is in."""
        if self.module is None:
            return {}
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else self.module.__dict__

    @property
    def value(self) -> Any:
        if self.table is not None:
            return self.table.get(self.key, MISSING)
        return self.holder.get(self.name, MISSING)

    def leaves(self) -> list[tuple[Tensor, int]]:
        """Its tensors that follow the batch, each with the dim."""
        return [(tensor, self.dims[path]) for path, tensor in tensors_by_path(self.value) if path in self.dims]

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """One part for each replica, in memory of its own."""

        def part(value: Any, path: Path, start: int, size: int) -> Any:
            if isinstance(value, Tensor):
                return value.narrow(self.dims[path], start, size).clone() if path in self.dims else value
            node = open_node(value)
            if node is None:
                return value
            inside = zip(node.keys, node.children, strict=True)
            return node.close([part(child, (*path, key), start, size) for key, child in inside])

        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [part(self.value, (), start, size) for start, size in zip(starts, sizes, strict=True)]


@dataclass
class Carry:
    """Every slot that is known of one source module."""

    rules: Mapping[str, Any] = field(default_factory=dict)
    slots: dict[tuple[int, str], Slot] = field(default_factory=dict)
    _read: dict[str, bool] = field(default_factory=dict)

    def note(self, module: nn.Module, name: str, path: str, dims: Mapping[Path, tuple[int, int]]) -> None:
        """An attribute was merged from tensors that follow the batch in these dims."""
        known = self.slots.get((id(module), name))
        verdict = known.verdict if known is not None else CUT if self._is_declared(path) else UNSURE
        made = Slot(module, name, path, {p: dim for p, (_, dim) in dims.items()}, verdict)
        if known is not None:
            made.tries, made.unread, made.kinds = known.tries, known.unread, known.kinds
        self.slots[id(module), name] = made

    def note_entry(
        self, table: dict[Any, Any], key: Any, attribute: str, path: str, dims: Mapping[Path, tuple[int, int]]
    ) -> None:
        """An entry of a dictionary on the module was merged from tensors that follow the batch in these dims."""
        known = self.slots.get((id(table), str(key)))
        if known is None and not self._is_declared(path):
            found = {p: dim for p, (_, dim) in dims.items()}
            self.slots[id(table), str(key)] = Slot(None, attribute, path, found, table=table, key=key)

    def _is_declared(self, path: str) -> bool:
        return any(rule == "cat" and fnmatchcase(path, pattern) for pattern, rule in self.rules.items())

    def _declare(self, source: nn.Module, modules: Sequence[nn.Module], total: int) -> None:
        """Take tensors that a rule says are joined as carried, also before any call has set them."""
        for module, prefix in zip(modules, module_names(source, modules), strict=True):
            for name, value in (*module.__dict__.items(), *module._buffers.items()):
                path = f"{prefix}.{name}" if prefix else name
                if (id(module), name) in self.slots or not self._is_declared(path):
                    continue
                found = {p: t.shape.index(total) for p, t in tensors_by_path(value) if list(t.shape).count(total) == 1}
                if found:
                    self.slots[id(module), name] = Slot(module, name, path, found, CUT)

    def found(
        self,
        source: nn.Module,
        modules: Sequence[nn.Module],
        sizes: Sequence[int],
        containers: Collection[int],
        kind: int,
        rehearsal: list[Slot] | None,
    ) -> tuple[list[Slot], str]:
        """The slots that matter in a call with shards of these sizes, and whether they can be cut for it.

        `containers` are the ids of those that the modules hold, `kind` is what the source is of now. In a rehearsal the
        given slots are cut, whatever is known about them.
        """
        if rehearsal is not None:
            return rehearsal, CUT
        if "cat" in self.rules.values():
            self._declare(source, modules, sum(sizes))
        gone = [key for key, slot in self.slots.items() if slot.table is not None and id(slot.table) not in containers]
        for key in gone:
            del self.slots[key]
        for slot in self.slots.values():
            if kind in slot.kinds:
                slot.verdict = slot.kinds[kind]
            elif slot.verdict in (CUT, WHOLE) and slot.kinds and slot.tries < _MOST_TRIES:
                slot.verdict = UNSURE
            if slot.verdict == WHOLE and slot.unread not in (None, kind) and slot.tries < _MOST_TRIES:
                slot.verdict = UNSURE
        slots = self._in_use(modules) if self.slots else []
        for slot in slots:
            fits = slot.module is None or all(tensor.shape[dim] == sum(sizes) for tensor, dim in slot.leaves())
            if slot.verdict == ALONE or not fits:
                return slots, ALONE
        return slots, UNSURE if any(slot.verdict == UNSURE for slot in slots) else CUT

    def _in_use(self, modules: Sequence[nn.Module]) -> list[Slot]:
        """The slots that hold something which some code of the modules may read, and which not every replica has."""
        held = [slot for slot in self.slots.values() if slot.verdict != WHOLE and slot.leaves()]
        return [slot for slot in held if slot.verdict == CUT or self._is_read(slot.name, modules)]

    def _is_read(self, name: str, modules: Sequence[nn.Module]) -> bool:
        if name not in self._read:
            self._read[name] = code_reads(modules, name)
        return self._read[name]


def tensors_by_path(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor of a structure, with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
        return
    node = open_node(value)
    if node is not None:
        for key, child in zip(node.keys, node.children, strict=True):
            yield from tensors_by_path(child, (*path, key))


def code_reads(modules: Sequence[nn.Module], name: str) -> bool:
    """Whether some code of the modules', other than torch's own, may read an attribute of this name.

    That is the code of their classes, of functions that they hold, and of functions and classes which these name.
    """
    classes = {cls for module in modules for cls in type(module).__mro__}
    held = [value for module in modules for value in module.__dict__.values()]
    return any(_code_reads(code, name) for code in _codes([*classes, *held]))


def _is_ours(thing: Any) -> bool:
    """Whether a class or function is part of a program: not of Python, torch, or this library."""
    root = (getattr(thing, "__module__", None) or "").partition(".")[0]
    theirs = root in ("torch", "numpy", "instep", "builtins") or root in sys.stdlib_module_names
    return root == "__main__" or not theirs


def _codes(values: Iterable[Any]) -> Iterator[types.CodeType]:
    """The code of functions that can be reached from some values without running anything."""
    pending, seen = list(values), set[int]()
    while pending and len(seen) < _MOST_CODES:
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
            pending += vars(value).values() if _is_ours(value) else ()
        elif isinstance(value, types.FunctionType) and _is_ours(value):
            yield value.__code__
            pending += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            named = [value.__globals__.get(name) for name in value.__code__.co_names]
            pending += [item for item in named if isinstance(item, (type, types.FunctionType))]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not filled yet
        return False


def _code_reads(code: types.CodeType, name: str) -> bool:
    if name in code.co_consts:
        return True
    if name in code.co_names:
        loads = ("LOAD_ATTR", "LOAD_METHOD")
        if any(step.opname in loads and step.argval == name for step in dis.get_instructions(code)):
            return True
    return any(_code_reads(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))
