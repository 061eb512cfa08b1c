"""Arguments that every replica is given whole: nobody is to write to them, for each would write once more.

On one device `forward` may write to an argument, and its caller sees that. Parts of a batch are the caller's own memory
too. But a tensor that broadcasts, or an object, is one thing that all replicas hold: what they would make of it
together is not what one device makes. So it is looked at after a call, and put back where it was changed.
"""

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
from instep.modes import inference
from instep.replicas.contents import Contents, contents_of, holder_of, holds_still, put
from instep.replicas.equal import equal_tensors
from instep.replicas.opaque import is_opaque
from instep.structure.marks import Whole
from instep.structure.plan import SplitPlan
from instep.structure.roles import Inside, Keep, Role
from instep.structure.shapes import is_ordinary
from instep.structure.tree import Path, open_node, show_path, tensors_in

_SMALL = 4096
"""The most numbers of a tensor or array of which a copy is kept for a call."""
_PLAIN = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, torch.Generator)


def is_shared(plan: SplitPlan, values: Sequence[Any]) -> bool:
    """Whether replicas are given anything in common that can be written to; the same for every call of a plan."""
    if not plan.shared:
        plan.shared.append(any(_may_be_written(role, value) for role, value in zip(plan.roles, values, strict=True)))
    return plan.shared[0]


def _is_plain(value: Any) -> bool:
    return is_opaque(value) or isinstance(value, _PLAIN)


def _may_be_written(role: Role, value: Any) -> bool:
    if isinstance(role, Keep):
        return type(value) is Whole or not _is_plain(value)
    node = open_node(value) if isinstance(role, Inside) else None
    if node is None or not isinstance(role, Inside):
        return False
    return any(_may_be_written(below, child) for below, child in zip(role.roles, node.children, strict=False))


class Given:
    """What all replicas of one call are given, as it was."""

    def __init__(self, plan: SplitPlan, values: Sequence[Any]) -> None:
        self._names, self._roles = plan.names, plan.roles
        leaves = list(self._leaves(values))
        self._tensors = [(path, t, _copy(t)) for path, t in _tensors(leaves)]
        self._others = [other for leaf in leaves for other in _others(*leaf)]
        self._inside: list[tuple[Path, Tensor, int]] = []

    def _leaves(self, values: Sequence[Any]) -> Iterator[tuple[Path, Any]]:
        for name, role, value in zip(self._names, self._roles, values, strict=True):
            yield from _kept(role, value, (name,))

    def enter(self, entered: Sequence[Sequence[Any]]) -> None:
        """Look at what is given as each replica sees it."""
        if not self._tensors and not self._others:
            return
        leaves = [leaf for values in entered for leaf in self._leaves(values)]
        self._inside = [(path, t, t._version) for path, t in _tensors(leaves) if not t.is_inference()]
        known = {id(held) for _, held, _, _ in self._others}
        self._others += [other for leaf in leaves for other in _others(*leaf) if id(other[1]) not in known]

    @property
    def ids(self) -> list[int]:
        """The ids of what holds the entries or attributes of what is given."""
        return [id(held) for _, held, _, _ in self._others]

    def holds(self, container: Any) -> bool:
        """Whether a container is one that is given."""
        return any(held is container for _, held, _, _ in self._others)

    def check(self) -> None:
        """`StructureError` if a replica wrote to what all of them hold; it is as it was then."""
        written = self.put_back()
        if written is not None:
            refuse_change(written)

    def put_back(self) -> Path | None:
        """The path of the first argument that was changed; whatever was changed is as it was."""
        written = [path for path, tensor, version in self._inside if tensor._version != version]
        for path, tensor, then in self._tensors:
            seen = [tensor, *(held for where, held, _ in self._inside if where == path)]
            if then is not None and (path in written or any(_differs(one, then) for one in seen)):
                written.append(path)
                with torch.no_grad(), inference(tensor.is_inference()):
                    tensor.data.copy_(then)
        for path, held, contents, lazy in self._others:
            table = held if isinstance(held, dict) else getattr(held, "__dict__", {})
            made = {key: table.pop(key) for key in lazy if key in table and key not in contents.keys}
            if not holds_still(held, contents):
                written.append(path)
                put(held, contents)
            if made:
                table.update(made)
        return written[0] if written else None


def refuse_change(path: Path) -> None:
    """`StructureError` for an argument that several replicas were given, and that one has changed."""
    name = path[-1]
    raise StructureError(
        f"forward changes the argument {show_path(path)!r}, which every replica is given whole: each would change it "
        f"once more.\n"
        f"Change it outside forward, or let forward work on a copy: {name} = copy.copy({name}), or "
        f"{name} = {name} + 1 in place of {name} += 1."
    )


def _kept(role: Role, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """The leaves below a role that every replica is given and that can be written to."""
    if isinstance(role, Keep):
        leaf = value.value if type(value) is Whole else value
        if not _is_plain(leaf):
            yield path, leaf
    elif isinstance(role, Inside):
        node = open_node(value)
        if node is not None:
            for below, key, child in zip(role.roles, node.keys, node.children, strict=False):
                yield from _kept(below, child, (*path, key))


def _tensors(leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of leaves by path; those inside a value with a rule of its own are told apart by their number."""
    for path, leaf in leaves:
        for number, tensor in enumerate(tensors_in(leaf)):
            yield (path if not number else (*path, number)), tensor


def _others(path: Path, leaf: Any) -> Iterator[tuple[Path, Any, Contents, list[str]]]:
    for held in _containers(leaf):
        yield path, held, contents_of(held), _lazy(leaf)


def _containers(leaf: Any) -> Iterator[Any]:
    """What holds the entries or attributes of an object."""
    if isinstance(leaf, Tensor):
        return
    if isinstance(leaf, np.ndarray):
        if leaf.size <= _SMALL:
            yield leaf
    elif isinstance(leaf, (dict, list, set, deque)):
        yield leaf
    elif (holder := holder_of(leaf)) is not None:
        yield holder


def _lazy(leaf: Any) -> list[str]:
    """Attributes that an object computes when they are first read, and keeps: that is no change of it."""
    classes = () if isinstance(leaf, (Tensor, np.ndarray, dict, list, set, deque)) else type(leaf).__mro__
    return [name for cls in classes for name, held in vars(cls).items() if isinstance(held, functools.cached_property)]


def _differs(tensor: Tensor, then: Tensor) -> bool:
    """Whether a tensor was written, as far as that can be told without waiting for an accelerator."""
    return tensor.device == then.device and then.device.type == "cpu" and not equal_tensors(tensor, then)


def _copy(tensor: Tensor) -> Tensor | None:
    small = is_ordinary(tensor) and tensor.numel() <= _SMALL
    return tensor.detach().clone() if small else None
