"""Arguments that every replica receives whole, and the check that no replica writes to them."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.errors import StructureError
from instep.replicas.object_graph import (
    Contents,
    attribute_storage,
    is_atomic,
    is_unchanged,
    read_contents,
    tensors_equal,
    write_contents,
)
from instep.runtime.modes import set_inference_mode
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
    return any(_may_be_written(placement, value) for placement, value in zip(plan.placements, values, strict=True))


def _is_immutable(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _IMMUTABLE_TYPES)


def _may_be_written(placement: Placement, value: Any) -> bool:
    if isinstance(placement, Replicate):
        return type(value) is Whole or not _is_immutable(value)
    node = flatten_one_level(value) if isinstance(placement, Nested) else None
    if node is None or not isinstance(placement, Nested):
        return False
    return any(_may_be_written(*pair) for pair in zip(placement.placements, node.children, strict=False))


class _ContainerSnapshot(NamedTuple):
    """The contents of one mutable object among the arguments before the call."""

    path: Path
    container: Any
    """A list, dictionary, set, deque or array, or the `__dict__` of an object."""
    contents: Contents
    cached_properties: list[str]
    """Names of `functools.cached_property` attributes, which may appear during the call."""


class SharedArguments:
    """Snapshots of the arguments that all replicas of one call receive whole."""

    def __init__(self, plan: SplitPlan, values: Sequence[Any]) -> None:
        self._names, self._placements = plan.names, plan.placements
        leaves = list(self._leaves(values))
        self._tensors = [(path, tensor, _copy_if_small(tensor)) for path, tensor in _tensors(leaves)]
        """Path, tensor and copy; None for a tensor that is not copied."""
        self._containers = [snapshot for leaf in leaves for snapshot in _container_snapshots(*leaf)]
        self._replica_tensors: list[tuple[Path, Tensor, int]] = []
        """Path, tensor and version counter, for the tensors that the replicas receive."""

    def _leaves(self, values: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
        for name, placement, value in zip(self._names, self._placements, values, strict=True):
            yield from _replicated_leaves(placement, value, (name,))

    def enter(self, arguments: Sequence[Sequence[Any]]) -> None:
        """Add the objects that the replicas receive, one sequence of arguments for each replica."""
        if not self._tensors and not self._containers:
            return
        leaves = [leaf for values in arguments for leaf in self._leaves(values)]
        self._replica_tensors = [(path, t, t._version) for path, t in _tensors(leaves) if not t.is_inference()]
        ids = set(self.ids)
        self._containers += [
            snapshot for leaf in leaves for snapshot in _container_snapshots(*leaf) if id(snapshot.container) not in ids
        ]

    @property
    def ids(self) -> list[int]:
        """Ids of the containers."""
        return [id(snapshot.container) for snapshot in self._containers]

    def check(self) -> None:
        """Restore the arguments and raise `StructureError` if a replica changed one of them."""
        written = self.restore()
        if written is not None:
            raise_argument_changed(written)

    def restore(self) -> Path | None:
        """Restore changed arguments. Returns the path of the first of them."""
        written = [*self._restore_tensors(), *self._restore_containers()]
        return written[0] if written else None

    def _restore_tensors(self) -> list[Path]:
        written = [path for path, tensor, version in self._replica_tensors if tensor._version != version]
        for path, tensor, copy in self._tensors:
            tensors = [tensor, *(other for other_path, other, _ in self._replica_tensors if other_path == path)]
            if copy is not None and (path in written or any(_differs(other, copy) for other in tensors)):
                written.append(path)
                with torch.no_grad(), set_inference_mode(tensor.is_inference()):
                    tensor.data.copy_(copy)
        return written

    def _restore_containers(self) -> list[Path]:
        written = []
        for path, container, contents, cached_properties in self._containers:
            table = container if isinstance(container, dict) else getattr(container, "__dict__", {})
            computed = {key: table.pop(key) for key in cached_properties if key in table and key not in contents.keys}
            if not is_unchanged(container, contents):
                written.append(path)
                write_contents(container, contents)
            if computed:
                table.update(computed)
        return written


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


def _container_snapshots(path: Path, leaf: Any) -> Iterator[_ContainerSnapshot]:
    for container in _containers(leaf):
        yield _ContainerSnapshot(path, container, read_contents(container), _cached_property_names(leaf))


def _containers(leaf: Any) -> Iterator[Any]:
    """The leaf itself if it is a container or a small array, else the storage of its attributes."""
    if isinstance(leaf, Tensor):
        return
    if isinstance(leaf, np.ndarray):
        if leaf.size <= _MAX_COPIED_NUMEL:
            yield leaf
    elif isinstance(leaf, (dict, list, set, deque)):
        yield leaf
    elif (storage := attribute_storage(leaf)) is not None:
        yield storage


def _cached_property_names(leaf: Any) -> list[str]:
    """Attributes that an object computes and stores when they are first read, which is no change."""
    classes = () if isinstance(leaf, (Tensor, np.ndarray, dict, list, set, deque)) else type(leaf).__mro__
    return [
        name for cls in classes for name, value in vars(cls).items() if isinstance(value, functools.cached_property)
    ]


def _differs(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a CPU tensor was written. Tensors on accelerators are not compared, to avoid a synchronization."""
    return tensor.device == copy.device and copy.device.type == "cpu" and not tensors_equal(tensor, copy)


def _copy_if_small(tensor: Tensor) -> Tensor | None:
    small = is_plain_tensor(tensor) and tensor.numel() <= _MAX_COPIED_NUMEL
    return tensor.detach().clone() if small else None
