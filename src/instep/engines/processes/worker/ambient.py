"""The caller's global torch settings, and the device, applied in a worker."""

from __future__ import annotations

import torch

from instep.engines.processes.messages import DeviceRequest
from instep.engines.processes.transport.cuda_driver import DeviceMemory, DriverError
from instep.errors import EngineError
from instep.runtime.ambient import AmbientState, EncodedAmbientState, ProcessSettings


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
        self.apply_settings(self._encoded.process)
        return self._decoded

    def apply_settings(self, settings: ProcessSettings) -> None:
        """Apply process-wide settings."""
        settings.apply()
        if self._num_threads != settings.num_threads:
            torch.set_num_threads(settings.num_threads)
            self._num_threads = settings.num_threads


def describe_device(device: torch.device, handle: bytes | None = None) -> DeviceRequest:
    """The request that makes a worker use a device."""
    return DeviceRequest(device, _device_uuid(device), handle)


def use_device(request: DeviceRequest) -> None:
    """In a worker: make a device current. Raises `EngineError` if it is a different GPU than in the parent."""
    torch.cuda.set_device(request.device)
    # Creates the CUDA context of the device's autograd thread.
    torch.ones(1, device=request.device, requires_grad=True).mul(2).backward()
    uuid = _device_uuid(request.device)
    if uuid != request.uuid:
        raise EngineError(
            f"{request.device} is GPU {uuid} in a worker process and GPU {request.uuid} in this one, because "
            f"CUDA_VISIBLE_DEVICES was changed after CUDA was initialized.\nSet it before the script starts."
        )


TEST_BYTES, SENT_BYTE, RETURNED_BYTE = 256, 0x5A, 0xA5
"""The size of the memory that tests CUDA IPC, what the parent writes to it, and what the worker then writes."""


def check_device_memory(request: DeviceRequest) -> None:
    """In a worker: raise `DriverError` if memory, perhaps of another device, cannot be opened, read and written."""
    assert request.ipc_handle is not None
    memory = DeviceMemory.open(request.ipc_handle, TEST_BYTES, request.device)
    if not holds_byte(memory, SENT_BYTE):
        raise DriverError(f"{request.device} does not read what was written to the memory")
    memory.fill(RETURNED_BYTE)


def holds_byte(memory: DeviceMemory, byte: int) -> bool:
    """Whether every byte of a memory has this value. Waits for the device."""
    return bool((memory.tensor(0, memory.nbytes) == byte).all())


def _device_uuid(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
