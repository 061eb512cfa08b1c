"""Options of a wrapper, and the binding of a method's arguments to names."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.call.loss import Loss, WithLoss
from instep.call.transparent import WRAPPED_TWICE_MESSAGE
from instep.devices import DeviceLike
from instep.errors import StructureError, WrapError
from instep.probe.probe import Probe
from instep.replicas.clone import ModuleWrapper
from instep.replicas.state.rules import check_state_rule
from instep.structure.merge import Merger
from instep.structure.merge_rules import call_with_accepted, get_by_dotted_path
from instep.structure.plan import Planner, SplitPlan, named_arguments
from instep.structure.spec import AUTO, dims_by_name


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module to wrap, or the reason why it cannot be."""
    if isinstance(module, ModuleWrapper):
        module.close()
        return module.module
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        name = type(module).__name__
        raise WrapError(
            f"this module is wrapped by {name} already: wrap the bare one, instep.DataParallel(model.module)."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            "a ScriptModule's code is bound to its own parameters, so it has no replicas.\n"
            "Wrap the nn.Module that it was made from; torch.compile it instead of scripting it."
        )
    if not isinstance(module, nn.Module):  # types do not hold at run time
        raise WrapError(f"instep.DataParallel wraps an nn.Module, not a {type(module).__name__}.")
    return module


_DATA_PARALLEL_CODE = nn.DataParallel.forward.__code__
_FRAMES_BETWEEN = (3, 4)
"""How far up from ours nn.DataParallel's forward would be: torch makes two or three calls in between."""


def refuse_outer_wrapper(ours: int) -> None:
    """Being called by nn.DataParallel means that the batch was split once already.

    Where torch finds one device or none it only passes the batch through; what would go wrong elsewhere is said there
    too. It is asked at every call (but of one replica on the CPU that is being compiled, which has frames of another
    kind), so only the frames are looked at in which nn.DataParallel would be: so many calls of ours away, and those of
    torch.
    """
    for calls in _FRAMES_BETWEEN:
        try:
            frame = sys._getframe(ours + calls)
        except ValueError:  # nobody is that far up
            return
        if frame.f_code is _DATA_PARALLEL_CODE:
            raise WrapError(WRAPPED_TWICE_MESSAGE)


_WILDCARDS = frozenset("*?[")


def check_argument_names(
    option: str,
    table: Mapping[Any, Any],
    module: nn.Module,
    method: str,
    others: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> None:
    """`StructureError` for a name of an option that no argument of a method can have.

    `others` are methods that run in parallel too, and may be what the name was written for; `extra` are arguments that
    the method does not see.
    """
    own = _parameters(getattr(module, method))
    if own is None:
        return
    known = {*own, *extra, *_other_method_parameters(module)}
    for other in others:
        names = _parameters(getattr(module, other))
        if names is None:
            return
        known.update(names)
    for name in table:
        if isinstance(name, str) and not _can_match(name, known):
            raise StructureError(_unknown_name_message(option, name, method, [*own, *extra]))


def _can_match(name: str, known: Iterable[str]) -> bool:
    """Whether a path or pattern may lead to or into one of these arguments."""
    first = name.partition(".")[0]
    return not _WILDCARDS.isdisjoint(first) or first in known


def _unknown_name_message(option: str, name: str, method: str, own: Sequence[str]) -> str:
    first, dot, below = name.partition(".")
    near = difflib.get_close_matches(first, own, 1)
    meant = f"\nDid you mean {near[0] + dot + below!r}?" if near else ""
    return (
        f"{option}={{{name!r}: ...}} names no argument of {method}: it has {', '.join(own) or 'none'}.{meant}\n"
        f"If it is for a method that takes it by **kwargs, say which one: methods=['...']."
    )


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """The names that arguments of a function can have; None where they may have any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _other_method_parameters(module: nn.Module) -> Iterator[str]:
    """The names of arguments of the methods that a module's own classes have: `call` may run any of them."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return
        for function in vars(cls).values():
            if inspect.isfunction(function) and function.__name__ != "__init__":
                yield from _parameters(function) or ()


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


class MethodBinding:
    """What is known about one method of the module: the names of its arguments, and how its calls were read."""

    def __init__(self, module: nn.Module, name: str, options: Options, replicas: int) -> None:
        self.replica_method, merge = name, options.merge
        """The method that replicas run in its place."""
        self._loss: Loss | None = None
        if isinstance(module, WithLoss) and name == "forward":
            self._loss, self.replica_method, module = module._instep_loss, "_instep_parts", module.module
            merge = "sum" if self._loss.is_sum else merge
        self.parameters, self.var_positional = _parameter_names(getattr(module, name))
        names = self.parameters if self._loss is None else [*self.parameters, TARGET_NAME]
        self._check_names(module, name, options)
        in_dims = dims_by_name(options.in_dims, names, self.var_positional)
        self.planner = Planner(replicas, options.dim, in_dims, options.min_shard, options.shares)
        self.merger = Merger.from_options(merge, options.out_dims, options.dim)
        self.probe: Probe | None = None
        if options.probe and self._loss is not None and self._loss.is_sum:
            judged = Merger.from_options(AUTO, AUTO, options.dim)  # what we know of a loss is judged like anything else
            self.probe = Probe(
                self.replica_method, judged, options.min_shard, additive_output="sum", check=self._loss.check
            )
        elif options.probe:
            self.probe = Probe(self.replica_method, self.merger, options.min_shard)

    def _check_names(self, module: nn.Module, method: str, options: Options) -> None:
        """Refuse names of `in_dims` and `place` that no argument can have."""
        target = (
            None if self._loss is None else TARGET_NAME if isinstance(self._loss.target, int) else self._loss.target
        )
        extra = [target] if isinstance(target, str) else []
        for option, table in (("in_dims", options.in_dims), ("place", options.place)):
            if isinstance(table, Mapping):
                check_argument_names(option, table, module, method, options.methods, extra)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The names and values of the arguments of a call."""
        at = self._loss.target if self._loss is not None else None
        if not isinstance(at, int) or not -len(args) <= at < len(args):
            return named_arguments(self.parameters, self.var_positional, args, kwargs)
        at %= len(args)
        names, _ = named_arguments(self.parameters, self.var_positional, [*args[:at], *args[at + 1 :]], kwargs)
        return (*names[:at], TARGET_NAME, *names[at:]), (*args, *kwargs.values())

    def finish(self, merged: Any) -> Any:
        """The output of the whole batch from what the replicas' outputs merged to."""
        return merged if self._loss is None else self._loss.finish(merged)

    def plan(self, names: Sequence[str], values: Sequence[Any], cost: str | Callable[..., Any] | None) -> SplitPlan:
        """How such a call is shared out."""
        plan = self.planner.plan(names, values)
        if cost is None or plan.parts == 1:
            return plan
        return self.planner.rebalance(plan, _sample_costs(cost, dict(zip(names, values, strict=True))))


@dataclass(frozen=True)
class BoundCall:
    """One call of a method, planned."""

    method: str
    binding: MethodBinding
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


TARGET_NAME = "target"
"""The name of a positional argument that only the criterion sees."""


def _sample_costs(cost: str | Callable[..., Any], arguments: Mapping[str, Any]) -> list[float]:
    found = call_with_accepted(cost, arguments) if callable(cost) else get_by_dotted_path(cost, arguments)
    if found is None:
        raise StructureError(f"cost={cost!r} names no argument of the call: it has {', '.join(arguments)}.")
    numbers: list[float] = found.tolist() if isinstance(found, (Tensor, np.ndarray)) else list(found)
    return numbers


def check_options(options: Options, module: nn.Module) -> None:
    """`WrapError` for an option whose value is wrong for any device."""
    for pattern, rule in options.state.items():
        check_state_rule(pattern, rule)
    for name in options.methods:
        if not callable(getattr(module, name, None)):
            raise WrapError(f"methods={list(options.methods)}: {type(module).__name__} has no method {name!r}.")
    if options.on_unmerged_state not in ("error", "warn"):
        raise WrapError(f"on_unmerged_state={options.on_unmerged_state!r}: write 'error' or 'warn'.")
    if options.hooks not in ("whole", "per_replica"):
        raise WrapError(f"hooks={options.hooks!r}: write 'whole' or 'per_replica'.")


def check_shares(shares: Sequence[float], devices: int) -> None:
    """Refuse shares that do not say of each device how much it takes."""
    if shares and (len(shares) != devices or not all(share > 0 for share in shares)):
        raise WrapError(f"shares={list(shares)}: give one number above zero for each of the {devices} devices.")


def as_tuple(option: str, value: Any) -> tuple[Any, ...]:
    """An option that takes several values; `WrapError` where one was given alone."""
    if isinstance(value, (str, int, float, torch.device)):
        raise WrapError(f"{option}={value!r}: give a list: {option}=[{value!r}].")
    return tuple(value)


def as_dict(option: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
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
