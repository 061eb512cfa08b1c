"""What was asked for when a module was wrapped, and what is known about each of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from instep.devices import DeviceLike
from instep.probe import Probe
from instep.structure.dims import AUTO, dims_by_name
from instep.structure.merge import Merger
from instep.structure.plan import Planner, named_arguments


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
    place: Mapping[str, DeviceLike] = field(default_factory=dict)
    on_unmerged_state: str = "error"
    private_copies: bool = False
    probe: bool = True


class Method:
    """What is known about one method of the module: the names of its arguments, and how its calls were read."""

    def __init__(self, function: Callable[..., Any], options: Options, replicas: int, name: str = "forward") -> None:
        self.parameters, self.rest = _parameter_names(function)
        in_dims = dims_by_name(options.in_dims, self.parameters, self.rest)
        self.planner = Planner(replicas, options.dim, in_dims, options.min_shard)
        self.merger = Merger.of(options.merge, options.out_dims, options.dim)
        self.probe = Probe(name, self.merger, options.min_shard) if options.probe else None

    def name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        return named_arguments(self.parameters, self.rest, args, kwargs)


def _parameter_names(function: Callable[..., Any]) -> tuple[list[str], str | None]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    return names, rest
