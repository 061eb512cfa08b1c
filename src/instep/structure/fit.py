"""Which sizes the arguments propose for the batch, and whether one of them fits them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from instep.errors import StructureError
from instep.structure.dims import SAMPLES, Declared
from instep.structure.marks import Shards, Whole
from instep.structure.messages import cannot_cut, structured_dims, two_readings, unusable
from instep.structure.roles import Column, Custom, Cut, Inside, Keep, Ready, Role, is_batched
from instep.structure.torch_kinds import tensor_kind
from instep.structure.tree import SCALARS, Node, Path, attributes_of, is_sequence, open_node
from instep.structure.types import Kind, kind_of

Memory = dict[Path, str]
"""How the list or tuple at a path was read when it was first met: "column", "inside" or "whole"."""


NUMBERS = (int, float, complex, np.generic)


class Proposal(NamedTuple):
    """A size that one place of the call would have for the batch; a lower rank is stronger evidence."""

    rank: int
    size: int
    path: Path
    what: str
    spec: Any
    """What to declare for this place if it is right."""
    declared: bool
    """Whether that was declared already."""


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
    doubts: list[StructureError] = field(default_factory=list)
    """Lists that fit under both readings; an error unless another size fits without doubt."""


def own_kind(value: Any) -> Kind | None:
    """The rule of a value's type, where it has one; an ordinary tensor has none."""
    cls = type(value)
    kind = None if cls is Tensor else kind_of(cls)
    return tensor_kind(value) if kind is None and isinstance(value, Tensor) else kind


def is_one_sample(value: Any) -> bool:
    """Whether a value is one sample by its type, whatever it holds."""
    kind = own_kind(value)
    return kind is not None and kind.one_sample


def measured(kind: Kind, value: Any, path: Path) -> int | None:
    """How many samples a value with a rule of its own holds; its rule does not know where it stands."""
    try:
        return kind.size(value)
    except StructureError as error:
        raise cannot_cut(path, value, str(error)) from error


def propose(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[Declared], memory: Memory
) -> list[Proposal]:
    """Every size that some argument proposes."""
    found: list[Proposal] = []
    for name, value, spec in zip(names, values, declared, strict=True):
        found.extend(_proposals(value, (name,), spec, memory))
    return found


def _proposals(value: Any, path: Path, spec: Declared, memory: Memory) -> Iterator[Proposal]:
    if spec.spec is None or isinstance(value, (Whole, Shards)):
        return
    kind = own_kind(value)
    if kind is not None:
        count = measured(kind, value, path)
        if count is not None:
            yield Proposal(0, count, path, f"{type(value).__name__} of {count} samples", spec.spec, not spec.auto)
        return
    if isinstance(value, (Tensor, np.ndarray)):
        size = size_along(value, spec.batch_dim)
        lone = spec.auto and tuple(value.shape) == (1,)  # one lone number broadcasts: a temperature, a scale
        if size is not None and not lone:
            yield Proposal(0, size, path, f"size {size} along dim {spec.batch_dim}", spec.batch_dim, not spec.auto)
        return
    node = open_node(value)
    if node is None:
        return
    if is_sequence(value):
        yield from _sequence_proposals(value, node, path, spec, memory)
        return
    for key, child, below in zip(node.keys, node.children, spec.children(node.keys, path), strict=True):
        yield from _proposals(child, (*path, key), below, memory)


def _sequence_proposals(value: Any, node: Node, path: Path, spec: Declared, memory: Memory) -> Iterator[Proposal]:
    declared = spec.children(node.keys, path)
    entries = f"{type(value).__name__} of {len(value)}"
    if spec.samples:
        yield Proposal(0, len(value), path, entries, SAMPLES, not spec.auto)
        return
    holds = any(holds_tensors(child) for child in node.children)
    auto = _is_auto(spec, declared)
    reading = memory.get(path) if auto else None
    if reading == "whole" and not holds:
        return
    if value and reading != "inside" and (auto or (spec.is_dim and not holds)):
        if isinstance(value, list):
            yield Proposal(0 if holds else 1, len(value), path, entries, SAMPLES, not spec.auto)
        elif is_record_of_samples(value):
            yield Proposal(2, len(value), path, entries, SAMPLES, not spec.auto)
    if reading == "column":
        return
    for key, child, below in zip(node.keys, node.children, declared, strict=True):
        for proposal in _proposals(child, (*path, key), below, memory):
            yield proposal if holds else proposal._replace(rank=2)


def _is_auto(spec: Declared, below: Sequence[Declared]) -> bool:
    """Whether nothing is declared for a list nor for any of its entries."""
    return spec.auto and all(child.auto for child in below)


def size_along(value: Any, dim: int) -> int | None:
    """The size of a tensor or array along a dim, or None if it has no such dim."""
    rank = value.ndim
    return int(value.shape[dim]) if -rank <= dim < rank else None


def fit(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[Declared], batch: int | None, memory: Memory
) -> Fit:
    """Roles for every argument under a batch of this size (None: nothing is batched); `Misfit` if there are none."""
    fitting = _Fitting(batch, memory, Fit())
    triples = zip(names, values, declared, strict=True)
    fitting.result.roles = tuple([fitting.role(value, (name,), spec) for name, value, spec in triples])
    return fitting.result


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
            return Ready(tuple([samples_in(part, spec.dim) for part in value.parts]))
        if spec.spec is None:
            return Keep("in_dims is None")
        kind = own_kind(value)
        if kind is not None:
            return self._custom(value, path, kind)
        node = open_node(value)
        if node is not None:
            return self._sequence(value, node, path, spec) if is_sequence(value) else self._inside(node, path, spec)
        if not spec.is_plain:
            raise structured_dims(value, path, spec.spec)
        if isinstance(value, (Tensor, np.ndarray)):
            return self._dense(value, path, spec)
        if isinstance(value, SCALARS) or (callable(value) and not isinstance(value, nn.Module)):
            return Keep(type(value).__name__)
        if isinstance(value, (nn.Module, Iterator)) or holds_tensors(value):
            raise unusable(value, path)
        return Keep("an object without tensors")

    def _dense(self, value: Tensor | np.ndarray[Any, Any], path: Path, spec: Declared) -> Role:
        size = size_along(value, spec.batch_dim)
        if size is None:
            if value.ndim == 0 and (spec.auto or spec.inherited):
                return Keep("0-d")
            raise Misfit(path, value, f"it has no dim {spec.batch_dim}")
        if size == self.batch:
            return Cut(spec.batch_dim % value.ndim)
        if spec.auto and size == 1:
            return Keep("size 1 broadcasts")
        raise Misfit(path, value, f"its size along dim {spec.batch_dim} is {size}")

    def _custom(self, value: Any, path: Path, kind: Kind) -> Role:
        count = measured(kind, value, path)
        if count is None:
            return Keep("not a batch")
        if count == self.batch:
            return Custom(kind)
        raise Misfit(path, value, f"it holds {count} samples")

    def _inside(self, node: Node, path: Path, spec: Declared) -> Inside:
        declared = spec.children(node.keys, path)
        triples = zip(node.keys, node.children, declared, strict=True)
        return Inside(tuple(node.keys), tuple([self.role(child, (*path, key), below) for key, child, below in triples]))

    def _sequence(self, value: Any, node: Node, path: Path, spec: Declared) -> Role:
        """A list has two readings, one entry a sample or a structure of batched leaves; a tuple mostly the second."""
        if not value and not spec.samples:  # nothing can be learned from it
            return Keep(f"an empty {type(value).__name__}")
        if spec.samples:
            return self._read(path, "column", self._column(value, path))
        if not _is_auto(spec, spec.children(node.keys, path)):
            return self._declared_sequence(value, node, path, spec)
        reading = self.memory.get(path)
        if reading == "column":
            return self._read(path, "column", self._column(value, path, ", and was first read as one entry a sample"))
        if reading == "whole" and not any(holds_tensors(child) for child in node.children):
            return self._read(path, "whole", Keep("read as whole when it was first met"))
        column = len(value) == self.batch and (isinstance(value, list) or is_record_of_samples(value))
        if reading == "inside" or (isinstance(value, tuple) and not column):
            plain = isinstance(value, tuple) and all(isinstance(child, SCALARS) for child in value)
            whole = Keep(f"a tuple of {len(value)}, no tensors") if plain else None
            return self._read(path, "inside", whole or self._inside(node, path, spec))
        return self._undeclared_list(value, node, path, spec, column)

    def _undeclared_list(self, value: Any, node: Node, path: Path, spec: Declared, column: bool) -> Role:
        before = len(self.result.leaves), len(self.result.doubts), dict(self.result.readings)
        inside: Inside | None = None
        batched = False
        try:
            inside = self._inside(node, path, spec)
            batched = is_batched(inside)
        except (Misfit, StructureError):
            if not column:
                raise
        if column:
            del self.result.leaves[before[0] :], self.result.doubts[before[1] :]
            self.result.readings = before[2]
            if batched:
                self.result.doubts.append(two_readings(value, path, spec.batch_dim))
            return self._read(path, "column", Column())
        assert inside is not None
        if any(map(is_one_sample, value)):
            raise Misfit(path, value, f"it has {len(value)} entries, and each is one sample")
        if batched or any(holds_tensors(child) for child in node.children):
            return self._read(path, "inside", inside)
        del self.result.leaves[before[0] :]
        return self._read(path, "whole", Keep(f"a {type(value).__name__} of {len(value)}, no tensors"))

    def _declared_sequence(self, value: Any, node: Node, path: Path, spec: Declared) -> Role:
        """A dim speaks of the tensors inside; without any, of the entries themselves."""
        sliceable = isinstance(value, list) or is_record_of_samples(value)
        if spec.is_dim and sliceable and not any(holds_tensors(child) for child in node.children):
            if len(value) == self.batch or not spec.inherited or any(map(is_one_sample, value)):
                return self._column(value, path)
            return Keep(f"a {type(value).__name__} of {len(value)}, no tensors")
        return self._inside(node, path, spec)

    def _column(self, value: Any, path: Path, why: str = "") -> Column:
        if len(value) != self.batch:
            raise Misfit(path, value, f"it has {len(value)} entries{why}")
        return Column()

    def _read(self, path: Path, reading: str, role: Role) -> Role:
        self.result.readings[path] = reading
        return role


def is_record_of_samples(value: Sequence[Any]) -> bool:
    """A tuple of strings or objects, such as a collate function leaves; one with numbers or tensors is a structure."""
    return not any(isinstance(item, NUMBERS) or item is None or holds_tensors(item) for item in value)


def samples_in(part: Any, dim: int, lists: bool = True) -> int | None:
    """How many samples one ready-made shard holds, by its first leaf that can be measured; None if there is none."""
    kind = own_kind(part)
    if kind is not None:
        return _count(kind, part)
    if isinstance(part, (Tensor, np.ndarray)):
        return size_along(part, dim)
    if isinstance(part, list):
        return len(part) if lists else None
    node = open_node(part)
    sizes = (samples_in(child, dim, lists) for child in (node.children if node is not None else ()))
    return next((size for size in sizes if size is not None), None)


def _count(kind: Kind, value: Any) -> int | None:
    """The samples of a value that has not to be split; None also where its type cannot tell."""
    try:
        return kind.size(value)
    except StructureError:
        return None


def holds_tensors(value: Any, _seen: set[int] | None = None, depth: int = 8) -> bool:
    """Whether a tensor can be reached from a value through containers and, to a depth, through attributes."""
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
    if node is not None:
        return any(holds_tensors(child, seen, depth) for child in node.children)
    return any(holds_tensors(child, seen, depth - 1) for child in attributes_of(value).values())


def holds_samples(item: Any, size: int) -> bool | None:
    """Whether an entry of a list holds `size` samples; None if it says neither."""
    kind = own_kind(item)
    if kind is not None:
        count = _count(kind, item)
        return None if count is None else count == size
    if isinstance(item, (Tensor, np.ndarray)):
        return True if size in item.shape else None if item.ndim == 0 or item.shape[0] == 1 else False
    node = open_node(item)
    if node is None:
        return None
    if is_sequence(item) and len(item) == size and not holds_tensors(item):
        return True
    below = {holds_samples(child, size) for child in node.children}
    return False if False in below else True if True in below else None
