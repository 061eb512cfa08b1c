"""A worker's accelerator: which one it is, and the switches of what computes on it."""

from __future__ import annotations

from typing import Any

import torch

from instep.engines.processes.driver import DeviceMemory, Refused
from instep.engines.processes.orders import Berth
from instep.errors import EngineError

_SWITCHES: dict[str, tuple[Any, str]] = {
    "cudnn.enabled": (torch.backends.cudnn, "enabled"),
    "cudnn.benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "matmul.fp16": (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "matmul.bf16": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
}
_CHOICES = {
    "flash": ("flash_sdp_enabled", "enable_flash_sdp"),
    "memory": ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "math": ("math_sdp_enabled", "enable_math_sdp"),
    "cudnn": ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}


def berth(device: torch.device, handle: bytes | None = None) -> Berth:
    """A device as a worker is told of it."""
    return Berth(device, _identity(device), handle)


def take_device(order: Berth) -> None:
    """In a worker: work on a device from now on. `EngineError` where it is another one than the parent means."""
    torch.cuda.set_device(order.device)
    # The thread in which autograd works on the device has no context of its own before it has run something there.
    torch.ones(1, device=order.device, requires_grad=True).mul(2).backward()
    found = _identity(order.device)
    if found != order.identity:
        raise EngineError(
            f"{order.device} is {found} in a worker process and {order.identity} in this one: CUDA_VISIBLE_DEVICES was "
            f"changed after CUDA was first used.\nSet it before the script starts."
        )


def try_to_open(order: Berth) -> str | None:
    """In a worker: why memory of its device cannot be opened by a handle; None if it can."""
    assert order.handle is not None
    try:
        DeviceMemory.open(order.handle, 1, order.device).tensor(0, 1).clone()
    except Refused as refused:
        return str(refused)
    return None


def _identity(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def backends() -> dict[str, Any]:
    """The switches of this process. One that torch does not tell (two ways of setting it were mixed) is left out."""
    found: dict[str, Any] = {}
    for name, (holder, attribute) in _SWITCHES.items():
        try:
            found[name] = getattr(holder, attribute)
        except (RuntimeError, AttributeError):
            continue
    for name, (ask, _) in _CHOICES.items():
        if hasattr(torch.backends.cuda, ask):
            found[name] = getattr(torch.backends.cuda, ask)()
    return found


def set_backends(wanted: dict[str, Any]) -> None:
    """Set the switches of this process that are not as they are wanted."""
    present = backends() if wanted else {}
    for name, value in wanted.items():
        if present.get(name) == value:
            continue
        if name in _SWITCHES:
            setattr(*_SWITCHES[name], value)
        else:
            getattr(torch.backends.cuda, _CHOICES[name][1])(value)
