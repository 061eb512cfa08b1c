"""Deciding how a call is shared out: every leaf is cut along a dim, sliced as a column, or handed over whole.

Planning looks at types, keys and sizes only. It never reads tensor data, so it costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from instep.structure.dims import AUTO, Declared, declared_below, declared_dims
from instep.structure.fit import Fit, Memory, Misfit, fit, propose
from instep.structure.marks import Shards, Whole
from instep.structure.messages import ambiguous_sizes, misfit_message, wrong_shards
from instep.structure.roles import Ready, Role
from instep.structure.torch_kinds import tensor_kind
from instep.structure.tree import open_node
from instep.structure.types import kind_of


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

    @property
    def parts(self) -> int:
        return len(self.sizes)


def balanced(batch: int, replicas: int, min_shard: int = 1) -> tuple[int, ...]:
    """Sizes that sum to `batch`, differ by at most one, and use fewer replicas rather than less than `min_shard`.

    >>> balanced(10, 4)
    (3, 3, 2, 2)
    >>> balanced(3, 4)
    (1, 1, 1)
    >>> balanced(7, 4, min_shard=3)
    (4, 3)
    """
    active = max(1, min(replicas, batch // max(1, min_shard)))
    base, extra = divmod(batch, active)
    return tuple(base + (index < extra) for index in range(active))


@dataclass
class Planner:
    """Plans calls of one function, remembers how it read each list, and keeps the plans of structures it has seen."""

    replicas: int
    dim: int = 0
    in_dims: Any = AUTO
    min_shard: int = 1
    memory: Memory = field(default_factory=dict)
    _plans: dict[Any, SplitPlan] = field(default_factory=dict, repr=False)
    _dims: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Only these dims decide anything: batches that differ in a length elsewhere share one plan.
        self._dims = tuple({self.dim, *declared_dims(self.in_dims)})

    def plan(self, names: Sequence[str], values: Sequence[Any]) -> SplitPlan:
        """The plan for these arguments; `StructureError` where it would have to guess."""
        signature = (tuple(names), tuple([_sign(value, self._dims) for value in values]))
        plan = self._plans.get(signature)
        if plan is None:
            plan = self._decide(tuple(names), values)
            if len(self._plans) >= 256:  # lists of samples of many shapes: begin again rather than grow
                self._plans.clear()
            self._plans[signature] = plan
        return plan

    def _decide(self, names: tuple[str, ...], values: Sequence[Any]) -> SplitPlan:
        declared = declared_below(self.in_dims, names, self.dim)
        batch, chosen = self._choose(names, values, declared)
        if chosen is None:
            chosen = fit(names, values, declared, None, self.memory)
        sizes = (0,) if batch is None else balanced(batch, self.replicas, self.min_shard)
        ready = [(path, role) for path, role in chosen.leaves if isinstance(role, Ready)]
        if ready:
            sizes, batch = self._follow_shards(ready, sizes, batch)
        if batch is not None and batch > 1:
            self.memory.update(chosen.readings)
        return SplitPlan(batch, sizes, names, chosen.roles)

    def _choose(
        self, names: tuple[str, ...], values: Sequence[Any], declared: Sequence[Declared]
    ) -> tuple[int | None, Fit | None]:
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
            if len(fits) == 1:
                return next(iter(fits.items()))
            if len(fits) > 1:
                raise ambiguous_sizes(proposals, fits)
            if misfits:
                raise misfit_message(proposals, misfits, values, names, self.dim)
        return None, None

    def _follow_shards(
        self, ready: Sequence[tuple[Any, Ready]], sizes: tuple[int, ...], batch: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Sizes when some argument came already split: its number of parts decides."""
        path, first = ready[0]
        counts = {role.sizes for _, role in ready}
        if len({len(count) for count in counts}) > 1 or len(first.sizes) > self.replicas:
            raise wrong_shards(path, len(first.sizes), self.replicas)
        if batch is None:
            return first.sizes, sum(first.sizes)
        if len(first.sizes) != len(sizes):
            raise wrong_shards(path, len(first.sizes), len(sizes))
        return (first.sizes if sum(first.sizes) == batch else sizes), batch


def _sign(value: Any, dims: tuple[int, ...]) -> Any:
    """What planning depends on, hashable: the same signature gives the same plan."""
    cls = type(value)
    if isinstance(value, Tensor):
        kind = tensor_kind(value)
        return _sign_shape(value.shape, dims) if kind is None else (kind, kind.size(value))
    if cls is np.ndarray:
        return (cls, *_sign_shape(value.shape, dims))
    if cls is Whole:
        return cls
    if cls is Shards:
        return (cls, tuple(_sign(part, dims) for part in value.parts))
    kind = kind_of(cls)
    if kind is not None:
        return (cls, kind.size(value))
    node = open_node(value)
    if node is None:
        return cls
    return (cls, tuple(node.keys), tuple([_sign(child, dims) for child in node.children]))


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
