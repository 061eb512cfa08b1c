"""Options of a wrapper: their checks, and how they apply to calls of one method."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.call.loss import TARGET_NAME, Loss, WithLoss
from instep.call.transparent import WRAPPED_TWICE_MESSAGE
from instep.devices import DeviceLike
from instep.engines.base import RankOptions
from instep.errors import StructureError, WrapError
from instep.probe.probe import Probe
from instep.replicas.clone import ModuleWrapper
from instep.replicas.state.rules import check_state_rule
from instep.structure.merge import Merger
from instep.structure.merge_rules import call_with_accepted, get_by_dotted_path
from instep.structure.plan import Planner, SplitPlan, named_arguments
from instep.structure.spec import AUTO, dims_by_name, strip_marks


def unwrap_module(module: nn.Module) -> nn.Module:
    """The module to wrap: that of another instep wrapper, which is closed, or `module` itself."""
    if isinstance(module, ModuleWrapper):
        module.close()
        return module.module
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        name = type(module).__name__
        raise WrapError(
            f"this module is already wrapped by {name}, which would split the batch too.\n"
            f"Wrap the plain module: instep.DataParallel(model.module)."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise WrapError(
            "a ScriptModule cannot be replicated, because its code is bound to its own parameters.\n"
            "Wrap the nn.Module that it was made from. torch.compile works with replicas."
        )
    if not isinstance(module, nn.Module):  # callers without a type checker
        raise WrapError(f"instep.DataParallel wraps an nn.Module, not a {type(module).__name__}.")
    return module


_DATA_PARALLEL_CODE = nn.DataParallel.forward.__code__
_TORCH_FRAMES = (3, 4)
"""Distance from the caller of our `forward` to `nn.DataParallel.forward`: torch has two or three frames in between."""


def refuse_outer_wrapper(depth: int) -> None:
    """`WrapError` if `nn.DataParallel` made this call, also where it has one device and passes the batch through.

    `depth` is the number of our own frames below the caller of `forward`. Only the two frames in which
    `nn.DataParallel` can be are looked at, because this runs at every call.
    """
    for frames in _TORCH_FRAMES:
        try:
            frame = sys._getframe(depth + frames)
        except ValueError:  # the stack is not that deep
            return
        if frame.f_code is _DATA_PARALLEL_CODE:
            raise WrapError(WRAPPED_TWICE_MESSAGE)


_WILDCARDS = frozenset("*?[")


def check_argument_names(
    option: str,
    table: Mapping[Any, Any],
    module: nn.Module,
    method: str,
    other_methods: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> None:
    """`StructureError` for a name in an option that no argument can have.

    A name may be meant for `method`, for one of `other_methods`, or for another method of the module's classes. `extra`
    are arguments of the call that the method does not receive.
    """
    parameters = _parameters(getattr(module, method))
    if parameters is None:
        return
    names = {*parameters, *extra, *_parameters_of_all_methods(module)}
    for other in other_methods:
        other_parameters = _parameters(getattr(module, other))
        if other_parameters is None:
            return
        names.update(other_parameters)
    for name in table:
        if isinstance(name, str) and not _can_match(name, names):
            raise StructureError(_unknown_name_message(option, name, method, [*parameters, *extra]))


def _can_match(pattern: str, names: Collection[str]) -> bool:
    """Whether a path or pattern can match one of these arguments or a leaf of it."""
    first = pattern.partition(".")[0]
    return not _WILDCARDS.isdisjoint(first) or first in names


def _unknown_name_message(option: str, name: str, method: str, arguments: Sequence[str]) -> str:
    first, dot, rest = name.partition(".")
    similar = difflib.get_close_matches(first, arguments, 1)
    hint = f"\nDid you mean {similar[0] + dot + rest!r}?" if similar else ""
    return (
        f"{option}={{{name!r}: ...}} names no argument of {method}: it has {', '.join(arguments) or 'none'}.{hint}\n"
        f"If another method takes it by **kwargs, name that method: methods=['...']."
    )


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of a function's parameters; None if it takes any (`**kwargs`) or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _parameters_of_all_methods(module: nn.Module) -> Iterator[str]:
    """Parameter names of all methods that the module's own classes define. `call` may run any of them."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return
        for function in vars(cls).values():
            if inspect.isfunction(function) and function.__name__ != "__init__":
                yield from _parameters(function) or ()


@dataclass(frozen=True)
class Options:
    """The arguments of `DataParallel`, but for the module."""

    device_ids: tuple[DeviceLike, ...] | None = None
    output_device: DeviceLike | None = None
    dim: int = 0
    engine: str = "auto"
    in_dims: Any = AUTO
    out_dims: Any = AUTO
    merge: Any = AUTO
    state: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    method_options: Mapping[str, Any] = field(default_factory=dict)
    """By method, the options of its own."""
    min_shard: int = 1
    shares: tuple[float, ...] = ()
    cost: str | Callable[..., Any] | None = None
    place: Mapping[str, DeviceLike] = field(default_factory=dict)
    on_unmerged_state: str = "error"
    hooks: str = "whole"
    private_copies: bool = False
    sync_batchnorm: bool = True
    probe: bool = True
    batches: str = "global"
    gather: str | None = None
    reduce: str | Callable[..., Any] | None = None
    restarts: int = 3
    timeout: float = 600.0

    def for_ranks(self, module: nn.Module) -> RankOptions:
        """What ranks exchange; `WrapError` if it does not fit the module."""
        has_loss, local = isinstance(module, WithLoss), self.batches == "local"
        if has_loss and self.gather == "sharded":
            raise WrapError(
                "gather='sharded' has no use with with_loss, which returns the loss of the whole batch on every rank.\n"
                "Leave gather out."
            )
        sharded = self.gather == "sharded" or (self.gather is None and local and not has_loss)
        return RankOptions(sharded, local, self.reduce)

    def for_method(self, name: str) -> Options:
        """The options of one method. The wrapper's describe `forward`; only names in `in_dims` apply to others too."""
        if name == "forward":
            return self
        names = self.in_dims if isinstance(self.in_dims, Mapping) else AUTO
        own: Any = {"in_dims": names, "out_dims": AUTO, "merge": AUTO, **self.method_options.get(name, {})}
        return replace(self, **own)


METHOD_OPTIONS = ("in_dims", "out_dims", "merge")


class MethodBinding:
    """How calls of one method are bound, planned, probed and merged."""

    def __init__(
        self, module: nn.Module, name: str, options: Options, replicas: int, *, sums_mean: bool = False
    ) -> None:
        """`sums_mean`: replicas return the sum and the divisor of the mean of torch that a criterion returns."""
        options = options.for_method(name)
        self.replica_method, merge = name, options.merge
        """The method that replicas run instead."""
        self._loss: Loss | None = None
        if isinstance(module, WithLoss) and name == "forward":
            self._loss, module = module._instep_loss, module.module
            self.replica_method = "_instep_mean_parts" if sums_mean else "_instep_parts"
        self.sums_mean = sums_mean
        self._is_sum = sums_mean or (self._loss is not None and self._loss.is_sum)
        self._has_rule = merge is not AUTO
        merge = "sum" if self._is_sum else merge
        self.parameters, self.var_positional = _positional_parameters(getattr(module, name))
        names = self.parameters if self._loss is None else [*self.parameters, TARGET_NAME]
        self._check_names(module, name, options)
        in_dims = dims_by_name(options.in_dims, names, self.var_positional)
        self.planner = Planner(replicas, options.dim, in_dims, options.min_shard, options.shares)
        self.merger = Merger.from_options(merge, options.out_dims, options.dim)
        self.probe = self._create_probe(options) if options.probe else None
        self.writes_arguments = False
        """Whether a call has written to an argument in place."""

    def _create_probe(self, options: Options) -> Probe:
        if self._loss is None or not self._is_sum:
            return Probe(self.replica_method, self.merger, options.min_shard)
        merger = Merger.from_options(AUTO, AUTO, options.dim)  # without the "sum" rule, so that the probe tests it
        check = self._loss.check
        return Probe(self.replica_method, merger, options.min_shard, additive_output="sum", check=check)

    @property
    def returns_torch_mean(self) -> bool:
        """Whether trials have shown that the criterion returns the mean of a loss of torch, which is not used yet."""
        return self._loss is not None and self._loss.trials.returned_mean and not (self.sums_mean or self._has_rule)

    @property
    def infers_torch_mean(self) -> bool:
        """Whether the probe has to infer the weights of such a mean, from the arguments of each call."""
        if not self.returns_torch_mean or self.probe is None:
            return False
        return bool(self.probe.last_record.ambiguous() or self.merger.weights)

    def reject_torch_mean(self) -> None:
        """The criterion returned something else: infer how its results merge from now on."""
        assert self._loss is not None
        self._loss.trials.add(returned_mean=False)

    def _check_names(self, module: nn.Module, method: str, options: Options) -> None:
        """`StructureError` for names in `in_dims` and `place` that no argument can have."""
        extra = [] if self._loss is None else self._loss.target_names()
        for option, table in (("in_dims", options.in_dims), ("place", options.place)):
            if isinstance(table, Mapping):
                check_argument_names(option, table, module, method, options.methods, extra)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values of the arguments of a call, positional ones first."""
        position = self._loss.target if self._loss is not None else None
        if not isinstance(position, int) or not -len(args) <= position < len(args):
            return named_arguments(self.parameters, self.var_positional, args, kwargs)
        position %= len(args)
        module_args = [*args[:position], *args[position + 1 :]]
        names, _ = named_arguments(self.parameters, self.var_positional, module_args, kwargs)
        return (*names[:position], TARGET_NAME, *names[position:]), (*args, *kwargs.values())

    def plan(self, names: Sequence[str], values: Sequence[Any], cost: str | Callable[..., Any] | None) -> SplitPlan:
        """How to split a call with these arguments. Undecided if the probe has to choose a reading first."""
        try:
            plan = self.planner.plan(names, values)
        except StructureError as error:
            first = None if self.probe is None else self._first_reading(error, names, values)
            if first is None:
                raise
            return replace(first, undecided=error.with_traceback(None))
        if cost is None or plan.parts == 1:
            return plan
        return self.planner.rebalance(plan, _sample_costs(cost, dict(zip(names, strip_marks(values), strict=True))))

    def _first_reading(self, error: StructureError, names: Sequence[str], values: Sequence[Any]) -> SplitPlan | None:
        """A plan that the probe can try for arguments whose sizes do not decide; None if there is none."""
        groups = self.planner.other_plans(names, values)
        if groups:
            return groups[0][0]
        lines = error.problem.lines if error.problem is not None else ()
        plans = (self.planner.plan_with(names, values, in_dims={line.path: line.spec}) for line in lines)
        return next((plan for plan in plans if plan is not None), None)

    def finish(self, merged: Any) -> Any:
        """The output of the call, from the merged outputs of the replicas."""
        return self._loss.finish(merged) if self._loss is not None and self._is_sum else merged


@dataclass(frozen=True)
class BoundCall:
    """One call of a method, with its plan."""

    method: str
    binding: MethodBinding
    plan: SplitPlan
    values: Sequence[Any]
    """The arguments, positional ones first."""
    positional: int
    local_sizes: tuple[int, ...] = ()
    """The sizes of the batches that the ranks have passed, if each has passed its own."""

    @property
    def args(self) -> Sequence[Any]:
        return self.values[: self.positional]

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(zip(self.plan.names[self.positional :], self.values[self.positional :], strict=True))


def _sample_costs(cost: str | Callable[..., Any], arguments: Mapping[str, Any]) -> list[float]:
    costs = call_with_accepted(cost, arguments) if callable(cost) else get_by_dotted_path(cost, arguments)
    if costs is None:
        raise StructureError(f"cost={cost!r} names no argument of the call: it has {', '.join(arguments)}.")
    numbers: list[float] = costs.tolist() if isinstance(costs, (Tensor, np.ndarray)) else list(costs)
    return numbers


def check_options(options: Options, module: nn.Module) -> None:
    """`WrapError` for an option whose value is wrong for any device."""
    for pattern, rule in options.state.items():
        check_state_rule(pattern, rule)
    for name in options.methods:
        if not callable(getattr(module, name, None)):
            raise WrapError(f"methods={list(options.methods)}: {type(module).__name__} has no method {name!r}.")
    for name, own in options.method_options.items():
        if not isinstance(own, Mapping) or not own.keys() <= set(METHOD_OPTIONS):
            raise WrapError(
                f"methods={{{name!r}: {own!r}}}: write a dictionary with the options of this method: "
                f"{', '.join(METHOD_OPTIONS)}."
            )
    if options.on_unmerged_state not in ("error", "warn"):
        raise WrapError(f"on_unmerged_state={options.on_unmerged_state!r}: write 'error' or 'warn'.")
    if options.batches not in ("global", "local"):
        raise WrapError(f"batches={options.batches!r}: write 'global' or 'local'.")
    if options.gather not in (None, "all", "sharded"):
        raise WrapError(f"gather={options.gather!r}: write 'all' or 'sharded'.")
    if not (options.reduce in (None, "bf16", "fp16") or callable(options.reduce)):
        raise WrapError(f"reduce={options.reduce!r}: write 'bf16', 'fp16' or a function (bucket, group).")
    if options.hooks not in ("whole", "per_replica"):
        raise WrapError(f"hooks={options.hooks!r}: write 'whole' or 'per_replica'.")


def check_shares(shares: Sequence[float], devices: int) -> None:
    """`WrapError` unless there is one positive number for each device."""
    if shares and (len(shares) != devices or not all(share > 0 for share in shares)):
        raise WrapError(f"shares={list(shares)}: write one positive number for each of the {devices} devices.")


def as_tuple(option: str, value: Any) -> tuple[Any, ...]:
    """The values of an option that takes a sequence; `WrapError` for a single value."""
    if isinstance(value, (str, int, float, torch.device)):
        raise WrapError(f"{option}={value!r}: write a list: {option}=[{value!r}].")
    return tuple(value)


def as_dict(option: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """The value of an option that takes a dictionary; `WrapError` for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise WrapError(f"{option}={value!r}: write a dictionary by name: {option}={{'name': ...}}.")
    return dict(value or {})


def _positional_parameters(function: Callable[..., Any]) -> tuple[list[str], str | None]:
    """Names of the positional parameters, and of `*args` if there is one."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return names, var_positional
