"""Infer the batch size of a call and the placement of each argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set, ValuesView
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
    Reading,
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
from instep.structure.tree import NUMBER_TYPES, SCALARS, Node, Path, attributes_of, flatten_one_level, is_sequence
from instep.structure.types import TypeHandler, handler_for_type
from instep.structure.types_torch import handler_for


class DimReading(NamedTuple):
    """The batch dim of a tensor that was found by the probe. Holds for tensors of this rank."""

    rank: int
    dim: int | None
    """None if every replica gets all of it."""


Readings = dict[Path, Reading | DimReading]
"""How the list, tuple or tensor at each path was interpreted in the first call. Most tensors have no entry."""


BROADCAST = Replicate("size 1 broadcasts")
"""The placement of a tensor without a specification whose batch dim has size 1."""


class BatchSizeCandidate(NamedTuple):
    """A batch size suggested by one argument or leaf. A lower priority number is tried first."""

    priority: int
    size: int
    path: Path
    description: str
    suggested_spec: Any
    """The `in_dims` entry that selects this candidate."""
    is_declared: bool
    """Whether `in_dims` already contains it."""


class SizeMismatch(Exception):
    """A leaf does not match the batch size being tried."""

    def __init__(self, path: Path, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.path, self.value, self.reason = path, value, reason


@dataclass
class InferredPlacements:
    """Placements of all arguments for one batch size, and how each list was interpreted."""

    placements: tuple[Placement, ...] = ()
    leaves: list[tuple[Path, Placement]] = field(default_factory=list)
    readings: Readings = field(default_factory=dict)
    ambiguities: list[StructureError] = field(default_factory=list)
    """Errors for lists that match both interpretations."""


def is_single_sample(value: Any) -> bool:
    """Whether a value is a single sample by its type."""
    handler = handler_for(value)
    return handler is not None and handler.is_single_sample


def sample_count(handler: TypeHandler, value: Any, path: Path) -> int | None:
    """The number of samples according to the handler. Errors get the path added."""
    try:
        return handler.size(value)
    except StructureError as error:
        raise cannot_split(path, value, str(error)) from error


def collect_candidates(
    names: Sequence[str], values: Sequence[Any], specs: Sequence[DimSpec], readings: Readings
) -> list[BatchSizeCandidate]:
    """All batch sizes that the arguments suggest."""
    found: list[BatchSizeCandidate] = []
    for name, value, spec in zip(names, values, specs, strict=True):
        found.extend(_candidates(value, (name,), spec, readings))
    return found


def _candidates(value: Any, path: Path, spec: DimSpec, readings: Readings) -> Iterator[BatchSizeCandidate]:
    if spec.value is None or isinstance(value, (Whole, Shards)):
        return
    handler = handler_for(value)
    if handler is not None:
        count = sample_count(handler, value, path)
        if count is not None:
            yield BatchSizeCandidate(
                0, count, path, f"{type(value).__name__} of {count} samples", spec.value, not spec.is_auto
            )
        return
    if isinstance(value, (Tensor, np.ndarray)):
        dim = batch_dim(value, path, spec, readings)
        size = None if dim is None else size_along(value, dim)
        broadcasts = spec.is_auto and tuple(value.shape) == (1,)  # broadcasts, e.g. a temperature
        if size is not None and not broadcasts:
            yield BatchSizeCandidate(0, size, path, f"size {size} along dim {dim}", dim, not spec.is_auto)
        return
    node = flatten_one_level(value)
    if node is None:
        return
    if is_sequence(value):
        yield from _sequence_candidates(value, node, path, spec, readings)
        return
    for key, child, child_spec in zip(node.keys, node.children, spec.children(node.keys, path), strict=True):
        yield from _candidates(child, (*path, key), child_spec, readings)


def _sequence_candidates(
    value: Any, node: Node, path: Path, spec: DimSpec, readings: Readings
) -> Iterator[BatchSizeCandidate]:
    specs = spec.children(node.keys, path)
    entries = f"{type(value).__name__} of {len(value)}"
    if spec.is_samples:
        yield BatchSizeCandidate(0, len(value), path, entries, SAMPLES, not spec.is_auto)
        return
    has_tensors = any(contains_tensors(child) for child in node.children)
    auto = is_all_auto(spec, specs)
    reading = readings.get(path) if auto else None
    if reading is Replicate and not has_tensors:
        return
    if value and reading is not Nested and (auto or (spec.is_dim and not has_tensors)):
        if isinstance(value, list):
            yield BatchSizeCandidate(0 if has_tensors else 1, len(value), path, entries, SAMPLES, not spec.is_auto)
        elif is_sample_tuple(value):
            yield BatchSizeCandidate(2, len(value), path, entries, SAMPLES, not spec.is_auto)
    if reading is PerSample:
        return
    for key, child, child_spec in zip(node.keys, node.children, specs, strict=True):
        for candidate in _candidates(child, (*path, key), child_spec, readings):
            yield candidate if has_tensors else candidate._replace(priority=2)


def is_all_auto(spec: DimSpec, child_specs: Sequence[DimSpec]) -> bool:
    """Whether neither a list nor any of its entries has a specification."""
    return spec.is_auto and all(child.is_auto for child in child_specs)


def batch_dim(value: Any, path: Path, spec: DimSpec, readings: Readings) -> int | None:
    """The batch dim of a tensor, by its reading or its specification. None if every replica gets all of it."""
    reading = readings.get(path) if spec.is_auto else None
    return reading.dim if isinstance(reading, DimReading) and reading.rank == value.ndim else spec.batch_dim


def size_along(value: Any, dim: int) -> int | None:
    """The size of a tensor or array along `dim`, or None if there is no such dim."""
    rank = value.ndim
    return int(value.shape[dim]) if -rank <= dim < rank else None


def infer_placements(
    names: Sequence[str], values: Sequence[Any], specs: Sequence[DimSpec], batch: int | None, readings: Readings
) -> InferredPlacements:
    """Infer the placements for a given batch size, or for an unbatched call if it is None.

    Raises `SizeMismatch` if an argument does not match.
    """
    inference = _PlacementInference(batch, readings, InferredPlacements())
    triples = zip(names, values, specs, strict=True)
    inference.result.placements = tuple([inference.infer(value, (name,), spec) for name, value, spec in triples])
    return inference.result


@dataclass
class _PlacementInference:
    batch_size: int | None
    prior_readings: Readings
    result: InferredPlacements

    def infer(self, value: Any, path: Path, spec: DimSpec) -> Placement:
        placement = self._infer(value, path, spec)
        if not isinstance(placement, Nested):
            self.result.leaves.append((path, placement))
        return placement

    def _infer(self, value: Any, path: Path, spec: DimSpec) -> Placement:
        if isinstance(value, Whole):
            return Replicate("marked whole")
        if isinstance(value, Shards):
            return PreSplit(tuple([count_samples(part, spec.default_dim) for part in value.parts]))
        if spec.value is None:
            return Replicate("in_dims is None")
        handler = handler_for(value)
        if handler is not None:
            return self._infer_custom(value, path, handler)
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
        dim = batch_dim(value, path, spec, self.prior_readings)
        if dim != spec.batch_dim:
            self.result.readings[path] = DimReading(value.ndim, dim)
        if dim is None:
            return Replicate("found by the probe")
        size = size_along(value, dim)
        if size is None:
            if value.ndim == 0 and (spec.is_auto or spec.is_inherited):
                return Replicate("0-d")
            raise SizeMismatch(path, value, f"it has no dim {dim}")
        if size == self.batch_size:
            return Shard(dim % value.ndim)
        if spec.is_auto and size == 1 and dim == spec.batch_dim:
            return BROADCAST
        raise SizeMismatch(path, value, f"dim {dim} has size {size}")

    def _infer_custom(self, value: Any, path: Path, handler: TypeHandler) -> Placement:
        count = sample_count(handler, value, path)
        if count is None:
            return Replicate("not a batch")
        if count == self.batch_size:
            return CustomSplit(handler)
        raise SizeMismatch(path, value, f"it holds {count} samples")

    def _infer_nested(self, node: Node, path: Path, spec: DimSpec) -> Nested:
        specs = spec.children(node.keys, path)
        triples = zip(node.keys, node.children, specs, strict=True)
        return Nested(
            tuple(node.keys), tuple([self.infer(child, (*path, key), child_spec) for key, child, child_spec in triples])
        )

    def _infer_sequence(self, value: Any, node: Node, path: Path, spec: DimSpec) -> Placement:
        """A list has one entry per sample or is a structure of batched leaves. A tuple is usually a structure."""
        if not value and not spec.is_samples:
            return Replicate(f"an empty {type(value).__name__}")
        if spec.is_samples:
            return self._record_reading(path, self._per_sample(value, path))
        if not is_all_auto(spec, spec.children(node.keys, path)):
            return self._infer_declared_sequence(value, node, path, spec)
        reading = self.prior_readings.get(path)
        if reading is PerSample:
            placement = self._per_sample(value, path, ", and had one entry per sample in the first call")
            return self._record_reading(path, placement)
        if reading is Replicate and not any(contains_tensors(child) for child in node.children):
            return self._record_reading(path, Replicate("replicated in the first call"))
        per_sample = len(value) == self.batch_size and (isinstance(value, list) or is_sample_tuple(value))
        if reading is Nested or (isinstance(value, tuple) and not per_sample):
            if isinstance(value, tuple) and all(isinstance(child, SCALARS) for child in value):
                self.result.readings[path] = Nested
                return Replicate(f"a tuple of {len(value)}, no tensors")
            return self._record_reading(path, self._infer_nested(node, path, spec))
        return self._infer_undeclared_list(value, node, path, spec, per_sample)

    def _infer_undeclared_list(self, value: Any, node: Node, path: Path, spec: DimSpec, per_sample: bool) -> Placement:
        before = len(self.result.leaves), len(self.result.ambiguities), dict(self.result.readings)
        nested: Nested | None = None
        batched = False
        try:
            nested = self._infer_nested(node, path, spec)
            batched = is_batched(nested)
        except (SizeMismatch, StructureError):
            if not per_sample:
                raise
        if per_sample:
            del self.result.leaves[before[0] :], self.result.ambiguities[before[1] :]
            self.result.readings = before[2]
            if batched:
                self.result.ambiguities.append(ambiguous_sequence(value, path, spec.batch_dim))
            return self._record_reading(path, PerSample())
        assert nested is not None
        if any(map(is_single_sample, value)):
            raise SizeMismatch(path, value, f"it has {len(value)} entries, and each is one sample")
        if batched or any(contains_tensors(child) for child in node.children):
            return self._record_reading(path, nested)
        del self.result.leaves[before[0] :]
        return self._record_reading(path, Replicate(f"a {type(value).__name__} of {len(value)}, no tensors"))

    def _infer_declared_sequence(self, value: Any, node: Node, path: Path, spec: DimSpec) -> Placement:
        """A specified dim applies to the tensors in the list or, if it has none, to its entries."""
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

    def _record_reading(self, path: Path, placement: PerSample | Nested | Replicate) -> Placement:
        self.result.readings[path] = type(placement)
        return placement


def is_sample_tuple(value: Sequence[Any]) -> bool:
    """Whether a tuple has only strings or objects, as a collate function returns them."""
    return not any(isinstance(item, NUMBER_TYPES) or item is None or contains_tensors(item) for item in value)


def count_samples(part: Any, dim: int, count_lists: bool = True) -> int | None:
    """The number of samples in a shard, from its first leaf with a known size; None if there is none."""
    handler = handler_for(part)
    if handler is not None:
        return _size_or_none(handler, part)
    if isinstance(part, (Tensor, np.ndarray)):
        return size_along(part, dim)
    if isinstance(part, list):
        return len(part) if count_lists else None
    node = flatten_one_level(part)
    sizes = (count_samples(child, dim, count_lists) for child in (node.children if node is not None else ()))
    return next((size for size in sizes if size is not None), None)


def _size_or_none(handler: TypeHandler, value: Any) -> int | None:
    """The number of samples, or None if the handler cannot determine it."""
    try:
        return handler.size(value)
    except StructureError:
        return None


def contains_tensors(value: Any, _seen: set[int] | None = None, depth: int = 8) -> bool:
    """Whether a value contains a tensor, in containers or, up to `depth`, in attributes."""
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
    if isinstance(value, (Set, ValuesView)):
        return any(contains_tensors(child, seen, depth) for child in value)
    return any(contains_tensors(child, seen, depth - 1) for child in attributes_of(value).values())


def may_hold_batch(item: Any, size: int) -> bool | None:
    """Whether a list entry can hold a batch of `size` samples; None if its sizes do not show it."""
    handler = handler_for(item)
    if handler is not None:
        count = _size_or_none(handler, item)
        return None if count is None else count == size
    if isinstance(item, (Tensor, np.ndarray)):
        return True if size in item.shape else None if item.ndim == 0 or item.shape[0] == 1 else False
    node = flatten_one_level(item)
    if node is None:
        return None
    if is_sequence(item) and len(item) == size and not contains_tensors(item):
        return True
    results = {may_hold_batch(child, size) for child in node.children}
    return False if False in results else True if True in results else None
