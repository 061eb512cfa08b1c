"""The functions of `torch.nn.parallel`, with the same arguments, for any structure of arguments and outputs."""

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
from instep.structure.merge import merge
from instep.structure.spec import AUTO
from instep.structure.split import Parts, apply_plan, plan_value
from instep.structure.tree import map_tensors
from instep.structure.types_torch import handler_for


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, in_dims: Any = AUTO) -> Parts:
    """Split a structure into one part for each device and move the parts there.

    Batches with fewer samples than devices give fewer parts.

    >>> import torch
    >>> scatter({"x": torch.arange(3), "id": ["a", "b", "c"]}, ["cpu", "cpu"])
    [{'x': tensor([0, 1]), 'id': ['a', 'b']}, {'x': tensor([2]), 'id': ['c']}]

    Args:
        inputs: The structure to split.
        target_gpus: The devices; not only GPUs.
        dim: The batch dimension of tensors.
        in_dims: The batch dimension of leaves, as for `DataParallel`.
    """
    devices = [resolve_device(target) for target in target_gpus]
    if not devices:
        raise StructureError("scatter got no devices: name at least one in target_gpus.")
    plan = plan_value(inputs, len(devices), dim, in_dims=in_dims)
    if plan.batch_size is None:  # nothing is batched: every device gets all of it
        plan = replace(plan, sizes=(0,) * len(devices))
    parts = apply_plan(plan, (inputs,))
    return Parts([move_to_device(part[0], device) for part, device in zip(parts, devices, strict=False)], plan)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0, *, rules: Any = AUTO) -> Any:
    """Merge the outputs of replicas on one device.

    >>> import torch
    >>> gather([{"y": torch.tensor([0, 1])}, {"y": torch.tensor([2])}], "cpu")
    {'y': tensor([0, 1, 2])}

    Args:
        outputs: One output for each replica.
        target_device: The device of the result.
        dim: The batch dimension of tensors.
        rules: Merge rules, as for `merge` of `DataParallel`.
    """
    device = resolve_device(target_device)
    moved = [to_output_device(output, device) for output in outputs]
    if isinstance(outputs, Parts):
        moved = Parts(moved, outputs.plan)
    else:  # as in torch's gather, a tensor that is in several outputs counts each time
        moved = [map_tensors(_shallow_alias, output) for output in moved]
    return merge(moved, merge=rules, dim=dim)


def _shallow_alias(tensor: Tensor) -> Tensor:
    """A distinct tensor with the same data: a view, or a copy of a type that has no views."""
    return tensor.view_as(tensor) if handler_for(tensor) is None else tensor.clone()


def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[nn.Module]:
    """Copy a module to each device.

    Gradients of the copies' parameters flow back to the parameters of `network`, unless `detach` is true.
    """
    copies, source_device = [], module_device(network)
    for index, spec in enumerate(devices):
        replica = Replica(
            index,
            network,
            resolve_device(spec),
            ParameterSharing.COPY if detach else ParameterSharing.DIFFERENTIABLE_COPY,
            source_device=source_device,
        )
        if detach:
            for _, leaf in replica.trainable:
                leaf.requires_grad_(False)
        copies.append(replica.module)
    return copies


def parallel_apply(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Call each module on its input, concurrently, in one thread for each. Returns the outputs in order."""
    keywords = list(kwargs_tup) if kwargs_tup is not None else [{} for _ in modules]
    if not len(modules) == len(inputs) == len(keywords):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules, {len(inputs)} inputs and {len(keywords)} kwargs: "
            f"pass the same number of each."
        )
    replica_devices = (
        [resolve_device(device) for device in devices]
        if devices is not None
        else [_device_of(module, value) for module, value in zip(modules, inputs, strict=True)]
    )
    if len(replica_devices) != len(modules):
        raise ValueError(
            f"parallel_apply got {len(modules)} modules and {len(replica_devices)} devices: "
            f"pass one device for each module."
        )
    ambient = AmbientState.capture(replica_devices)

    def task(index: int) -> ReplicaResult:
        value = inputs[index]
        args = value if isinstance(value, (list, tuple)) else (value,)
        try:
            with ambient.enter(replica_devices[index]):
                return ReplicaResult(modules[index](*args, **keywords[index]))
        except BaseException as error:
            return ReplicaResult(error=error)

    threads = ReplicaThreads(replica_devices)
    try:
        results = threads.run([partial(task, index) for index in range(len(modules))])
    finally:
        threads.close()
    raise_first_error([f"replica {i} on {device}" for i, device in enumerate(replica_devices)], results)
    return [result.output for result in results]


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
    """Run one parallel call of a module and release the replicas. `options` are those of `DataParallel`."""
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = resolve_devices(device_ids, module)
    with DataParallel(module, devices, output_device, dim, **options) as model:
        return model(*args, **(module_kwargs or {}))
