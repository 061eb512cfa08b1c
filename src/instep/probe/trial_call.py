"""A call whose samples a trial runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from instep.replicas.state.carried import CarriedValue
from instep.structure.plan import SplitPlan
from instep.structure.split import apply_plan


class TrialCall(NamedTuple):
    """The module and the arguments of a call."""

    module: nn.Module
    device: torch.device
    """The first device, on which trials run."""
    plan: SplitPlan
    values: Sequence[Any]
    """The arguments, positional ones first."""
    num_positional: int
    place: Callable[[Sequence[Any]], Sequence[Any]]
    """Moves the arguments of one part to the first device."""
    carried: Sequence[CarriedValue] = ()

    @property
    def batch_size(self) -> int:
        """The number of samples; 0 if no argument is batched."""
        return self.plan.batch_size or 0

    def shards(self) -> list[dict[str, Any]]:
        """The arguments of each replica, by name, where they are."""
        return [self.by_name(shard) for shard in apply_plan(self.plan, self.values)]

    def split(self, start: int, sizes: Sequence[int]) -> list[list[Any]]:
        """The arguments of parts of these sizes, from sample `start`, on the first device."""
        all_sizes = (start, *sizes, self.batch_size - start - sum(sizes))
        present = tuple([size for size in all_sizes if size])
        plan = SplitPlan(self.batch_size, present, self.plan.names, self.plan.placements)
        shards = apply_plan(plan, self.values)[1 if start else 0 :][: len(sizes)]
        return [list(self.place(shard)) for shard in shards]

    def by_name(self, values: Sequence[Any]) -> dict[str, Any]:
        """Arguments by name."""
        return dict(zip(self.plan.names, values, strict=True))

    def args_and_kwargs(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments as positional and keyword arguments."""
        count = self.num_positional
        return values[:count], dict(zip(self.plan.names[count:], values[count:], strict=True))
