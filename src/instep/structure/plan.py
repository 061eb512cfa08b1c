"""Deciding how a call is shared out: every leaf is cut along a dim, sliced as a column, or handed over whole.

Planning looks at types, keys and sizes only. It never reads tensor data, so it costs no synchronisation. (What a sorted
`PackedSequence` holds is said by its `batch_sizes`, which torch keeps on the host.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.errors import StructureError
from instep.structure.dims import AUTO, Declared, check_dims, declared_below, declared_dims
from instep.structure.fit import Fit, Memory, Misfit, fit, holds_tensors, own_kind, propose
from instep.structure.marks import Shards, Whole
from instep.structure.messages import ambiguous_sizes, misfit_message, unequal_shards, unread, wrong_shards
from instep.structure.roles import Ready, Role
from instep.structure.sizes import sizes_by_cost, sizes_for
from instep.structure.tree import SCALARS, Path, open_node
from instep.structure.types import Kind

Cutter: TypeAlias = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class SplitPlan:
    """A decision about one call: the number of samples, the sizes of the shards, and a role for every leaf."""

    batch: int | None
    """The number of samples, or None where nothing in the call is batched."""
    sizes: tuple[int, ...]
    """Samples of each active replica; `(0,)` where nothing is batched."""
    names: tuple[str, ...]
    """The name of each argument, positional ones first."""
    roles: tuple[Role, ...]
    """What happens to each argument, in the order of `names`."""
    cutters: list[Cutter] = field(default_factory=list, repr=False, compare=False)
    """What carries the roles out, made when the plan is first applied: a plan serves many calls."""
    shared: list[bool] = field(default_factory=list, repr=False, compare=False)
    """Whether replicas are given something in common that can be written to; found out once."""

    @property
    def parts(self) -> int:
        return len(self.sizes)


@dataclass
class Planner:
    """Plans calls of one function, remembers how it read each list, and keeps the plans of structures it has seen."""

    replicas: int
    dim: int = 0
    in_dims: Any = AUTO
    min_shard: int = 1
    shares: tuple[float, ...] = ()
    """How much of a batch each replica takes, in proportion; left out, all take alike."""
    memory: Memory = field(default_factory=dict)
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, repr=False)
    _dims: tuple[int, ...] = field(init=False, repr=False)
    _read: dict[Any, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_dims(self.in_dims, "in_dims")
        # Only these dims decide anything: batches that differ in a length elsewhere share one plan.
        self._dims = tuple({self.dim, *declared_dims(self.in_dims)})
        self._read = _by_key(self.memory)

    def plan(self, names: Sequence[str], values: Sequence[Any]) -> SplitPlan:
        """The plan for these arguments; `StructureError` where it would have to guess."""
        plan = self._plans.get(self._signature(names, values))
        if plan is None:
            plan = self._decide(tuple(names), values)
            if len(self._plans) >= 256:  # lists of samples of many shapes: begin again rather than grow
                self._plans.clear()
            # Signed anew: a list that has been read now is signed by that reading.
            self._plans[self._signature(names, values)] = plan
        return plan

    def weigh(self, plan: SplitPlan, costs: Sequence[float]) -> SplitPlan:
        """The plan with shards of about equal cost instead of about equal size; `costs` has one entry a sample."""
        if len(costs) != plan.batch:
            raise StructureError(f"cost= gave {len(costs)} numbers for a batch of {plan.batch}: it gives one a sample.")
        if any(isinstance(role, Ready) for role in plan.roles):
            return plan  # the caller has decided
        sizes = sizes_by_cost(costs, plan.parts, self.min_shard, self.shares)
        return plan if sizes == plan.sizes else replace(plan, sizes=sizes, cutters=[])

    def _signature(self, names: Sequence[str], values: Sequence[Any]) -> Any:
        read, dims = self._read, self._dims
        return (*names, *[_sign(value, dims, read.get(name)) for name, value in zip(names, values, strict=True)])

    def _decide(self, names: tuple[str, ...], values: Sequence[Any]) -> SplitPlan:
        declared = declared_below(self.in_dims, names, self.dim)
        batch, chosen = self._choose(names, values, declared)
        sizes = (0,) if batch is None else sizes_for(batch, self.replicas, self.min_shard, self.shares)
        ready = [(path, role) for path, role in chosen.leaves if isinstance(role, Ready)]
        if ready:
            sizes, batch = self._follow_shards(ready, sizes, batch)
        if batch is not None and batch > 1:
            self.memory.update(chosen.readings)
            self._read = _by_key(self.memory)
        return SplitPlan(batch, sizes, names, chosen.roles)

    def _choose(
        self, names: tuple[str, ...], values: Sequence[Any], declared: Sequence[Declared]
    ) -> tuple[int | None, Fit]:
        """The one size that fits every argument, looked for among tensors first, then lists, then tuples."""
        proposals = propose(names, values, declared, self.memory)
        for rank in (0, 1, 2):
            sizes = sorted({proposal.size for proposal in proposals if proposal.rank == rank})
            fits, misfits = {}, {}
            for size in sizes:
                try:
                    fits[size] = fit(names, values, declared, size, self.memory)
                except Misfit as misfit:
                    misfits[size] = misfit
            if len(fits) > 1:
                raise ambiguous_sizes(proposals, fits, values, names)
            if fits:
                size, found = next(iter(fits.items()))
                if found.doubts and size > 1:  # one sample is not split, however its lists are read
                    raise found.doubts[0]
                return size, found
            if misfits:
                raise misfit_message(proposals, misfits, values, names, self.dim)
        try:
            return None, fit(names, values, declared, None, self.memory)
        except Misfit as misfit:
            raise unread(misfit.path, misfit.value, misfit.why) from None

    def _follow_shards(
        self, ready: Sequence[tuple[Path, Ready]], sizes: tuple[int, ...], batch: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Sizes when some argument came already split: its number of parts decides."""
        count = len(ready[0][1].sizes) if batch is None else len(sizes)
        for where, role in ready:
            if len(role.sizes) != count or count > self.replicas:
                raise wrong_shards(where, len(role.sizes), min(count, self.replicas))
        measured = [(where, _whole_sizes(role)) for where, role in ready]
        known = [(where, given) for where, given in measured if given and (batch is None or sum(given) == batch)]
        for where, given in known[1:]:
            if given != known[0][1]:
                raise unequal_shards(where, given, *known[0])
        if known:
            return known[0][1], sum(known[0][1])
        # Nothing that can be counted: each part counts as one sample.
        return (sizes, batch) if batch is not None else ((1,) * count, count)


def _whole_sizes(role: Ready) -> tuple[int, ...]:
    """The sizes of ready-made parts, or none at all if one of them cannot be measured."""
    sizes = tuple([size for size in role.sizes if size is not None])
    return sizes if len(sizes) == len(role.sizes) else ()


def _by_key(memory: Memory) -> dict[Any, Any]:
    """The lists that were read as columns, whose entries decide nothing any more, by key within key."""
    tree: dict[Any, Any] = {}
    for path, reading in memory.items():
        if reading == "column":
            level = tree
            for key in path[:-1]:
                level = level.setdefault(key, {})
            level[path[-1]] = reading
    return tree


_PLAIN_TYPES = frozenset(SCALARS)


def _sign(value: Any, dims: tuple[int, ...], read: Any = None) -> Any:
    """What planning depends on, hashable: the same signature gives the same plan. `read` is what is known of a list."""
    cls = type(value)
    if cls is Tensor and value.layout is torch.strided and not value.is_nested:
        shape = value.shape
        return (len(shape), shape[0]) if dims == (0,) and shape else _sign_shape(shape, dims)
    if cls in _PLAIN_TYPES:
        return cls
    if isinstance(value, (Tensor, np.ndarray)):
        kind = own_kind(value)
        return _sign_shape(value.shape, dims) if kind is None else (cls, kind, _measured(kind, value))
    if cls is dict:
        return (cls, tuple(value), _sign_all(value, value.values(), dims, read))
    if cls is list or cls is tuple:
        if isinstance(read, str):
            return (cls, read, len(value))
        types = tuple(map(type, value))
        if _PLAIN_TYPES.issuperset(types):
            return (cls, types)
        return (cls, _sign_all(range(len(value)), value, dims, read))
    return _sign_other(value, dims, read)


def _sign_all(keys: Iterable[Any], children: Iterable[Any], dims: tuple[int, ...], read: Any) -> tuple[Any, ...]:
    if not read or isinstance(read, str):
        return tuple([_sign(child, dims) for child in children])
    return tuple([_sign(child, dims, read.get(key)) for key, child in zip(keys, children, strict=True)])


def _sign_other(value: Any, dims: tuple[int, ...], read: Any) -> Any:
    cls = type(value)
    if cls is Whole:
        return cls
    if cls is Shards:
        return (cls, tuple([_sign(part, dims) for part in value.parts]))
    kind = own_kind(value)
    if kind is not None:
        return (cls, kind, _measured(kind, value))
    node = open_node(value)
    if node is None:
        return (cls, holds_tensors(value))
    return (cls, tuple(node.keys), _sign_all(node.keys, node.children, dims, read))


def _measured(kind: Kind, value: Any) -> Any:
    """The number of samples; or why there is none, which only matters where it is to be split."""
    try:
        return kind.size(value)
    except StructureError as error:
        return str(error)


def _sign_shape(shape: Sequence[int], dims: tuple[int, ...]) -> tuple[int, ...]:
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
