"""The functions of `torch.nn.parallel`, with the same arguments, for any structure of arguments and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from instep.call.options import as_tuple
from instep.devices import DeviceLike, module_device, move_to_device, resolve_device, resolve_devices, to_output_device
from instep.engines.base import raise_first_error
from instep.engines.thread_pool import ReplicaThreads
from instep.errors import MergeError, StructureError
from instep.parallel import DataParallel
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.tensors import ParameterSharing
from instep.runtime.ambient import AmbientState
from instep.structure.infer import count_samples, size_along
from instep.structure.merge import merge as merge_parts
from instep.structure.problems import set_problems
from instep.structure.shapes import is_dense
from instep.structure.spec import AUTO
from instep.structure.split import Parts, apply_plan, infer_part_sizes, plan_value
from instep.structure.tree import map_tensors, tensors_in
from instep.structure.types_torch import handler_for


def scatter(inputs: Any, target_gpus: Sequence[DeviceLike], dim: int = 0, *, in_dims: Any = AUTO) -> Parts:
    """Split a structure into one part for each device and move the parts there.

    Batches with fewer samples than devices give fewer parts. `scatter((args, kwargs), devices)` splits the arguments
    of a call together.

    >>> import torch
    >>> scatter({"x": torch.arange(3), "id": ["a", "b", "c"]}, ["cpu", "cpu"])
    [{'x': tensor([0, 1]), 'id': ['a', 'b']}, {'x': tensor([2]), 'id': ['c']}]

    Args:
        inputs: The structure to split.
        target_gpus: The devices; not only GPUs.
        dim: The batch dimension of tensors.
        in_dims: The batch dimension of leaves, as for `DataParallel`.
    """
    devices = [resolve_device(target) for target in as_tuple("target_gpus", target_gpus)]
    if not devices:
        raise StructureError("scatter got no devices: name at least one in target_gpus.")
    plan = plan_value(inputs, len(devices), dim, in_dims=in_dims)
    if plan.batch_size is None:  # nothing is batched: every device gets all of it
        plan = replace(plan, sizes=(0,) * len(devices))
    parts = apply_plan(plan, (inputs,))
    return Parts([move_to_device(part[0], device) for part, device in zip(parts, devices, strict=False)], plan)


def gather(outputs: Sequence[Any], target_device: DeviceLike, dim: int = 0, *, merge: Any = AUTO) -> Any:
    """Merge the outputs of replicas on one device.

    As in torch, every tensor is concatenated along `dim`, 0-d tensors give a vector with one entry for each output, and
    lists that hold tensors are structures. Other lists have one entry per sample and are concatenated. Parts of
    `scatter` are restored to what was split.

    >>> import torch
    >>> gather([{"y": torch.tensor([0, 1])}, {"y": torch.tensor([2])}], "cpu")
    {'y': tensor([0, 1, 2])}

    Args:
        outputs: One output for each replica.
        target_device: The device of the result; -1 is the CPU, as in torch.
        dim: The batch dimension of tensors.
        merge: Merge rules, as for `DataParallel`; 0-d tensors then need a rule too.
    """
    device = torch.device("cpu") if target_device == -1 else resolve_device(target_device)
    moved = [to_output_device(output, device) for output in outputs]
    if isinstance(outputs, Parts):
        return merge_parts(Parts(moved, outputs.plan), merge=merge, dim=dim)
    if not moved:
        raise MergeError("gather got no outputs: pass one for each replica.")
    sizes = _sizes(moved, dim)
    expand = merge == AUTO and dim in (0, -1)
    moved = [map_tensors(partial(_gatherable, expand=expand), output) for output in moved]
    try:
        return merge_parts(moved, sizes, merge=merge, out_dims=dim, dim=dim)
    except MergeError as error:
        if error.problems:  # their hints are about shards of a call
            set_problems(error, [replace(problem, hints=()) for problem in error.problems])
        raise


def _gatherable(tensor: Tensor, expand: bool) -> Tensor:
    """A distinct tensor with the same data, so that a tensor which is in several outputs counts each time.

    A view, or a copy of a type that has no views. A 0-d tensor gets a dim if `expand`.
    """
    if handler_for(tensor) is not None:
        return tensor.clone()
    return tensor[None] if expand and tensor.dim() == 0 else tensor.view_as(tensor)


def _sizes(parts: Sequence[Any], dim: int) -> list[int]:
    """The number of samples in each part, from values outside lists, tensors in lists, or the lengths of lists."""
    sizes = [count_samples(part, dim, count_lists=False) for part in parts]
    if None in sizes:
        tensors = [[tensor for tensor in tensors_in(part) if is_dense(tensor)] for part in parts]
        sizes = [next((t.shape[dim] for t in found if size_along(t, dim) is not None), None) for found in tensors]
    return infer_part_sizes(parts, dim) if None in sizes else [size for size in sizes if size is not None]


def replicate(network: nn.Module, devices: Sequence[DeviceLike], detach: bool = False) -> list[nn.Module]:
    """Copy a module to each device.

    Gradients of the copies' parameters flow back to the parameters of `network`, unless `detach` is true.
    """
    copies, source_device = [], module_device(network)
    for index, spec in enumerate(as_tuple("devices", devices)):
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
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[DeviceLike | None] | None = None,
) -> list[Any]:
    """Call each module on its input, concurrently, in one thread for each. Returns the outputs in order.

    Args:
        modules: The modules.
        inputs: For each module, a list or tuple of its positional arguments, or its only argument.
        kwargs_tup: The keyword arguments of each module, or None.
        devices: The device of each module, or None for that of its parameters or input.
    """
    specs = [None] * len(modules) if devices is None else as_tuple("devices", devices)
    keywords = [dict(kwargs or {}) for kwargs in kwargs_tup] if kwargs_tup is not None else [{} for _ in modules]
    for name, given in (("inputs", inputs), ("kwargs_tup", keywords), ("devices", specs)):
        if len(given) != len(modules):
            raise ValueError(
                f"parallel_apply got {len(modules)} modules and {len(given)} entries in {name}: "
                f"pass one for each module."
            )
    replica_devices = [
        _device_of(module, value) if spec is None else resolve_device(spec)
        for module, value, spec in zip(modules, inputs, specs, strict=True)
    ]
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
    for tensor in (*module.parameters(), *module.buffers(), *tensors_in(value)):
        return tensor.device
    return torch.device("cpu")


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run one parallel call of a module and release the replicas. `options` are those of `DataParallel`.

    Every call creates replicas and probes the module. For several calls, `DataParallel` is faster. Worker processes
    stay for the next call until `instep.shutdown()`, or until any wrapper is closed.
    """
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = resolve_devices(None if device_ids is None else as_tuple("device_ids", device_ids), module)
    model = DataParallel(module, devices, output_device, dim, **options)
    try:
        return model(*args, **(module_kwargs or {}))
    finally:
        if model._instep_engine.out_of_process:  # `close` would also end the workers, and backward would start new ones
            model._instep_replicas.discard()
        else:
            model.close()
