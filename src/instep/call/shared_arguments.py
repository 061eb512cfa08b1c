"""Arguments that every replica receives whole, and the check that no replica writes to them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import StructureError
from instep.replicas.mutable_arguments import find_mutable
from instep.replicas.object_graph import is_atomic
from instep.replicas.write_watch import ObjectSnapshot, SavedValues, WriteDetector
from instep.structure.placements import Nested, Placement, Replicate
from instep.structure.plan import SplitPlan
from instep.structure.shapes import is_plain_tensor
from instep.structure.spec import Whole
from instep.structure.tree import Path, flatten_one_level, format_path, tensors_in

_MAX_COPIED_NUMEL = 4096
"""Tensors and arrays with more elements are not copied, so their values are not compared or restored."""
_IMMUTABLE_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, torch.Generator)


def has_shared_arguments(plan: SplitPlan, values: Sequence[Any]) -> bool:
    """Whether replicas share an argument that can be written to."""
    return plan.has_replicated and any(map(_may_be_written, plan.placements, values))


def _is_immutable(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _IMMUTABLE_TYPES)


def _may_be_written(placement: Placement, value: Any) -> bool:
    if isinstance(placement, Replicate):
        return type(value) is Whole or not _is_immutable(value)
    node = flatten_one_level(value) if isinstance(placement, Nested) else None
    if node is None or not isinstance(placement, Nested):
        return False
    return any(_may_be_written(*pair) for pair in zip(placement.placements, node.children, strict=False))


class SharedArguments:
    """Snapshots of the arguments that all replicas of one call receive whole."""

    def __init__(self, plan: SplitPlan, values: Sequence[Any]) -> None:
        self._names, self._placements = plan.names, plan.placements
        leaves = list(self._leaves(values))
        self._values = SavedValues((path, tensor) for path, tensor in _tensors(leaves) if _is_small(tensor))
        self._objects = list(_object_snapshots(leaves))
        self._writes: WriteDetector[Path] = WriteDetector([], [])
        """Detects writes to the tensors that the replicas receive."""

    def _leaves(self, values: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
        for name, placement, value in zip(self._names, self._placements, values, strict=True):
            yield from _replicated_leaves(placement, value, (name,))

    def enter(self, arguments: Sequence[Sequence[Any]]) -> None:
        """Add the objects that the replicas receive, one sequence of arguments for each replica."""
        leaves = [leaf for values in arguments for leaf in self._leaves(values)]
        self._writes = WriteDetector.from_pairs(_tensors(leaves))
        for path, tensor in _tensors(leaves):
            self._values.watch_copy(path, tensor)
        ids = set(self.ids)
        self._objects += [(path, one) for path, one in _object_snapshots(leaves) if id(one.storage) not in ids]

    @property
    def ids(self) -> list[int]:
        """Ids of the containers, and of the `__dict__` of other objects."""
        return [id(snapshot.storage) for _, snapshot in self._objects]

    def check(self) -> None:
        """Restore the arguments and raise `StructureError` if a replica changed one of them."""
        written = self.restore()
        if written is not None:
            raise_argument_changed(written)

    def restore(self) -> Path | None:
        """Restore changed arguments. Returns the path of the first of them."""
        written = [*self._writes.written(), *self._values.changed(cpu_only=True)]
        self._values.restore(written)
        for path, snapshot in self._objects:
            if not snapshot.is_unchanged():
                written.append(path)
                snapshot.restore()
        return written[0] if written else None


def raise_argument_changed(path: Path) -> None:
    """`StructureError` for an argument that all replicas receive and one of them changed."""
    name = path[-1]
    raise StructureError(
        f"forward changes argument {format_path(path)!r}, which every replica receives whole, so that each would "
        f"change it.\n"
        f"Change it outside forward, or change a copy: {name} = copy.copy({name}), or "
        f"{name} = {name} + 1 in place of {name} += 1."
    )


def _replicated_leaves(placement: Placement, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The mutable leaves of a value that every replica receives whole."""
    if isinstance(placement, Replicate):
        leaf = value.value if type(value) is Whole else value
        if not _is_immutable(leaf):
            yield path, leaf
    elif isinstance(placement, Nested):
        node = flatten_one_level(value)
        if node is not None:
            for below, key, child in zip(placement.placements, node.keys, node.children, strict=False):
                yield from _replicated_leaves(below, child, (*path, key))


def _tensors(leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of leaves by path. A leaf with several tensors numbers all but the first."""
    for path, leaf in leaves:
        for number, tensor in enumerate(tensors_in(leaf)):
            yield (path if not number else (*path, number)), tensor


def _object_snapshots(leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, ObjectSnapshot]]:
    """Snapshots of the objects in leaves that can be changed in place. Large arrays are left out."""
    for (path, *keys), value, _ in find_mutable(leaves):
        if not isinstance(value, np.ndarray) or value.size <= _MAX_COPIED_NUMEL:
            snapshot = ObjectSnapshot.of(value)
            if snapshot is not None:
                yield (*path, *keys), snapshot


def _is_small(tensor: Tensor) -> bool:
    return is_plain_tensor(tensor) and tensor.numel() <= _MAX_COPIED_NUMEL
