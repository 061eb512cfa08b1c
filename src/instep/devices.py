"""Device specifications, placing leaves on devices, and sending tensors in flat buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import WrapError
from instep.runtime.modes import set_inference_mode
from instep.structure.tree import Path, flatten_one_level, format_path, map_tensors, tensors_in
from instep.structure.types import handler_for_type

DeviceLike = int | str | torch.device

_copy_streams: dict[torch.device, Any] = {}


def accelerators() -> list[torch.device]:
    """Every CUDA or XPU device that is usable now."""
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return [torch.device(kind, index) for index in range(backend.device_count())]
    return []


def resolve_device(spec: DeviceLike) -> torch.device:
    """Resolve an index, name or device: `0` is the first accelerator, `"cuda"` the current one."""
    if isinstance(spec, int):
        found = accelerators()
        kind = found[0].type if found else "cuda"
        return torch.device(kind, spec)
    device = torch.device(spec)
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    index: int | None = device.index  # None for "cuda", whatever its annotation says
    if index is None:
        current = getattr(torch.get_device_module(device), "current_device", None)
        index = 0 if current is None else current()
    return torch.device(device.type, index)


def resolve_devices(specs: Sequence[DeviceLike] | None, module: nn.Module) -> list[torch.device]:
    """The replicas' devices: those given, else every accelerator, else the module's device."""
    if specs is None:
        return accelerators() or [module_device(module) or torch.device("cpu")]
    devices = [resolve_device(spec) for spec in specs]
    if not devices:
        raise WrapError("device_ids is empty: name at least one device, or leave it out.")
    return devices


def module_device(module: nn.Module) -> torch.device | None:
    """The device of a module's parameters and buffers; None if it has none."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise WrapError(
            f"the module is on several devices ({', '.join(names)}), but instep keeps a whole replica on each device. "
            f"Move it to one device first: module.to({names[0]!r})."
        )
    return devices.pop() if devices else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. A copy from the host to CUDA runs on a side stream."""
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device, non_blocking=device.type != "cpu")
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        moved = tensor.to(device)  # blocks until copied: the caller may overwrite a pinned batch
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved


def move_to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor of a structure to `device`."""
    if isinstance(value, Tensor):
        return to_device(value, device)
    handler = handler_for_type(type(value))
    if handler is not None:
        if handler.to_device is not None:
            return handler.to_device(value, device)
        return handler.map(lambda tensor: to_device(tensor, device), value)
    node = flatten_one_level(value)
    if node is None:
        return value
    return node.unflatten([move_to_device(child, device) for child in node.children])


def has_accelerator_tensors(values: Iterable[Any]) -> bool:
    """Whether a leaf is on an accelerator; CPU leaves then stay on the CPU."""
    return any(tensor.device.type != "cpu" for value in values for tensor in tensors_in(value))


def place(value: Any, path: Path, device: torch.device, keep_host: bool, rules: Mapping[str, Any]) -> Any:
    """Move a shard to its replica's device. With `keep_host`, CPU leaves stay; `rules` take precedence."""
    if rules:
        where = format_path(path)
        for pattern, spec in rules.items():
            if fnmatchcase(where, pattern):
                return move_to_device(value, resolve_device(spec))
    if isinstance(value, Tensor):
        return value if keep_host and value.device.type == "cpu" else to_device(value, device)
    if handler_for_type(type(value)) is not None:
        stays = keep_host and all(tensor.device.type == "cpu" for tensor in tensors_in(value))
        return value if stays else move_to_device(value, device)
    node = flatten_one_level(value)
    if node is None:
        return value
    children = [place(c, (*path, k), device, keep_host, rules) for k, c in zip(node.keys, node.children, strict=True)]
    unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
    return value if unchanged else node.unflatten(children)


def to_output_device(value: Any, device: torch.device) -> Any:
    """Move outputs to one device, differentiably."""
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)


BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype and device that are copied as one flat tensor."""

    indices: tuple[int, ...]
    dtype: torch.dtype
    numel: int


def make_buckets(tensors: Sequence[Tensor], limit: int = BUCKET_BYTES) -> list[Bucket]:
    """Group dense tensors by dtype and device, in order, up to `limit` bytes per bucket."""
    buckets: list[Bucket] = []
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for index, tensor in enumerate(tensors):
        key = (tensor.dtype, tensor.device)
        filling.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + tensor.numel()
        if sizes[key] * tensor.element_size() >= limit:
            buckets.append(Bucket(tuple(filling.pop(key)), tensor.dtype, sizes.pop(key)))
    buckets += [Bucket(tuple(indices), key[0], sizes[key]) for key, indices in filling.items()]
    return buckets


def pack(tensors: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """Flatten a bucket's tensors into one tensor on their device."""
    return torch.cat([tensors[index].detach().reshape(-1) for index in bucket.indices])


def unpack(flat: Tensor, like: Sequence[Tensor], bucket: Bucket) -> list[Tensor]:
    """Views of a flat tensor for the tensors of a bucket, in the shapes of `like`."""
    sizes = [like[index].numel() for index in bucket.indices]
    parts = flat.split(sizes)
    return [part.view(like[index].shape) for part, index in zip(parts, bucket.indices, strict=True)]


def copy_to_replicas(tensors: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> None:
    """Copy the values of `tensors` into each list of counterparts, in flat buckets if devices differ.

    The counterparts' version counters do not change.
    """
    with torch.no_grad(), set_inference_mode(False):
        for bucket in make_buckets(tensors):
            flat: Tensor | None = None
            for replica_tensors in into:
                targets = [replica_tensors[index].data for index in bucket.indices]
                device = targets[0].device
                if device == tensors[bucket.indices[0]].device:
                    torch._foreach_copy_(targets, [tensors[index].detach() for index in bucket.indices])
                    continue
                if flat is None:
                    flat = pack(tensors, bucket)
                moved = flat.to(device, non_blocking=device.type != "cpu")
                torch._foreach_copy_(targets, unpack(moved, tensors, bucket))
