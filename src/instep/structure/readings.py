"""Readings: the ways in which the sizes of a call's arguments can be a batch.

`infer_placements` reads tensors along one dim. Where that does not fit, or the probe refutes it, the probe tests other
readings: the batch is another dim of a tensor (sequences `[T, B]`, hidden states `[layers, B, H]`), every replica gets
all of a tensor (class weights, square masks), a list of tensors is a structure and not samples, or the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from instep.errors import StructureError
from instep.structure.infer import (
    DimReading,
    InferredPlacements,
    Readings,
    SizeMismatch,
    collect_candidates,
    contains_tensors,
    infer_placements,
    is_all_auto,
)
from instep.structure.placements import CustomSplit, Nested, PerSample, Placement, Shard
from instep.structure.shapes import is_integer
from instep.structure.spec import DimSpec, Shards, Whole
from instep.structure.tree import Path, flatten_one_level, is_sequence
from instep.structure.types_torch import handler_for

MAX_CHANGES = 2
"""How many arguments a reading may interpret in another way than the likeliest one for its batch size."""
MAX_READINGS = 16
_MAX_COMBINATIONS = 64

Combination = tuple[int, Readings]
"""The number of changes, and the readings of all paths that are not read along dim 0."""


class UnconfirmedReading(NamedTuple):
    """A reading that fits the sizes but that the probe did not confirm.

    Fewer other readings are tried than if none fits, so that none agrees by chance on the samples tried.
    """

    batch: int
    """Its batch size."""
    failed: bool
    """Whether `forward` failed on parts: a tensor may not be batched, though one of its sizes is the batch size."""
    sequence_first: bool
    """Whether the module has layers whose inputs are `[T, B, F]`."""


def possible_readings(
    names: Sequence[str],
    values: Sequence[Any],
    specs: Sequence[DimSpec],
    kept: Readings,
    unconfirmed: UnconfirmedReading | None = None,
) -> Iterator[tuple[int, int, InferredPlacements]]:
    """Readings that fit the sizes, likely ones first: the number of changes, the batch size and the placements.

    Declared dims and the kept readings of lists are not changed.
    """
    if unconfirmed is not None and not (unconfirmed.failed or unconfirmed.sequence_first):
        return
    along_any_dim = unconfirmed is None or unconfirmed.sequence_first
    lists: Readings = {path: reading for path, reading in kept.items() if not isinstance(reading, DimReading)}
    tensors = [tensor for value, spec in zip(values, specs, strict=True) for tensor in _auto_tensors(value, spec)]
    if along_any_dim:
        sizes = [candidate.size for candidate in collect_candidates(names, values, specs, lists)]
        sizes += [int(tensor.shape[1]) for tensor in tensors if _may_be_sequence(tensor)]
    else:
        assert unconfirmed is not None
        sizes = [unconfirmed.batch]
    found: list[tuple[int, int, Readings]] = []
    for batch in dict.fromkeys(size for size in sizes if size > 1):
        for later_dims_first in (False, True):
            search = _Search(batch, lists, tensors, unconfirmed, later_dims_first)
            arguments = zip(names, values, specs, strict=True)
            combinations = _product([search.combinations(value, (name,), spec) for name, value, spec in arguments])
            found += [(changes, batch, readings) for changes, readings in combinations]
    seen: list[tuple[int, Readings]] = []
    for changes, batch, readings in sorted(found, key=lambda item: item[0]):
        if (batch, readings) in seen:
            continue
        seen.append((batch, readings))
        try:
            inferred = infer_placements(names, values, specs, batch, {**lists, **readings})
        except (SizeMismatch, StructureError):
            continue
        if along_any_dim or any(_is_batch_first(placement) for _, placement in inferred.leaves):
            yield changes, batch, inferred


def _is_batch_first(placement: Placement) -> bool:
    return isinstance(placement, (PerSample, CustomSplit)) or placement == Shard(0)


def _auto_tensors(value: Any, spec: DimSpec) -> Iterator[Any]:
    if not spec.is_auto or isinstance(value, (Whole, Shards)) or handler_for(value) is not None:
        return
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
        return
    node = flatten_one_level(value)
    for child in node.children if node is not None else ():
        yield from _auto_tensors(child, spec)


def _may_be_sequence(value: Any) -> bool:
    """Whether dim 1 may be the batch of a tensor by itself: token ids `[T, B]`, features `[T, B, F]`, not images."""
    return value.ndim in (3, 5) or (value.ndim == 2 and _is_integer(value) and not _may_be_edges(value))


def _may_be_edges(value: Any) -> bool:
    """Whether a tensor may be the `edge_index` `[2, E]` of a graph. Edges are not samples: they share nodes."""
    return value.ndim == 2 and value.shape[0] == 2 and _is_integer(value)


def _is_integer(value: Any) -> bool:
    return value.dtype.kind in "iu" if isinstance(value, np.ndarray) else is_integer(value)


class _Search:
    """The readings of values for one batch size."""

    def __init__(
        self,
        batch: int,
        lists: Readings,
        tensors: Sequence[Any],
        unconfirmed: UnconfirmedReading | None,
        later_dims_first: bool,
    ) -> None:
        self.batch, self.lists, self.unconfirmed, self.later_dims_first = batch, lists, unconfirmed, later_dims_first
        self.outer_sizes = Counter(size for tensor in tensors for size in {*tensor.shape[:2]})

    def combinations(self, value: Any, path: Path, spec: DimSpec) -> list[Combination]:
        """The readings of a value and of what it contains; empty if none fits."""
        if spec.value is None or isinstance(value, (Whole, Shards)) or handler_for(value) is not None:
            return [(0, {})]
        if isinstance(value, (Tensor, np.ndarray)):
            options = self._tensor_readings(value) if spec.is_auto and value.ndim else [None]
            return [(int(index > 0), {} if option is None else {path: option}) for index, option in enumerate(options)]
        node = flatten_one_level(value)
        if node is None or not contains_tensors(value):
            return [(0, {})]
        specs = spec.children(node.keys, path)
        children = zip(node.keys, node.children, specs, strict=True)
        is_undeclared = is_sequence(value) and is_all_auto(spec, specs)
        reading = self.lists.get(path) if is_undeclared else Nested
        found: list[Combination] = []
        if reading is not Nested and isinstance(value, list) and len(value) == self.batch:
            found.append((0, {path: PerSample}))
        if reading is not PerSample:
            nested = _product([self.combinations(child, (*path, key), below) for key, child, below in children])
            found += [(changes, {path: Nested, **below} if is_undeclared else below) for changes, below in nested]
        return found

    def _tensor_readings(self, value: Any) -> list[DimReading | None]:
        """The readings of a tensor, the likeliest first. None is the reading along dim 0, or whole if it has size 1."""
        shape, rank = value.shape, value.ndim
        dims = [dim for dim in range(rank) if shape[dim] == self.batch]
        if _may_be_edges(value):
            dims = [dim for dim in dims if dim == 0]
        elif shape[0] == self.batch:
            is_matrix = rank == 2 and "float" in str(value.dtype)
            dims = [0] if is_matrix else [dim for dim in dims if dim < 2]
        if self.later_dims_first and 0 in dims:
            dims = [*dims[1:], 0]
        found = [DimReading(rank, dim) if dim else None for dim in dims]
        if shape[0] == 1:
            found.append(None)
        elif self._may_be_whole(shape):
            found.append(DimReading(rank, None))
        return found

    def _may_be_whole(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may belong to all samples: a vector whose size no other has, or a mask `[T, T]`."""
        is_square = len(shape) == 2 and shape[0] == shape[1] and self.outer_sizes[shape[0]] > 1
        if self.batch in shape:
            by_chance = self.unconfirmed is not None and (
                self.unconfirmed.failed or (is_square and self.unconfirmed.sequence_first)
            )
            return by_chance and (is_square or len(shape) == 1)
        return is_square or (len(shape) == 1 and self.outer_sizes[shape[0]] == 1)


def _product(choices: Iterable[Sequence[Combination]]) -> list[Combination]:
    """One combination of each entry, with few changes in all."""
    product: list[Combination] = [(0, {})]
    for entry in choices:
        pairs = [
            (changes + more, {**readings, **further})
            for changes, readings in product
            for more, further in entry
            if changes + more <= MAX_CHANGES
        ]
        product = sorted(pairs, key=lambda pair: pair[0])[:_MAX_COMBINATIONS]
    return product
