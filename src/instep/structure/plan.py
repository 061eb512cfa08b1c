"""Plan how the arguments of a call are split across replicas.

Planning uses only types, keys and sizes. It never reads tensor data, so it does not synchronize with a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
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
)
from instep.structure.placements import Nested, PerSample, Placement, PreSplit, Reading, Replicate
from instep.structure.readings import MAX_READINGS, UnconfirmedReading, possible_readings
from instep.structure.sizes import balanced_sizes, sizes_by_cost
from instep.structure.spec import AUTO, DimSpec, Shards, Whole, argument_specs, collect_dims, validate_dims
from instep.structure.split_messages import (
    ambiguous_batch_size,
    inconsistent_reading,
    shard_count_mismatch,
    shard_size_mismatch,
    size_mismatch_error,
)
from instep.structure.tree import SCALARS, Path, flatten_one_level
from instep.structure.types import TypeHandler
from instep.structure.types_torch import handler_for

SplitFn: TypeAlias = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class SplitPlan:
    """The batch size of a call, the shard sizes, and a placement for every argument."""

    batch_size: int | None
    """The number of samples, or None if no argument is batched."""
    sizes: tuple[int, ...]
    """Samples per active replica; `(0,)` if no argument is batched."""
    names: tuple[str, ...]
    """Argument names, positional arguments first."""
    placements: tuple[Placement, ...]
    """One placement per argument, in the order of `names`."""
    reading: tuple[tuple[Path, Reading | DimReading], ...] = ()
    """How lists, and tensors whose batch is not the default dim, are interpreted."""
    undecided: StructureError | None = field(default=None, compare=False)
    """Why the sizes alone do not decide how to split. The plan is then one of `Planner.other_plans`."""
    split_fns: list[SplitFn] = field(default_factory=list, repr=False, compare=False)
    """Functions that split each argument. Created when the plan is first applied, then reused."""

    @property
    def parts(self) -> int:
        return len(self.sizes)

    @cached_property
    def has_replicated(self) -> bool:
        """Whether any argument, or part of one, goes whole to every replica."""
        return any(map(_is_replicated, self.placements))


def _is_replicated(placement: Placement) -> bool:
    if isinstance(placement, Nested):
        return any(map(_is_replicated, placement.placements))
    return isinstance(placement, Replicate)


@dataclass
class Planner:
    """Plans the calls of one method. Caches plans and keeps the interpretation of lists and of other batch dims."""

    num_replicas: int
    dim: int = 0
    in_dims: Any = AUTO
    min_shard: int = 1
    shares: tuple[float, ...] = ()
    """Relative shard sizes. Empty for equal shards."""
    readings: Readings = field(default_factory=dict)
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, repr=False)
    _relevant_dims: tuple[int, ...] = field(init=False, repr=False)
    _per_sample_lists: dict[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        validate_dims(self.in_dims, "in_dims")
        self._update_readings({})

    def plan(self, names: Sequence[str], values: Sequence[Any]) -> SplitPlan:
        """The plan for these arguments. Raises `StructureError` if it is ambiguous."""
        plan = self._plans.get(self._signature(names, values))
        if plan is None:
            plan = self._make_plan(tuple(names), values)
            if len(self._plans) >= 256:  # bounds the cache
                self._plans.clear()
            # Planning may have updated `readings`, which changes the signature.
            self._plans[self._signature(names, values)] = plan
        return plan

    def other_plans(
        self,
        names: Sequence[str],
        values: Sequence[Any],
        known: SplitPlan | None = None,
        *,
        failed: bool = False,
        sequence_first: bool = False,
    ) -> list[list[SplitPlan]]:
        """Plans for the readings that fit the sizes and use several replicas, in groups; likely ones first.

        There are none if `dim` is set, or for arguments that are already split. `known` is a plan that the probe did
        not confirm: because `forward` failed on parts (`failed`), or because the outputs of parts do not merge.
        `sequence_first` is whether the module has layers whose inputs are `[T, B, F]`.
        """
        batch = None if known is None else known.batch_size
        unconfirmed = None if batch is None else UnconfirmedReading(batch, failed, sequence_first)
        groups: dict[int, list[SplitPlan]] = {}
        specs = argument_specs(self.in_dims, names, self.dim)
        found = possible_readings(names, values, specs, self.readings, unconfirmed) if self.dim == 0 else ()
        for changes, batch, inferred in found:
            sizes, reading = self._balanced_sizes(batch), tuple(inferred.readings.items())
            plan = SplitPlan(batch, sizes, tuple(names), inferred.placements, reading)
            is_pre_split = any(isinstance(placement, PreSplit) for _, placement in inferred.leaves)
            if plan.parts > 1 and not is_pre_split and (known is None or plan.placements != known.placements):
                groups.setdefault(changes, []).append(plan)
            if sum(map(len, groups.values())) == MAX_READINGS:
                break
        return list(groups.values())

    def plan_with(
        self,
        names: Sequence[str],
        values: Sequence[Any],
        *,
        dim: int | None = None,
        in_dims: Mapping[str, Any] | None = None,
    ) -> SplitPlan | None:
        """The plan with another `dim` or further entries of `in_dims`; None if these do not fit or change nothing."""
        dims = self.in_dims
        if in_dims is not None:
            if not isinstance(dims, Mapping) and dims != AUTO:
                return None
            dims = {**(dims if isinstance(dims, Mapping) else {}), **in_dims}
        planner = Planner(self.num_replicas, self.dim if dim is None else dim, dims, self.min_shard, self.shares)
        try:
            plan = planner.plan(names, values)
        except StructureError:
            return None
        return plan if plan.parts > 1 and (planner.dim, dims) != (self.dim, self.in_dims) else None

    def keep(self, plan: SplitPlan) -> None:
        """Interpret later calls as `plan` does."""
        others = [path for path, reading in self.readings.items() if isinstance(reading, DimReading)]
        for path in others:
            if path[0] in plan.names:
                del self.readings[path]
        self._update_readings(dict(plan.reading))
        self._plans.clear()

    def rebalance(self, plan: SplitPlan, costs: Sequence[float]) -> SplitPlan:
        """Change the shard sizes so that shards have similar cost. `costs` has one entry per sample."""
        if len(costs) != plan.batch_size:
            raise StructureError(
                f"cost= returned {len(costs)} numbers for a batch of {plan.batch_size}. Return one number per sample."
            )
        if any(isinstance(placement, PreSplit) for placement in plan.placements):
            return plan  # the caller chose the sizes
        sizes = sizes_by_cost(costs, plan.parts, self.min_shard, self.shares)
        return plan if sizes == plan.sizes else replace(plan, sizes=sizes, split_fns=[])

    def _signature(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        reading, dims = self._per_sample_lists, self._relevant_dims
        return (
            *names,
            *[_signature_of(value, dims, reading.get(name)) for name, value in zip(names, values, strict=True)],
        )

    def _make_plan(self, names: tuple[str, ...], values: Sequence[Any]) -> SplitPlan:
        specs = argument_specs(self.in_dims, names, self.dim)
        batch, inferred = self._infer_batch_size(names, values, specs)
        sizes = (0,) if batch is None else self._balanced_sizes(batch)
        pre_split = [(path, placement) for path, placement in inferred.leaves if isinstance(placement, PreSplit)]
        if pre_split:
            sizes, batch = self._sizes_from_shards(pre_split, sizes, batch)
        if batch is not None and batch > 1:
            self._update_readings(inferred.readings)
        return SplitPlan(batch, sizes, names, inferred.placements, tuple(inferred.readings.items()))

    def _balanced_sizes(self, batch: int) -> tuple[int, ...]:
        return balanced_sizes(batch, self.num_replicas, self.min_shard, self.shares)

    def _update_readings(self, readings: Readings) -> None:
        self.readings.update(readings)
        self._per_sample_lists = _per_sample_tree(self.readings)
        dims = [reading.dim for reading in self.readings.values() if isinstance(reading, DimReading)]
        # The plan depends on these dims only: batches that differ in other dims share a plan.
        self._relevant_dims = tuple({self.dim, *collect_dims(self.in_dims), *[dim for dim in dims if dim is not None]})

    def _infer_batch_size(
        self, names: tuple[str, ...], values: Sequence[Any], specs: Sequence[DimSpec]
    ) -> tuple[int | None, InferredPlacements]:
        """Find the one size that matches every argument. Tensors are tried first, then lists, then tuples."""
        candidates = collect_candidates(names, values, specs, self.readings)
        for priority in (0, 1, 2):
            sizes = sorted({candidate.size for candidate in candidates if candidate.priority == priority})
            matches, mismatches = {}, {}
            for size in sizes:
                try:
                    matches[size] = infer_placements(names, values, specs, size, self.readings)
                except SizeMismatch as mismatch:
                    mismatches[size] = mismatch
            if len(matches) > 1:
                raise ambiguous_batch_size(candidates, matches, values, names)
            if matches:
                size, found = next(iter(matches.items()))
                if found.ambiguities and size > 1:  # a single sample is not split, so the ambiguity does not matter
                    raise found.ambiguities[0]
                return size, found
            if mismatches:
                raise size_mismatch_error(candidates, mismatches, values, names, self.dim)
        try:
            return None, infer_placements(names, values, specs, None, self.readings)
        except SizeMismatch as mismatch:
            raise inconsistent_reading(mismatch.path, mismatch.value, mismatch.reason) from None

    def _sizes_from_shards(
        self, pre_split: Sequence[tuple[Path, PreSplit]], sizes: tuple[int, ...], batch: int | None
    ) -> tuple[tuple[int, ...], int]:
        """The shard sizes given by `Shards` arguments."""
        count = len(pre_split[0][1].sizes) if batch is None else len(sizes)
        for path, placement in pre_split:
            if len(placement.sizes) != count or count > self.num_replicas:
                raise shard_count_mismatch(path, len(placement.sizes), min(count, self.num_replicas))
        measured = [(path, _known_sizes(placement)) for path, placement in pre_split]
        known = [(path, given) for path, given in measured if given and (batch is None or sum(given) == batch)]
        for path, given in known[1:]:
            if given != known[0][1]:
                raise shard_size_mismatch(path, given, *known[0])
        if known:
            return known[0][1], sum(known[0][1])
        # Sizes are unknown: count each part as one sample.
        return (sizes, batch) if batch is not None else ((1,) * count, count)


def _known_sizes(placement: PreSplit) -> tuple[int, ...]:
    """The part sizes, or an empty tuple if one of them is unknown."""
    sizes = tuple([size for size in placement.sizes if size is not None])
    return sizes if len(sizes) == len(placement.sizes) else ()


def _per_sample_tree(readings: Readings) -> dict[Any, Any]:
    """Paths of per-sample lists as nested dictionaries. The entries of such lists do not affect the plan."""
    tree: dict[Any, Any] = {}
    for path, reading in readings.items():
        if reading is PerSample:
            level = tree
            for key in path[:-1]:
                level = level.setdefault(key, {})
            level[path[-1]] = reading
    return tree


_SCALAR_TYPES = frozenset(SCALARS)


def _signature_of(value: Any, dims: tuple[int, ...], reading: Any = None) -> Any:
    """A hashable key of everything that the plan depends on. `reading` is the entry of `_per_sample_tree`."""
    cls = type(value)
    if cls is Tensor and value.layout is torch.strided and not value.is_nested:
        shape = value.shape
        return (len(shape), shape[0]) if dims == (0,) and shape else _shape_signature(shape, dims)
    if cls in _SCALAR_TYPES:
        return cls
    if isinstance(value, (Tensor, np.ndarray)):
        handler = handler_for(value)
        return (
            _shape_signature(value.shape, dims) if handler is None else (cls, handler, _size_or_error(handler, value))
        )
    if cls is dict:
        return (cls, tuple(value), _child_signatures(value, value.values(), dims, reading))
    if cls is list or cls is tuple:
        if reading is PerSample:
            return (cls, reading, len(value))
        types = tuple(map(type, value))
        if _SCALAR_TYPES.issuperset(types):
            return (cls, types)
        return (cls, _child_signatures(range(len(value)), value, dims, reading))
    return _signature_of_other(value, dims, reading)


def _child_signatures(
    keys: Iterable[Any], children: Iterable[Any], dims: tuple[int, ...], reading: Any
) -> tuple[Any, ...]:
    if not reading or reading is PerSample:
        return tuple([_signature_of(child, dims) for child in children])
    return tuple([_signature_of(child, dims, reading.get(key)) for key, child in zip(keys, children, strict=True)])


def _signature_of_other(value: Any, dims: tuple[int, ...], reading: Any) -> Any:
    cls = type(value)
    if cls is Whole:
        return cls
    if cls is Shards:
        return (cls, tuple([_signature_of(part, dims) for part in value.parts]))
    handler = handler_for(value)
    if handler is not None:
        return (cls, handler, _size_or_error(handler, value))
    node = flatten_one_level(value)
    if node is None:
        return (cls, contains_tensors(value))
    return (cls, tuple(node.keys), _child_signatures(node.keys, node.children, dims, reading))


def _size_or_error(handler: TypeHandler, value: Any) -> Any:
    """The number of samples, or the error message, which matters only if the value is split."""
    try:
        return handler.size(value)
    except StructureError as error:
        return str(error)


def _shape_signature(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(shape)
    return (rank, *[shape[dim] for dim in dims if -rank <= dim < rank])


def named_arguments(
    parameters: Sequence[str], rest: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and values of a call's arguments: positional arguments, then keyword arguments."""
    names = tuple(parameters[: len(args)])
    if len(names) < len(args):
        names += tuple(f"{rest or 'args'}.{index}" for index in range(len(args) - len(names)))
    return names + tuple(kwargs), (*args, *kwargs.values())
