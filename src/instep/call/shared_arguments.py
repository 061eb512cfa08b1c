"""Arguments that every replica receives whole, and the check that none was written to."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

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
"""The most numbers of a tensor or array of which a copy is kept for a call."""
_IMMUTABLE_TYPES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, torch.Generator)


def has_shared_arguments(plan: SplitPlan, values: Sequence[Any]) -> bool:
    """Whether replicas are given anything in common that can be written to; the same for every call of a plan."""
    if not plan.shares_mutable_arguments:
        plan.shares_mutable_arguments.append(
            any(_may_be_written(role, value) for role, value in zip(plan.placements, values, strict=True))
        )
    return plan.shares_mutable_arguments[0]


def _is_immutable(value: Any) -> bool:
    return is_atomic(value) or isinstance(value, _IMMUTABLE_TYPES)


def _may_be_written(role: Placement, value: Any) -> bool:
    if isinstance(role, Replicate):
        return type(value) is Whole or not _is_immutable(value)
    node = flatten_one_level(value) if isinstance(role, Nested) else None
    if node is None or not isinstance(role, Nested):
        return False
    return any(_may_be_written(below, child) for below, child in zip(role.placements, node.children, strict=False))


class SharedArguments:
    """What all replicas of one call are given, as it was."""

    def __init__(self, plan: SplitPlan, values: Sequence[Any]) -> None:
        self._names, self._roles = plan.names, plan.placements
        leaves = list(self._leaves(values))
        self._tensors = [(path, t, _copy_if_small(t)) for path, t in _tensors(leaves)]
        self._containers = [other for leaf in leaves for other in _container_snapshots(*leaf)]
        self._entered: list[tuple[Path, Tensor, int]] = []

    def _leaves(self, values: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
        for name, role, value in zip(self._names, self._roles, values, strict=True):
            yield from _replicated_leaves(role, value, (name,))

    def enter(self, entered: Sequence[Sequence[Any]]) -> None:
        """Look at what is given as each replica sees it."""
        if not self._tensors and not self._containers:
            return
        leaves = [leaf for values in entered for leaf in self._leaves(values)]
        self._entered = [(path, t, t._version) for path, t in _tensors(leaves) if not t.is_inference()]
        known = {id(held) for _, held, _, _ in self._containers}
        self._containers += [
            other for leaf in leaves for other in _container_snapshots(*leaf) if id(other[1]) not in known
        ]

    @property
    def ids(self) -> list[int]:
        """The ids of what holds the entries or attributes of what is given."""
        return [id(held) for _, held, _, _ in self._containers]

    def check(self) -> None:
        """`StructureError` if a replica wrote to what all of them hold; it is as it was then."""
        written = self.restore()
        if written is not None:
            raise_argument_changed(written)

    def restore(self) -> Path | None:
        """The path of the first argument that was changed; whatever was changed is as it was."""
        written = [path for path, tensor, version in self._entered if tensor._version != version]
        for path, tensor, then in self._tensors:
            seen = [tensor, *(held for where, held, _ in self._entered if where == path)]
            if then is not None and (path in written or any(_differs(one, then) for one in seen)):
                written.append(path)
                with torch.no_grad(), set_inference_mode(tensor.is_inference()):
                    tensor.data.copy_(then)
        for path, held, contents, lazy in self._containers:
            table = held if isinstance(held, dict) else getattr(held, "__dict__", {})
            made = {key: table.pop(key) for key in lazy if key in table and key not in contents.keys}
            if not is_unchanged(held, contents):
                written.append(path)
                write_contents(held, contents)
            if made:
                table.update(made)
        return written[0] if written else None


def raise_argument_changed(path: Path) -> None:
    """`StructureError` for an argument that several replicas were given, and that one has changed."""
    name = path[-1]
    raise StructureError(
        f"forward changes argument {format_path(path)!r}, which every replica is given whole: each would change it "
        f"once more.\n"
        f"Change it outside forward, or let forward work on a copy: {name} = copy.copy({name}), or "
        f"{name} = {name} + 1 in place of {name} += 1."
    )


def _replicated_leaves(role: Placement, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The leaves below a role that every replica is given and that can be written to."""
    if isinstance(role, Replicate):
        leaf = value.value if type(value) is Whole else value
        if not _is_immutable(leaf):
            yield path, leaf
    elif isinstance(role, Nested):
        node = flatten_one_level(value)
        if node is not None:
            for below, key, child in zip(role.placements, node.keys, node.children, strict=False):
                yield from _replicated_leaves(below, child, (*path, key))


def _tensors(leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of leaves by path; those inside a value with a rule of its own are told apart by their number."""
    for path, leaf in leaves:
        for number, tensor in enumerate(tensors_in(leaf)):
            yield (path if not number else (*path, number)), tensor


def _container_snapshots(path: Path, leaf: Any) -> Iterator[tuple[Path, Any, Contents, list[str]]]:
    for held in _containers(leaf):
        yield path, held, read_contents(held), _cached_property_names(leaf)


def _containers(leaf: Any) -> Iterator[Any]:
    """What holds the entries or attributes of an object."""
    if isinstance(leaf, Tensor):
        return
    if isinstance(leaf, np.ndarray):
        if leaf.size <= _MAX_COPIED_NUMEL:
            yield leaf
    elif isinstance(leaf, (dict, list, set, deque)):
        yield leaf
    elif (holder := attribute_storage(leaf)) is not None:
        yield holder


def _cached_property_names(leaf: Any) -> list[str]:
    """Attributes that an object computes when they are first read, and keeps: that is no change of it."""
    classes = () if isinstance(leaf, (Tensor, np.ndarray, dict, list, set, deque)) else type(leaf).__mro__
    return [name for cls in classes for name, held in vars(cls).items() if isinstance(held, functools.cached_property)]


def _differs(tensor: Tensor, then: Tensor) -> bool:
    """Whether a tensor was written, as far as that can be told without waiting for an accelerator."""
    return tensor.device == then.device and then.device.type == "cpu" and not tensors_equal(tensor, then)


def _copy_if_small(tensor: Tensor) -> Tensor | None:
    small = is_plain_tensor(tensor) and tensor.numel() <= _MAX_COPIED_NUMEL
    return tensor.detach().clone() if small else None
