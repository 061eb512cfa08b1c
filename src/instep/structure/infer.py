"""Infer the batch size of a call and the placement of each argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from instep.errors import StructureError
from instep.structure.placements import (
    CustomSplit,
    Nested,
    PerSample,
    Placement,
    PreSplit,
    Replicate,
    Shard,
    is_batched,
)
from instep.structure.spec import SAMPLES, DimSpec, Shards, Whole
from instep.structure.split_messages import (
    ambiguous_sequence,
    cannot_split,
    unexpected_dim_structure,
    unsupported_argument,
)
from instep.structure.tree import SCALARS, Node, Path, attributes_of, flatten_one_level, is_sequence
from instep.structure.types import TypeHandler, handler_for_type
from instep.structure.types_torch import tensor_handler

Readings = dict[Path, str]
"""How the list or tuple at a path was read when it was first met: "column", "inside" or "whole"."""


NUMBER_TYPES = (int, float, complex, np.generic)


class BatchSizeCandidate(NamedTuple):
    """A size that one place of the call would have for the batch; a lower rank is stronger evidence."""

    priority: int
    size: int
    path: Path
    description: str
    suggested_spec: Any
    """What to declare for this place if it is right."""
    is_declared: bool
    """Whether that was declared already."""


class SizeMismatch(Exception):
    """A place that a size does not fit."""

    def __init__(self, path: Path, value: Any, why: str) -> None:
        super().__init__(why)
        self.path, self.value, self.reason = path, value, why


@dataclass
class InferredPlacements:
    """The roles under which one size fits every argument, and how each list was read."""

    placements: tuple[Placement, ...] = ()
    leaves: list[tuple[Path, Placement]] = field(default_factory=list)
    readings: Readings = field(default_factory=dict)
    ambiguities: list[StructureError] = field(default_factory=list)
    """Lists that fit under both readings; an error unless another size fits without doubt."""


def handler_for(value: Any) -> TypeHandler | None:
    """The rule of a value's type, where it has one; an ordinary tensor has none."""
    cls = type(value)
    kind = None if cls is Tensor else handler_for_type(cls)
    return tensor_handler(value) if kind is None and isinstance(value, Tensor) else kind


def is_single_sample(value: Any) -> bool:
    """Whether a value is one sample by its type, whatever it holds."""
    kind = handler_for(value)
    return kind is not None and kind.is_single_sample


def sample_count(kind: TypeHandler, value: Any, path: Path) -> int | None:
    """How many samples a value with a rule of its own holds; its rule does not know where it stands."""
    try:
        return kind.size(value)
    except StructureError as error:
        raise cannot_split(path, value, str(error)) from error


def collect_candidates(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[DimSpec], memory: Readings
) -> list[BatchSizeCandidate]:
    """Every size that some argument proposes."""
    found: list[BatchSizeCandidate] = []
    for name, value, spec in zip(names, values, declared, strict=True):
        found.extend(_candidates(value, (name,), spec, memory))
    return found


def _candidates(value: Any, path: Path, spec: DimSpec, memory: Readings) -> Iterator[BatchSizeCandidate]:
    if spec.value is None or isinstance(value, (Whole, Shards)):
        return
    kind = handler_for(value)
    if kind is not None:
        count = sample_count(kind, value, path)
        if count is not None:
            yield BatchSizeCandidate(
                0, count, path, f"{type(value).__name__} of {count} samples", spec.value, not spec.is_auto
            )
        return
    if isinstance(value, (Tensor, np.ndarray)):
        size = size_along(value, spec.batch_dim)
        lone = spec.is_auto and tuple(value.shape) == (1,)  # one lone number broadcasts: a temperature, a scale
        if size is not None and not lone:
            yield BatchSizeCandidate(
                0, size, path, f"size {size} along dim {spec.batch_dim}", spec.batch_dim, not spec.is_auto
            )
        return
    node = flatten_one_level(value)
    if node is None:
        return
    if is_sequence(value):
        yield from _sequence_candidates(value, node, path, spec, memory)
        return
    for key, child, below in zip(node.keys, node.children, spec.children(node.keys, path), strict=True):
        yield from _candidates(child, (*path, key), below, memory)


def _sequence_candidates(
    value: Any, node: Node, path: Path, spec: DimSpec, memory: Readings
) -> Iterator[BatchSizeCandidate]:
    declared = spec.children(node.keys, path)
    entries = f"{type(value).__name__} of {len(value)}"
    if spec.is_samples:
        yield BatchSizeCandidate(0, len(value), path, entries, SAMPLES, not spec.is_auto)
        return
    holds = any(contains_tensors(child) for child in node.children)
    auto = _is_all_auto(spec, declared)
    reading = memory.get(path) if auto else None
    if reading == "whole" and not holds:
        return
    if value and reading != "inside" and (auto or (spec.is_dim and not holds)):
        if isinstance(value, list):
            yield BatchSizeCandidate(0 if holds else 1, len(value), path, entries, SAMPLES, not spec.is_auto)
        elif is_sample_tuple(value):
            yield BatchSizeCandidate(2, len(value), path, entries, SAMPLES, not spec.is_auto)
    if reading == "column":
        return
    for key, child, below in zip(node.keys, node.children, declared, strict=True):
        for proposal in _candidates(child, (*path, key), below, memory):
            yield proposal if holds else proposal._replace(priority=2)


def _is_all_auto(spec: DimSpec, below: Sequence[DimSpec]) -> bool:
    """Whether nothing is declared for a list nor for any of its entries."""
    return spec.is_auto and all(child.is_auto for child in below)


def size_along(value: Any, dim: int) -> int | None:
    """The size of a tensor or array along a dim, or None if it has no such dim."""
    rank = value.ndim
    return int(value.shape[dim]) if -rank <= dim < rank else None


def infer_placements(
    names: Sequence[str], values: Sequence[Any], declared: Sequence[DimSpec], batch: int | None, memory: Readings
) -> InferredPlacements:
    """Roles for every argument under a batch of this size (None: nothing is batched); `Misfit` if there are none."""
    fitting = _PlacementInference(batch, memory, InferredPlacements())
    triples = zip(names, values, declared, strict=True)
    fitting.result.placements = tuple([fitting.infer(value, (name,), spec) for name, value, spec in triples])
    return fitting.result


@dataclass
class _PlacementInference:
    batch_size: int | None
    prior_readings: Readings
    result: InferredPlacements

    def infer(self, value: Any, path: Path, spec: DimSpec) -> Placement:
        role = self._infer(value, path, spec)
        if not isinstance(role, Nested):
            self.result.leaves.append((path, role))
        return role

    def _infer(self, value: Any, path: Path, spec: DimSpec) -> Placement:
        if isinstance(value, Whole):
            return Replicate("marked whole")
        if isinstance(value, Shards):
            return PreSplit(tuple([count_samples(part, spec.default_dim) for part in value.parts]))
        if spec.value is None:
            return Replicate("in_dims is None")
        kind = handler_for(value)
        if kind is not None:
            return self._infer_custom(value, path, kind)
        node = flatten_one_level(value)
        if node is not None:
            return (
                self._infer_sequence(value, node, path, spec)
                if is_sequence(value)
                else self._infer_nested(node, path, spec)
            )
        if not spec.is_uniform:
            raise unexpected_dim_structure(value, path, spec.value)
        if isinstance(value, (Tensor, np.ndarray)):
            return self._infer_dense(value, path, spec)
        if isinstance(value, SCALARS) or (callable(value) and not isinstance(value, nn.Module)):
            return Replicate(type(value).__name__)
        if isinstance(value, (nn.Module, Iterator)) or contains_tensors(value):
            raise unsupported_argument(value, path)
        return Replicate("an object without tensors")

    def _infer_dense(self, value: Tensor | np.ndarray[Any, Any], path: Path, spec: DimSpec) -> Placement:
        size = size_along(value, spec.batch_dim)
        if size is None:
            if value.ndim == 0 and (spec.is_auto or spec.is_inherited):
                return Replicate("0-d")
            raise SizeMismatch(path, value, f"it has no dim {spec.batch_dim}")
        if size == self.batch_size:
            return Shard(spec.batch_dim % value.ndim)
        if spec.is_auto and size == 1:
            return Replicate("size 1 broadcasts")
        raise SizeMismatch(path, value, f"its size along dim {spec.batch_dim} is {size}")

    def _infer_custom(self, value: Any, path: Path, kind: TypeHandler) -> Placement:
        count = sample_count(kind, value, path)
        if count is None:
            return Replicate("not a batch")
        if count == self.batch_size:
            return CustomSplit(kind)
        raise SizeMismatch(path, value, f"it holds {count} samples")

    def _infer_nested(self, node: Node, path: Path, spec: DimSpec) -> Nested:
        declared = spec.children(node.keys, path)
        triples = zip(node.keys, node.children, declared, strict=True)
        return Nested(
            tuple(node.keys), tuple([self.infer(child, (*path, key), below) for key, child, below in triples])
        )

    def _infer_sequence(self, value: Any, node: Node, path: Path, spec: DimSpec) -> Placement:
        """A list has two readings, one entry a sample or a structure of batched leaves; a tuple mostly the second."""
        if not value and not spec.is_samples:  # nothing can be learned from it
            return Replicate(f"an empty {type(value).__name__}")
        if spec.is_samples:
            return self._record_reading(path, "column", self._per_sample(value, path))
        if not _is_all_auto(spec, spec.children(node.keys, path)):
            return self._infer_declared_sequence(value, node, path, spec)
        reading = self.prior_readings.get(path)
        if reading == "column":
            return self._record_reading(
                path, "column", self._per_sample(value, path, ", and was first read as one entry a sample")
            )
        if reading == "whole" and not any(contains_tensors(child) for child in node.children):
            return self._record_reading(path, "whole", Replicate("read as whole when it was first met"))
        column = len(value) == self.batch_size and (isinstance(value, list) or is_sample_tuple(value))
        if reading == "inside" or (isinstance(value, tuple) and not column):
            plain = isinstance(value, tuple) and all(isinstance(child, SCALARS) for child in value)
            whole = Replicate(f"a tuple of {len(value)}, no tensors") if plain else None
            return self._record_reading(path, "inside", whole or self._infer_nested(node, path, spec))
        return self._infer_undeclared_list(value, node, path, spec, column)

    def _infer_undeclared_list(self, value: Any, node: Node, path: Path, spec: DimSpec, column: bool) -> Placement:
        before = len(self.result.leaves), len(self.result.ambiguities), dict(self.result.readings)
        inside: Nested | None = None
        batched = False
        try:
            inside = self._infer_nested(node, path, spec)
            batched = is_batched(inside)
        except (SizeMismatch, StructureError):
            if not column:
                raise
        if column:
            del self.result.leaves[before[0] :], self.result.ambiguities[before[1] :]
            self.result.readings = before[2]
            if batched:
                self.result.ambiguities.append(ambiguous_sequence(value, path, spec.batch_dim))
            return self._record_reading(path, "column", PerSample())
        assert inside is not None
        if any(map(is_single_sample, value)):
            raise SizeMismatch(path, value, f"it has {len(value)} entries, and each is one sample")
        if batched or any(contains_tensors(child) for child in node.children):
            return self._record_reading(path, "inside", inside)
        del self.result.leaves[before[0] :]
        return self._record_reading(path, "whole", Replicate(f"a {type(value).__name__} of {len(value)}, no tensors"))

    def _infer_declared_sequence(self, value: Any, node: Node, path: Path, spec: DimSpec) -> Placement:
        """A dim speaks of the tensors inside; without any, of the entries themselves."""
        sliceable = isinstance(value, list) or is_sample_tuple(value)
        if spec.is_dim and sliceable and not any(contains_tensors(child) for child in node.children):
            if len(value) == self.batch_size or not spec.is_inherited or any(map(is_single_sample, value)):
                return self._per_sample(value, path)
            return Replicate(f"a {type(value).__name__} of {len(value)}, no tensors")
        return self._infer_nested(node, path, spec)

    def _per_sample(self, value: Any, path: Path, why: str = "") -> PerSample:
        if len(value) != self.batch_size:
            raise SizeMismatch(path, value, f"it has {len(value)} entries{why}")
        return PerSample()

    def _record_reading(self, path: Path, reading: str, role: Placement) -> Placement:
        self.result.readings[path] = reading
        return role


def is_sample_tuple(value: Sequence[Any]) -> bool:
    """A tuple of strings or objects, such as a collate function leaves; one with numbers or tensors is a structure."""
    return not any(isinstance(item, NUMBER_TYPES) or item is None or contains_tensors(item) for item in value)


def count_samples(part: Any, dim: int, count_lists: bool = True) -> int | None:
    """How many samples one ready-made shard holds, by its first leaf that can be measured; None if there is none."""
    kind = handler_for(part)
    if kind is not None:
        return _size_or_none(kind, part)
    if isinstance(part, (Tensor, np.ndarray)):
        return size_along(part, dim)
    if isinstance(part, list):
        return len(part) if count_lists else None
    node = flatten_one_level(part)
    sizes = (count_samples(child, dim, count_lists) for child in (node.children if node is not None else ()))
    return next((size for size in sizes if size is not None), None)


def _size_or_none(kind: TypeHandler, value: Any) -> int | None:
    """The samples of a value that has not to be split; None also where its type cannot tell."""
    try:
        return kind.size(value)
    except StructureError:
        return None


def contains_tensors(value: Any, _seen: set[int] | None = None, depth: int = 8) -> bool:
    """Whether a tensor can be reached from a value through containers and, to a depth, through attributes."""
    if isinstance(value, (Tensor, np.ndarray)):
        return True
    if isinstance(value, (*SCALARS, type, Callable)) or depth == 0:  # type: ignore[arg-type]
        return isinstance(value, nn.Module)
    seen = set() if _seen is None else _seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    if handler_for_type(type(value)) is not None:
        return True
    node = flatten_one_level(value)
    if node is not None:
        return any(contains_tensors(child, seen, depth) for child in node.children)
    return any(contains_tensors(child, seen, depth - 1) for child in attributes_of(value).values())


def has_batch_size(item: Any, size: int) -> bool | None:
    """Whether an entry of a list holds `size` samples; None if it says neither."""
    kind = handler_for(item)
    if kind is not None:
        count = _size_or_none(kind, item)
        return None if count is None else count == size
    if isinstance(item, (Tensor, np.ndarray)):
        return True if size in item.shape else None if item.ndim == 0 or item.shape[0] == 1 else False
    node = flatten_one_level(item)
    if node is None:
        return None
    if is_sequence(item) and len(item) == size and not contains_tensors(item):
        return True
    below = {has_batch_size(child, size) for child in node.children}
    return False if False in below else True if True in below else None
