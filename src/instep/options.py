"""What was asked for when a module was wrapped, and what is known about each of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.devices import DeviceLike
from instep.errors import StructureError, WrapError
from instep.loss import Loss, WithLoss
from instep.named import check_names
from instep.probe import Probe
from instep.structure.dims import AUTO, dims_by_name
from instep.structure.merge import Merger
from instep.structure.plan import Planner, SplitPlan, named_arguments
from instep.structure.rules import call_by_name, look_up


@dataclass(frozen=True)
class Options:
    """Everything that was asked for when a module was wrapped."""

    device_ids: tuple[DeviceLike, ...] | None = None
    output_device: DeviceLike | None = None
    dim: int = 0
    engine: str = "auto"
    in_dims: Any = AUTO
    out_dims: Any = AUTO
    merge: Any = AUTO
    state: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    min_shard: int = 1
    shares: tuple[float, ...] = ()
    cost: str | Callable[..., Any] | None = None
    place: Mapping[str, DeviceLike] = field(default_factory=dict)
    on_unmerged_state: str = "error"
    hooks: str = "whole"
    private_copies: bool = False
    sync_batchnorm: bool = True
    probe: bool = True
    restarts: int = 3
    timeout: float = 600.0


class Method:
    """What is known about one method of the module: the names of its arguments, and how its calls were read."""

    def __init__(self, module: nn.Module, name: str, options: Options, replicas: int) -> None:
        self.runs, merge = name, options.merge
        """The method that replicas run in its place."""
        self._loss: Loss | None = None
        if isinstance(module, WithLoss) and name == "forward":
            self._loss, self.runs, module = module._instep_loss, "_instep_parts", module.module
            merge = "sum" if self._loss.summed else merge
        self.parameters, self.rest = _parameter_names(getattr(module, name))
        names = self.parameters if self._loss is None else [*self.parameters, TARGET]
        self._check_names(module, name, options)
        in_dims = dims_by_name(options.in_dims, names, self.rest)
        self.planner = Planner(replicas, options.dim, in_dims, options.min_shard, options.shares)
        self.merger = Merger.of(merge, options.out_dims, options.dim)
        self.probe: Probe | None = None
        if options.probe and self._loss is not None and self._loss.summed:
            judged = Merger.of(AUTO, AUTO, options.dim)  # what we know of a loss is judged like anything else
            self.probe = Probe(self.runs, judged, options.min_shard, adds_up="sum", check=self._loss.check)
        elif options.probe:
            self.probe = Probe(self.runs, self.merger, options.min_shard)

    def _check_names(self, module: nn.Module, method: str, options: Options) -> None:
        """Refuse names of `in_dims` and `place` that no argument can have."""
        target = None if self._loss is None else TARGET if isinstance(self._loss.target, int) else self._loss.target
        extra = [target] if isinstance(target, str) else []
        for option, table in (("in_dims", options.in_dims), ("place", options.place)):
            if isinstance(table, Mapping):
                check_names(option, table, module, method, options.methods, extra)

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names and values of the arguments of a call."""
        at = self._loss.target if self._loss is not None else None
        if not isinstance(at, int) or not -len(args) <= at < len(args):
            return named_arguments(self.parameters, self.rest, args, kwargs)
        at %= len(args)
        names, _ = named_arguments(self.parameters, self.rest, [*args[:at], *args[at + 1 :]], kwargs)
        return (*names[:at], TARGET, *names[at:]), (*args, *kwargs.values())

    def whole(self, merged: Any) -> Any:
        """The output of the whole batch from what the replicas' outputs merged to."""
        return merged if self._loss is None else self._loss.of_whole(merged)

    def plan(self, names: Sequence[str], values: Sequence[Any], cost: str | Callable[..., Any] | None) -> SplitPlan:
        """How such a call is shared out."""
        plan = self.planner.plan(names, values)
        if cost is None or plan.parts == 1:
            return plan
        return self.planner.weigh(plan, _costs(cost, dict(zip(names, values, strict=True))))


@dataclass(frozen=True)
class Call:
    """One call of a method, planned."""

    method: str
    known: Method
    plan: SplitPlan
    values: Sequence[Any]
    """The arguments, positional ones first."""
    positional: int

    @property
    def args(self) -> Sequence[Any]:
        return self.values[: self.positional]

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(zip(self.plan.names[self.positional :], self.values[self.positional :], strict=True))


TARGET = "target"
"""The name of a positional argument that only the criterion sees."""


def _costs(cost: str | Callable[..., Any], arguments: Mapping[str, Any]) -> list[float]:
    found = call_by_name(cost, arguments) if callable(cost) else look_up(cost, arguments)
    if found is None:
        raise StructureError(f"cost={cost!r} names no argument of the call: it has {', '.join(arguments)}.")
    numbers: list[float] = found.tolist() if isinstance(found, (Tensor, np.ndarray)) else list(found)
    return numbers


def check_shares(shares: Sequence[float], devices: int) -> None:
    """Refuse shares that do not say of each device how much it takes."""
    if shares and (len(shares) != devices or not all(share > 0 for share in shares)):
        raise WrapError(f"shares={list(shares)}: give one number above zero for each of the {devices} devices.")


def listed(option: str, value: Any) -> tuple[Any, ...]:
    """An option that takes several values; `WrapError` where one was given alone."""
    if isinstance(value, (str, int, float, torch.device)):
        raise WrapError(f"{option}={value!r}: give a list: {option}=[{value!r}].")
    return tuple(value)


def tabled(option: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """An option that takes a dictionary of paths or patterns; `WrapError` for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise WrapError(f"{option}={value!r}: give a dictionary from names to what is meant: {option}={{'name': ...}}.")
    return dict(value or {})


def _parameter_names(function: Callable[..., Any]) -> tuple[list[str], str | None]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return names, rest
