"""The verbs of `torch.nn.parallel`, with the same arguments, over any structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.devices import DeviceLike, module_device, move_to_device, resolve_device, resolve_devices, to_output_device
from instep.engines.base import raise_first_error
from instep.engines.thread_pool import ReplicaThreads
from instep.errors import StructureError
from instep.parallel import DataParallel
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.tensors import ParameterSharing
from instep.runtime.ambient import AmbientState
from instep.structure.infer import handler_for
from instep.structure.merge import merge
from instep.structure.spec import AUTO
from instep.structure.split import Parts, apply_plan, plan_value
from instep.structure.tree import map_tensors


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, in_dims: Any = AUTO) -> Parts:
    """Split any structure over devices: one part for each device that gets samples, on that device.

    >>> import torch
    >>> scatter({"x": torch.arange(3), "id": ["a", "b", "c"]}, ["cpu", "cpu"])
    [{'x': tensor([0, 1]), 'id': ['a', 'b']}, {'x': tensor([2]), 'id': ['c']}]
    """
    devices = [resolve_device(target) for target in target_gpus]
    if not devices:
        raise StructureError("scatter was given no devices: name at least one.")
    plan = plan_value(inputs, len(devices), dim, in_dims=in_dims)
    if plan.batch_size is None:  # nothing to split: every device gets all of it
        plan = replace(plan, sizes=(0,) * len(devices))
    parts = apply_plan(plan, (inputs,))
    return Parts([move_to_device(part[0], device) for part, device in zip(parts, devices, strict=False)], plan)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0, *, rules: Any = AUTO) -> Any:
    """Join the replicas' outputs on one device, by the rules of `DataParallel`'s `merge`.

    >>> import torch
    >>> gather([{"y": torch.tensor([0, 1])}, {"y": torch.tensor([2])}], "cpu")
    {'y': tensor([0, 1, 2])}
    """
    device = resolve_device(target_device)
    moved = [to_output_device(output, device) for output in outputs]
    if isinstance(outputs, Parts):
        moved = Parts(moved, outputs.plan)
    else:  # one tensor in several outputs is theirs each time, as torch's gather has it
        moved = [map_tensors(_shallow_alias, output) for output in moved]
    return merge(moved, merge=rules, dim=dim)


def _shallow_alias(tensor: Tensor) -> Tensor:
    """Another tensor of the same data; torch has views of ordinary tensors only."""
    return tensor.view_as(tensor) if handler_for(tensor) is None else tensor.clone()


def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[nn.Module]:
    """Copies of a module on each device whose parameters pass gradients back to `network`, unless `detach`."""
    made, home = [], module_device(network)
    for index, spec in enumerate(devices):
        replica = Replica(
            index,
            network,
            resolve_device(spec),
            ParameterSharing.COPY if detach else ParameterSharing.DIFFERENTIABLE_COPY,
            home=home,
        )
        if detach:
            for _, leaf in replica.trainable:
                leaf.requires_grad_(False)
        made.append(replica.module)
    return made


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Call each module on its input at the same time, each in a thread of its own; outputs in order."""
    keywords = list(kwargs_tup) if kwargs_tup is not None else [{} for _ in modules]
    if not len(modules) == len(inputs) == len(keywords):
        raise ValueError(f"{len(modules)} modules, {len(inputs)} inputs and {len(keywords)} kwargs: give one of each.")
    places = (
        [resolve_device(d) for d in devices]
        if devices is not None
        else [_device_of(m, x) for m, x in zip(modules, inputs, strict=True)]
    )
    if len(places) != len(modules):
        raise ValueError(f"{len(modules)} modules and {len(places)} devices: give one device for each module.")
    ambient = AmbientState.capture(places)

    def task(index: int) -> ReplicaResult:
        value = inputs[index]
        args = value if isinstance(value, (list, tuple)) else (value,)
        try:
            with ambient.enter(places[index]):
                return ReplicaResult(modules[index](*args, **keywords[index]))
        except BaseException as error:
            return ReplicaResult(error=error)

    lease = ReplicaThreads(places)
    try:
        outcomes = lease.run([partial(task, index) for index in range(len(modules))])
    finally:
        lease.close()
    raise_first_error([f"replica {i} on {place}" for i, place in enumerate(places)], outcomes)
    return [outcome.output for outcome in outcomes]


def _device_of(module: nn.Module, value: Any) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return value.device if isinstance(value, Tensor) else torch.device("cpu")


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """One parallel call of a module, without keeping replicas; `options` are those of `DataParallel`."""
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = resolve_devices(device_ids, module)
    with DataParallel(module, devices, output_device, dim, **options) as model:
        return model(*args, **(module_kwargs or {}))
