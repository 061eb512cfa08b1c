"""Plan how the arguments of a call are split across replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.errors import StructureError
from instep.structure.infer import (
    InferredPlacements,
    Readings,
    SizeMismatch,
    collect_candidates,
    contains_tensors,
    handler_for,
    infer_placements,
)
from instep.structure.placements import Placement, PreSplit
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

SplitFn: TypeAlias = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class SplitPlan:
    """A decision about one call: the number of samples, the sizes of the shards, and a role for every leaf."""

    batch_size: int | None
    """The number of samples, or None where nothing in the call is batched."""
    sizes: tuple[int, ...]
    """Samples of each active replica; `(0,)` where nothing is batched."""
    names: tuple[str, ...]
    """The name of each argument, positional ones first."""
    placements: tuple[Placement, ...]
    """What happens to each argument, in the order of `names`."""
    split_fns: list[SplitFn] = field(default_factory=list, repr=False, compare=False)
    """What carries the roles out, made when the plan is first applied: a plan serves many calls."""
    shares_mutable_arguments: list[bool] = field(default_factory=list, repr=False, compare=False)
    """Whether replicas are given something in common that can be written to; found out once."""

    @property
    def parts(self) -> int:
        return len(self.sizes)


@dataclass
class Planner:
    """Plans calls of one function, remembers how it read each list, and keeps the plans of structures it has seen."""

    num_replicas: int
    dim: int = 0
    in_dims: Any = AUTO
    min_shard: int = 1
    shares: tuple[float, ...] = ()
    """How much of a batch each replica takes, in proportion; left out, all take alike."""
    readings: Readings = field(default_factory=dict)
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, repr=False)
    _relevant_dims: tuple[int, ...] = field(init=False, repr=False)
    _per_sample_lists: dict[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        validate_dims(self.in_dims, "in_dims")
        # Only these dims decide anything: batches that differ in a length elsewhere share one plan.
        self._relevant_dims = tuple({self.dim, *collect_dims(self.in_dims)})
        self._per_sample_lists = _per_sample_tree(self.readings)

    def plan(self, names: Sequence[str], values: Sequence[Any]) -> SplitPlan:
        """The plan for these arguments; `StructureError` where it would have to guess."""
        plan = self._plans.get(self._signature(names, values))
        if plan is None:
            plan = self._make_plan(tuple(names), values)
            if len(self._plans) >= 256:  # lists of samples of many shapes: begin again rather than grow
                self._plans.clear()
            # Signed anew: a list that has been read now is signed by that reading.
            self._plans[self._signature(names, values)] = plan
        return plan

    def rebalance(self, plan: SplitPlan, costs: Sequence[float]) -> SplitPlan:
        """The plan with shards of about equal cost instead of about equal size; `costs` has one entry a sample."""
        if len(costs) != plan.batch_size:
            raise StructureError(
                f"cost= gave {len(costs)} numbers for a batch of {plan.batch_size}: it gives one a sample."
            )
        if any(isinstance(role, PreSplit) for role in plan.placements):
            return plan  # the caller has decided
        sizes = sizes_by_cost(costs, plan.parts, self.min_shard, self.shares)
        return plan if sizes == plan.sizes else replace(plan, sizes=sizes, split_fns=[])

    def _signature(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        read, dims = self._per_sample_lists, self._relevant_dims
        return (
            *names,
            *[_signature_of(value, dims, read.get(name)) for name, value in zip(names, values, strict=True)],
        )

    def _make_plan(self, names: tuple[str, ...], values: Sequence[Any]) -> SplitPlan:
        declared = argument_specs(self.in_dims, names, self.dim)
        batch, chosen = self._infer_batch_size(names, values, declared)
        sizes = (0,) if batch is None else balanced_sizes(batch, self.num_replicas, self.min_shard, self.shares)
        ready = [(path, role) for path, role in chosen.leaves if isinstance(role, PreSplit)]
        if ready:
            sizes, batch = self._sizes_from_shards(ready, sizes, batch)
        if batch is not None and batch > 1:
            self.readings.update(chosen.readings)
            self._per_sample_lists = _per_sample_tree(self.readings)
        return SplitPlan(batch, sizes, names, chosen.placements)

    def _infer_batch_size(
        self, names: tuple[str, ...], values: Sequence[Any], declared: Sequence[DimSpec]
    ) -> tuple[int | None, InferredPlacements]:
        """The one size that fits every argument, looked for among tensors first, then lists, then tuples."""
        proposals = collect_candidates(names, values, declared, self.readings)
        for rank in (0, 1, 2):
            sizes = sorted({proposal.size for proposal in proposals if proposal.priority == rank})
            fits, misfits = {}, {}
            for size in sizes:
                try:
                    fits[size] = infer_placements(names, values, declared, size, self.readings)
                except SizeMismatch as misfit:
                    misfits[size] = misfit
            if len(fits) > 1:
                raise ambiguous_batch_size(proposals, fits, values, names)
            if fits:
                size, found = next(iter(fits.items()))
                if found.ambiguities and size > 1:  # one sample is not split, however its lists are read
                    raise found.ambiguities[0]
                return size, found
            if misfits:
                raise size_mismatch_error(proposals, misfits, values, names, self.dim)
        try:
            return None, infer_placements(names, values, declared, None, self.readings)
        except SizeMismatch as misfit:
            raise inconsistent_reading(misfit.path, misfit.value, misfit.reason) from None

    def _sizes_from_shards(
        self, ready: Sequence[tuple[Path, PreSplit]], sizes: tuple[int, ...], batch: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Sizes when some argument came already split: its number of parts decides."""
        count = len(ready[0][1].sizes) if batch is None else len(sizes)
        for where, role in ready:
            if len(role.sizes) != count or count > self.num_replicas:
                raise shard_count_mismatch(where, len(role.sizes), min(count, self.num_replicas))
        measured = [(where, _known_sizes(role)) for where, role in ready]
        known = [(where, given) for where, given in measured if given and (batch is None or sum(given) == batch)]
        for where, given in known[1:]:
            if given != known[0][1]:
                raise shard_size_mismatch(where, given, *known[0])
        if known:
            return known[0][1], sum(known[0][1])
        # Nothing that can be counted: each part counts as one sample.
        return (sizes, batch) if batch is not None else ((1,) * count, count)


def _known_sizes(role: PreSplit) -> tuple[int, ...]:
    """The sizes of ready-made parts, or none at all if one of them cannot be measured."""
    sizes = tuple([size for size in role.sizes if size is not None])
    return sizes if len(sizes) == len(role.sizes) else ()


def _per_sample_tree(memory: Readings) -> dict[Any, Any]:
    """The lists that were read as columns, whose entries decide nothing any more, by key within key."""
    tree: dict[Any, Any] = {}
    for path, reading in memory.items():
        if reading == "column":
            level = tree
            for key in path[:-1]:
                level = level.setdefault(key, {})
            level[path[-1]] = reading
    return tree


_SCALAR_TYPES = frozenset(SCALARS)


def _signature_of(value: Any, dims: tuple[int, ...], read: Any = None) -> Any:
    """What planning depends on, hashable: the same signature gives the same plan. `read` is what is known of a list."""
    cls = type(value)
    if cls is Tensor and value.layout is torch.strided and not value.is_nested:
        shape = value.shape
        return (len(shape), shape[0]) if dims == (0,) and shape else _shape_signature(shape, dims)
    if cls in _SCALAR_TYPES:
        return cls
    if isinstance(value, (Tensor, np.ndarray)):
        kind = handler_for(value)
        return _shape_signature(value.shape, dims) if kind is None else (cls, kind, _size_or_error(kind, value))
    if cls is dict:
        return (cls, tuple(value), _child_signatures(value, value.values(), dims, read))
    if cls is list or cls is tuple:
        if isinstance(read, str):
            return (cls, read, len(value))
        types = tuple(map(type, value))
        if _SCALAR_TYPES.issuperset(types):
            return (cls, types)
        return (cls, _child_signatures(range(len(value)), value, dims, read))
    return _signature_of_other(value, dims, read)


def _child_signatures(
    keys: Iterable[Any], children: Iterable[Any], dims: tuple[int, ...], read: Any
) -> tuple[Any, ...]:
    if not read or isinstance(read, str):
        return tuple([_signature_of(child, dims) for child in children])
    return tuple([_signature_of(child, dims, read.get(key)) for key, child in zip(keys, children, strict=True)])


def _signature_of_other(value: Any, dims: tuple[int, ...], read: Any) -> Any:
    cls = type(value)
    if cls is Whole:
        return cls
    if cls is Shards:
        return (cls, tuple([_signature_of(part, dims) for part in value.parts]))
    kind = handler_for(value)
    if kind is not None:
        return (cls, kind, _size_or_error(kind, value))
    node = flatten_one_level(value)
    if node is None:
        return (cls, contains_tensors(value))
    return (cls, tuple(node.keys), _child_signatures(node.keys, node.children, dims, read))


def _size_or_error(kind: TypeHandler, value: Any) -> Any:
    """The number of samples; or why there is none, which only matters where it is to be split."""
    try:
        return kind.size(value)
    except StructureError as error:
        return str(error)


def _shape_signature(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(shape)
    return (rank, *[shape[dim] for dim in dims if -rank <= dim < rank])


def named_arguments(
    parameters: Sequence[str], rest: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """The names and values of a call's arguments: positional ones by the signature, then keywords as written."""
    names = tuple(parameters[: len(args)])
    if len(names) < len(args):
        names += tuple(f"{rest or 'args'}.{index}" for index in range(len(args) - len(names)))
    return names + tuple(kwargs), (*args, *kwargs.values())
