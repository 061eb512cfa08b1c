"""The caller's global torch settings, and the device, applied in a worker."""

from __future__ import annotations

import torch

from instep.engines.processes.messages import DeviceRequest
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.errors import EngineError
from instep.runtime.ambient import AmbientState, EncodedAmbientState


class WorkerAmbientState:
    """The ambient state of the last call. The parent sends it again only if it differs."""

    _encoded: EncodedAmbientState
    _decoded: AmbientState

    def __init__(self) -> None:
        self._num_threads = 0

    def apply(self, encoded: EncodedAmbientState | None) -> AmbientState:
        """Apply process-wide settings, which the last call may have changed, and return the state to enter."""
        if encoded is not None:
            self._encoded, self._decoded = encoded, encoded.decode()
        settings = self._encoded.process
        settings.apply()
        if self._num_threads != settings.num_threads:
            torch.set_num_threads(settings.num_threads)
            self._num_threads = settings.num_threads
        return self._decoded


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
