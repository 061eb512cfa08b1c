"""Which sizes the arguments propose for the batch, and whether one of them fits them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from instep.structure.dims import Declared
from instep.structure.marks import Shards, Whole
from instep.structure.messages import two_readings, unusable
from instep.structure.roles import Column, Custom, Cut, Inside, Keep, Ready, Role, is_batched
from instep.structure.torch_kinds import tensor_kind
from instep.structure.tree import SCALARS, Node, Path, open_node
from instep.structure.types import Kind, kind_of

Memory = dict[Path, str]
"""How the list or tuple at a path was read when it was first met: "column", "inside" or "whole"."""


class Proposal(NamedTuple):
    """A size that one place of the call would have for the batch; a lower rank is stronger evidence."""

    rank: int
    size: int
    path: Path
    what: str


class Misfit(Exception):
    """A place that a size does not fit."""

    def __init__(self, path: Path, value: Any, why: str) -> None:
        super().__init__(why)
        self.path, self.value, self.why = path, value, why


@dataclass
class Fit:
    """The roles under which one size fits every argument, and how each list was read."""

    roles: tuple[Role, ...] = ()
    leaves: list[tuple[Path, Role]] = field(default_factory=list)
    readings: Memory = field(default_factory=dict)


def propose(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[Declared], memory: Memory
) -> list[Proposal]:
    """Every size that some argument proposes."""
    found: list[Proposal] = []
    for name, value, spec in zip(names, values, declared):
        found.extend(_proposals(value, (name,), spec, memory))
    return found


def _proposals(value: Any, path: Path, spec: Declared, memory: Memory) -> Iterator[Proposal]:
    if spec.spec is None or isinstance(value, (Whole, Shards)):
        return
    measured = _measure(value, spec)
    if measured is not None:
        size, shape = measured
        if not (spec.auto and shape == (1,)):  # one lone number broadcasts: a temperature, a scale
            yield Proposal(0, size, path, f"size {size} along dim {spec.batch_dim}")
        return
    kind = kind_of(type(value))
    if kind is not None:
        count = kind.size(value)
        if count is not None:
            yield Proposal(0, count, path, f"{type(value).__name__} of {count} samples")
        return
    node = open_node(value)
    if node is None:
        return
    reading = memory.get(path)
    below = [
        proposal
        for key, child in zip(node.keys, node.children)
        for proposal in _proposals(child, (*path, key), spec.below(key, (*path, key)), memory)
    ]
    if isinstance(value, (list, tuple)) and reading != "inside" and not spec.is_dim:
        yield from _sequence_proposals(value, path, spec, reading)
        if reading in ("column", "whole") or spec.samples:
            return
        if not _holds_tensors(node):
            below = [Proposal(2, *proposal[1:]) for proposal in below]
    yield from below


def _sequence_proposals(value: Any, path: Path, spec: Declared, reading: str | None) -> Iterator[Proposal]:
    what = f"{type(value).__name__} of {len(value)}"
    if spec.samples:
        yield Proposal(0, len(value), path, what)
    elif reading == "whole" or not value:
        return
    elif isinstance(value, list):
        holds = any(holds_tensors(item) for item in value)
        yield Proposal(0 if holds else 1, len(value), path, what)
    elif _is_record_of_samples(value):
        yield Proposal(2, len(value), path, what)


def _measure(value: Any, spec: Declared) -> tuple[int, tuple[int, ...]] | None:
    """Size along the batch dim and shape, for a dense tensor or array that has that dim."""
    if isinstance(value, Tensor):
        kind = tensor_kind(value)
        if kind is not None:
            count = kind.size(value)
            return None if count is None else (count, (count, -1))
    elif not isinstance(value, np.ndarray):
        return None
    dim, shape = spec.batch_dim, tuple(value.shape)
    return (shape[dim], shape) if -len(shape) <= dim < len(shape) else None


def fit(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[Declared], batch: int | None, memory: Memory
) -> Fit:
    """Roles for every argument under a batch of this size (None: nothing is batched); `Misfit` if there are none."""
    result = Fit()
    fitting = _Fitting(batch, memory, result)
    result.roles = tuple(
        fitting.role(value, (name,), spec) for name, value, spec in zip(names, values, declared)
    )
    return result


@dataclass
class _Fitting:
    batch: int | None
    memory: Memory
    result: Fit

    def role(self, value: Any, path: Path, spec: Declared) -> Role:
        role = self._role(value, path, spec)
        if not isinstance(role, Inside):
            self.result.leaves.append((path, role))
        return role

    def _role(self, value: Any, path: Path, spec: Declared) -> Role:
        if isinstance(value, Whole):
            return Keep("marked whole")
        if isinstance(value, Shards):
            return Ready(tuple(_part_size(part, spec.dim) for part in value.parts))
        if spec.spec is None:
            return Keep("in_dims is None")
        if isinstance(value, (Tensor, np.ndarray)):
            return self._dense(value, path, spec)
        kind = kind_of(type(value))
        if kind is not None:
            return self._custom(value, path, kind)
        node = open_node(value)
        if node is not None:
            return self._container(value, node, path, spec)
        if isinstance(value, SCALARS) or callable(value) and not isinstance(value, nn.Module):
            return Keep(type(value).__name__)
        if isinstance(value, (nn.Module, Iterator)) or holds_tensors(value):
            raise unusable(value, path)
        return Keep("an object without tensors")

    def _dense(self, value: Tensor | np.ndarray, path: Path, spec: Declared) -> Role:
        kind = tensor_kind(value) if isinstance(value, Tensor) else None
        if kind is not None:
            return self._custom(value, path, kind)
        measured = _measure(value, spec)
        if measured is None:
            if value.ndim == 0 and spec.auto:
                return Keep("0-d")
            raise Misfit(path, value, f"it has no dim {spec.batch_dim}")
        size, shape = measured
        if size == self.batch:
            return Cut(spec.batch_dim % len(shape))
        if spec.auto and size == 1:
            return Keep("size 1 broadcasts")
        raise Misfit(path, value, f"its size along dim {spec.batch_dim} is {size}")

    def _custom(self, value: Any, path: Path, kind: Kind) -> Role:
        count = kind.size(value)
        if count is None:
            return Keep("not a batch")
        if count == self.batch:
            return Custom(kind)
        raise Misfit(path, value, f"it holds {count} samples")

    def _container(self, value: Any, node: Node, path: Path, spec: Declared) -> Role:
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return self._sequence(value, node, path, spec)
        return self._inside(node, path, spec)

    def _inside(self, node: Node, path: Path, spec: Declared) -> Inside:
        roles = [
            self.role(child, (*path, key), spec.below(key, (*path, key)))
            for key, child in zip(node.keys, node.children)
        ]
        return Inside(tuple(node.keys), tuple(roles))

    def _sequence(self, value: Any, node: Node, path: Path, spec: Declared) -> Role:
        """A list has two readings, one entry a sample or a structure of batched leaves; a tuple mostly the second."""
        reading = self.memory.get(path)
        declared = not spec.auto
        if spec.samples or (reading == "column" and not declared):
            if len(value) != self.batch:
                raise Misfit(path, value, f"it has {len(value)} entries" + ("" if declared else ", and was first read as one entry a sample"))
            return self._read(path, "column", Column())
        if reading == "whole" and not declared:
            return self._read(path, "whole", Keep("read as whole when it was first met"))
        column = len(value) == self.batch and (isinstance(value, list) or _is_record_of_samples(value))
        if declared or reading == "inside" or (isinstance(value, tuple) and not column):
            return self._read(path, "inside", self._inside(node, path, spec))
        inside, why = self._try_inside(node, path, spec)
        batched = inside is not None and is_batched(inside)
        if column and batched:
            raise two_readings(value, path)
        if column:
            return self._read(path, "column", Column())
        if inside is None:
            assert why is not None
            raise why
        if batched or any(holds_tensors(child) for child in node.children):
            return self._read(path, "inside", inside)
        return self._read(path, "whole", Keep(f"a {type(value).__name__} of {len(value)}, no tensors"))

    def _try_inside(self, node: Node, path: Path, spec: Declared) -> tuple[Inside | None, Misfit | None]:
        before = len(self.result.leaves), dict(self.result.readings)
        try:
            return self._inside(node, path, spec), None
        except Misfit as misfit:
            del self.result.leaves[before[0] :]
            self.result.readings = before[1]
            return None, misfit

    def _read(self, path: Path, reading: str, role: Role) -> Role:
        self.result.readings[path] = reading
        return role


def _is_record_of_samples(value: Sequence[Any]) -> bool:
    """A tuple of strings or objects, such as a collate function leaves; a tuple with numbers or tensors is a structure."""
    return not any(isinstance(item, (int, float, complex, type(None))) or holds_tensors(item) for item in value)


def _part_size(part: Any, dim: int) -> int:
    """How many samples one ready-made shard holds, by its first leaf that can be measured."""
    if isinstance(part, (Tensor, np.ndarray)) and part.ndim > dim:
        return int(part.shape[dim])
    kind = kind_of(type(part))
    if kind is not None:
        return kind.size(part) or 0
    if isinstance(part, list):
        return len(part)
    node = open_node(part)
    for child in node.children if node is not None else ():
        size = _part_size(child, dim)
        if size:
            return size
    return 0


def _holds_tensors(node: Node) -> bool:
    return any(holds_tensors(child) for child in node.children)


def holds_tensors(value: Any, _seen: set[int] | None = None, depth: int = 8) -> bool:
    """Whether a tensor can be reached from a value through containers and attributes."""
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    if isinstance(value, (*SCALARS, type, Callable)) or depth == 0:  # type: ignore[arg-type]
        return isinstance(value, nn.Module)
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    if kind_of(type(value)) is not None:
        return True
    node = open_node(value)
    children: Sequence[Any]
    if node is not None:
        children = node.children
    else:
        children = [*getattr(value, "__dict__", {}).values()]
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            children += [getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)]
    return any(holds_tensors(child, seen, depth - 1) for child in children)
