"""The caller's global torch settings, and the device, applied in a worker."""

from __future__ import annotations

import contextvars
from itertools import starmap
from typing import Any

import torch

from instep.engines.processes.messages import AmbientSettings, DeviceRequest
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.errors import EngineError
from instep.runtime.ambient import AmbientState, AutocastSetting
from instep.runtime.warning_filters import set_warning_filters


def anomaly_mode() -> int:
    """Whether autograd looks for anomalies: 0 for no, 1 for where an error comes from, 2 for NaN too."""
    return 1 + torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else 0


def set_anomaly_mode(mode: int) -> None:
    """Let autograd look for anomalies as it does elsewhere."""
    if mode != anomaly_mode():
        torch.set_anomaly_enabled(mode > 0, mode != 1)


class WorkerAmbientState:
    """The surroundings of the last call: they are told again only where they are others."""

    _settings: AmbientSettings
    _call_state: AmbientState

    def __init__(self) -> None:
        self._thread_count = 0

    def apply(self, around: AmbientSettings | None) -> AmbientState:
        """Set what is the whole process's, also what the last call has changed of it; returns what is the call's."""
        if around is not None:
            self._settings, self._call_state = around, _build_ambient(around)
        self._apply_process_state(self._settings)
        return self._call_state

    def _apply_process_state(self, around: AmbientSettings) -> None:
        if torch.get_default_dtype() != around.default_dtype:
            torch.set_default_dtype(around.default_dtype)
        if torch.get_deterministic_debug_mode() != around.deterministic_mode:
            torch.set_deterministic_debug_mode(around.deterministic_mode)
        if torch.get_float32_matmul_precision() != around.matmul_precision:
            torch.set_float32_matmul_precision(around.matmul_precision)
        cudnn = torch.backends.cudnn
        if (cudnn.benchmark, cudnn.deterministic) != around.cudnn:
            cudnn.benchmark, cudnn.deterministic = around.cudnn
        if self._thread_count != around.num_threads:
            torch.set_num_threads(around.num_threads)
            self._thread_count = around.num_threads
        set_backend_flags(around.backend_flags)
        set_anomaly_mode(around.anomaly_mode)
        set_warning_filters(around.warning_filters)


def _build_context(around: AmbientSettings) -> contextvars.Context:
    context = contextvars.copy_context()
    for variable, value in around.context_vars:
        context.run(variable.set, value)
    return context


def _build_ambient(around: AmbientSettings) -> AmbientState:
    return AmbientState(
        grad_enabled=around.grad_enabled,
        inference_mode=around.inference_mode,
        autocast=tuple(starmap(AutocastSetting, around.autocast)),
        autocast_cache=around.autocast_cache,
        default_device=around.default_device,
        saved_tensor_hooks=around.saved_tensors_hooks,
        streams={},
        context_vars=_build_context(around),
        compiler=None,
        recompile_limit=None,
    )


_FLAGS: dict[str, tuple[Any, str]] = {
    "cudnn.enabled": (torch.backends.cudnn, "enabled"),
    "cudnn.benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "matmul.fp16": (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "matmul.bf16": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
}
_SDP_BACKENDS = {
    "flash": ("flash_sdp_enabled", "enable_flash_sdp"),
    "memory": ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "math": ("math_sdp_enabled", "enable_math_sdp"),
    "cudnn": ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}


def describe_device(device: torch.device, handle: bytes | None = None) -> DeviceRequest:
    """A device as a worker is told of it."""
    return DeviceRequest(device, _device_uuid(device), handle)


def use_device(order: DeviceRequest) -> None:
    """In a worker: work on a device from now on. `EngineError` where it is another one than the parent means."""
    torch.cuda.set_device(order.device)
    # The thread in which autograd works on the device has no context of its own before it has run something there.
    torch.ones(1, device=order.device, requires_grad=True).mul(2).backward()
    found = _device_uuid(order.device)
    if found != order.uuid:
        raise EngineError(
            f"{order.device} is {found} in a worker process and {order.uuid} in this one: CUDA_VISIBLE_DEVICES was "
            f"changed after CUDA was first used.\nSet it before the script starts."
        )


def device_memory_error(order: DeviceRequest) -> str | None:
    """In a worker: why memory of its device cannot be opened by a handle; None if it can."""
    assert order.ipc_handle is not None
    try:
        DeviceMemory.open(order.ipc_handle, 1, order.device).tensor(0, 1).clone()
    except DriverError as refused:
        return str(refused)
    return None


def _device_uuid(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def backend_flags() -> dict[str, Any]:
    """The switches of this process. One that torch does not tell (two ways of setting it were mixed) is left out."""
    found: dict[str, Any] = {}
    for name, (holder, attribute) in _FLAGS.items():
        try:
            found[name] = getattr(holder, attribute)
        except (RuntimeError, AttributeError):
            continue
    for name, (ask, _) in _SDP_BACKENDS.items():
        if hasattr(torch.backends.cuda, ask):
            found[name] = getattr(torch.backends.cuda, ask)()
    return found


def set_backend_flags(wanted: dict[str, Any]) -> None:
    """Set the switches of this process that are not as they are wanted."""
    present = backend_flags() if wanted else {}
    for name, value in wanted.items():
        if present.get(name) == value:
            continue
        if name in _FLAGS:
            setattr(*_FLAGS[name], value)
        else:
            getattr(torch.backends.cuda, _SDP_BACKENDS[name][1])(value)
