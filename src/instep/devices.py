"""Which devices there are, and moving the leaves of a structure onto them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import WrapError
from instep.structure.tree import Path, map_tensors, open_node, show_path, tensors_in
from instep.structure.types import kind_of

DeviceLike = int | str | torch.device

_copy_streams: dict[torch.device, Any] = {}


def accelerators() -> list[torch.device]:
    """Every CUDA or XPU device that is usable now."""
    for kind in ("cuda", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return [torch.device(kind, index) for index in range(backend.device_count())]
    return []


def device_of(spec: DeviceLike) -> torch.device:
    """A full device from an index, a name or a device: `0` is the first accelerator, `"cuda"` the current one."""
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


def devices_of(specs: Sequence[DeviceLike] | None, module: nn.Module) -> list[torch.device]:
    """The replicas' devices: those asked for, or every accelerator, or the one place where the module is."""
    if specs is None:
        return accelerators() or [home_of(module) or torch.device("cpu")]
    devices = [device_of(spec) for spec in specs]
    if not devices:
        raise WrapError("device_ids is empty: name at least one device, or leave it out.")
    return devices


def home_of(module: nn.Module) -> torch.device | None:
    """The one device that holds a module's parameters and buffers; None for a module without any."""
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    if len(places) > 1:
        names = ", ".join(sorted(str(place) for place in places))
        raise WrapError(
            f"this module is spread over several devices ({names}); instep keeps a whole copy on each device. "
            f"Bring it to one device first: module.to({sorted(str(place) for place in places)[0]!r})."
        )
    return places.pop() if places else None


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a copy from the host runs beside the work that is already queued there."""
    if tensor.device == device:
        return tensor
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor.to(device, non_blocking=device.type != "cpu")
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        moved = tensor.to(device)  # waits for this copy alone: the caller may refill a pinned batch right away
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved


def move(value: Any, device: torch.device) -> Any:
    """A structure with every tensor on `device`."""
    if isinstance(value, Tensor):
        return to_device(value, device)
    kind = kind_of(type(value))
    if kind is not None:
        return kind.move(value, device) if kind.move is not None else kind.map(lambda t: to_device(t, device), value)
    node = open_node(value)
    if node is None:
        return value
    return node.close([move(child, device) for child in node.children])


def stays_on_host(values: Iterable[Any]) -> bool:
    """Whether CPU leaves are meant to stay: they are when some other leaf is already on an accelerator."""
    return any(tensor.device.type != "cpu" for value in values for tensor in tensors_in(value))


def place(value: Any, path: Path, device: torch.device, keep_host: bool, rules: Mapping[str, Any]) -> Any:
    """A shard on its replica's device; CPU leaves stay where `keep_host` or a rule says so."""
    if rules:
        where = show_path(path)
        for pattern, spec in rules.items():
            if fnmatchcase(where, pattern):
                return move(value, device_of(spec))
    if isinstance(value, Tensor):
        return value if keep_host and value.device.type == "cpu" else to_device(value, device)
    kind = kind_of(type(value))
    if kind is not None:
        stay = keep_host and all(tensor.device.type == "cpu" for tensor in tensors_in(value))
        return value if stay else move(value, device)
    node = open_node(value)
    if node is None:
        return value
    children = [place(c, (*path, k), device, keep_host, rules) for k, c in zip(node.keys, node.children, strict=True)]
    unchanged = all(new is old for new, old in zip(children, node.children, strict=True))
    return value if unchanged else node.close(children)


def on_output_device(value: Any, device: torch.device) -> Any:
    """Outputs brought to one device, differentiably."""
    return map_tensors(lambda tensor: tensor if tensor.device == device else tensor.to(device), value)
