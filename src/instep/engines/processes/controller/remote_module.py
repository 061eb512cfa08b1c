"""The controller's record of the module state a worker has, and the table of tensors sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CellType

import torch
from torch import Tensor

from instep.engines.processes.controller.remote_replica import RemoteReplica
from instep.engines.processes.controller.shared_parameters import (
    HostStagingCopy,
    locate,
    needs_staging,
    staging_copy_for,
)
from instep.engines.processes.messages import TensorLocation, TensorSpec
from instep.engines.processes.serialization.globals import ValueSnapshot, read_cell, take_snapshot
from instep.engines.processes.serialization.module_globals import ModuleGlobals
from instep.engines.processes.transport.copy_streams import fetch_to_device
from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.doorbell import Doorbell
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.replicas.write_watch import MemoryLayout
from instep.structure.shapes import is_dense


@dataclass
class RemoteModuleState:
    """The controller's record of the module state a worker has."""

    tensors: list[Tensor]
    """The module's tensors, by index; for a non-leaf left by an earlier call, the remote replica's tensor."""
    local_tensors: list[Tensor]
    """The remote replica's tensor for each of them."""
    gradient_slots: dict[int, Tensor]
    """By tensor index: the memory that the worker writes the gradient to."""
    unshared: list[int]
    """Indices of tensors that are not in shared memory."""
    gradient_memory: SharedMemory | DeviceMemory
    """The memory of the gradient slots."""
    slot_offsets: dict[int, int]
    """By tensor index: the slot's offset in `gradient_memory`."""
    staging: HostStagingCopy | None
    """Host copy of the tensors that the worker cannot map."""
    same_device: bool
    """Whether the worker uses the caller's device."""
    used_ipc: bool
    """Whether CUDA IPC was in use when the module was sent."""
    generators: list[torch.Generator]
    """The module's generators, by index."""
    closure_cells: list[tuple[CellType, ValueSnapshot]]
    """Closure cells of functions that the module holds, with snapshots of their contents."""
    doorbell: Doorbell | None
    """Signals large gradients that are in their slots."""
    module_globals: ModuleGlobals
    """The user's imported modules that the sent code refers to."""
    staged_offsets: set[int] = field(default_factory=set)
    """Offsets in the staging copy that the worker copies from."""

    def __post_init__(self) -> None:
        self.is_new = True
        self.tensor_indices = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.source_ids = {id(made): id(source) for source, made in zip(self.tensors, self.local_tensors, strict=True)}
        """By `id()` of a local tensor: `id()` of the module's tensor."""
        self.local_indices = {id(made): number for number, made in enumerate(self.local_tensors)}
        """By `id()` of a local tensor: its index."""
        self.versioned = versioned_tensors(self.local_tensors)
        self._slots_on_device = all(
            slot.device == self.tensors[number].device for number, slot in self.gradient_slots.items()
        )
        self._tensor_attributes = _snapshot_attributes(self.tensors)
        self._parameters = [tensor for tensor in self.tensors if is_dense(tensor) and tensor.requires_grad]
        self._data_ptrs = list(map(_data_ptr, self._parameters))
        self._state_layout = MemoryLayout([tensor for tensor in self.tensors if not tensor.requires_grad])

    def has_changed(self) -> bool:
        """Whether a tensor's memory or attributes, or a closure variable, changed since the module was sent."""
        if list(map(_data_ptr, self._parameters)) != self._data_ptrs or not self._state_layout.is_unchanged():
            return True
        if not all(snapshot.matches(read_cell(cell)) for cell, snapshot in self.closure_cells):
            return True
        return any(map(_attributes_changed, self.tensors, self._tensor_attributes))

    def refresh_staging(self, call: object, follow: bool) -> None:
        """Refresh the staging copy for a call, if `follow` is set or the worker has never read it."""
        if self.staging is not None and (follow or self.is_new):
            self.staging.refresh(call)
        self.is_new = False

    def read_gradients(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """Gradients from the slots of these tensors, on the tensors' device."""
        memory = self.gradient_memory
        if self._slots_on_device:
            return {n: self.gradient_slots[n] for n in numbers}
        far = [n for n in numbers if self.gradient_slots[n].device != self.tensors[n].device]
        near = {n: self.gradient_slots[n] for n in numbers if self.gradient_slots[n].device == self.tensors[n].device}
        if not far:
            return near
        assert isinstance(memory, SharedMemory)
        brought = fetch_to_device(
            memory, [(self.slot_offsets[n], self.gradient_slots[n]) for n in far], self.tensors[far[0]].device
        )
        return near | dict(zip(far, brought, strict=True))

    def unshared_values(self) -> dict[int, Tensor]:
        """Values of the tensors that are not in shared memory, by index."""
        return {number: self.tensors[number].detach() for number in self.unshared}


def versioned_tensors(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The indices and tensors that have a version counter; inference tensors have none."""
    places = [place for place, tensor in enumerate(tensors) if not tensor.is_inference()]
    return places, [tensors[place] for place in places]


_data_ptr = torch._C.TensorBase.data_ptr


def _snapshot_attributes(tensors: Sequence[Tensor]) -> list[dict[str, ValueSnapshot]]:
    """Snapshots of the attributes of each tensor."""
    return [{name: take_snapshot(value) for name, value in tensor.__dict__.items()} for tensor in tensors]


def _attributes_changed(tensor: Tensor, marks: dict[str, ValueSnapshot]) -> bool:
    """Whether a tensor's attributes differ from their snapshots."""
    found = tensor.__dict__
    if not found and not marks:
        return False
    return found.keys() != marks.keys() or not all(marks[name].matches(value) for name, value in found.items())


class TensorTableBuilder:
    """Builds a tensor table: the specs, the memory blocks that they refer to, and storages to send."""

    def __init__(self, tensors: Sequence[Tensor], replica: RemoteReplica, near: bool) -> None:
        """The last argument says whether the worker can open memory of the source's device."""
        self.blocks: dict[int, SharedMemory] = {}
        self.ipc_blocks: dict[int, DeviceMemory] = {}
        self._same_device = near
        self.storages: list[Tensor] = []
        self.unshared: list[int] = []
        self._source_device = replica.source_device
        self._needs_copies = needs_device_copies(replica.worker_device)
        self.staged_offsets: set[int] = set()
        """Offsets in the staging copy that the worker copies from."""
        self._storage_indices: dict[int, int] = {}
        dense = [tensor for tensor in tensors if _has_data(tensor)]
        far = [tensor for tensor in dense if needs_staging(tensor) and self._ipc_location(tensor) is None]
        self.staging = staging_copy_for(replica.source_modules[0], far)
        self.specs = [self._spec(number, tensor) for number, tensor in enumerate(tensors)]

    def _spec(self, number: int, tensor: Tensor) -> TensorSpec:
        spot = self._location(tensor) if _has_data(tensor) else None
        if spot is None or not spot.block_id:
            self.unshared.append(number)
        value = tensor.detach() if spot is None else None
        near = tensor.device == self._source_device
        return TensorSpec(type(tensor), tensor.requires_grad, dict(tensor.__dict__), spot, value, near)

    def _location(self, tensor: Tensor) -> TensorLocation:
        storage = tensor.untyped_storage()
        block, offset = self._find_block(tensor)
        start, size = int(tensor.storage_offset()), tuple(tensor.size())
        pull = self._needs_copies and block in self.blocks and tensor.device == self._source_device
        if pull and self.staging is not None and block == self.staging.block_id:
            self.staged_offsets.add(offset)
        return TensorLocation(block, offset, storage.nbytes(), start, size, tensor.stride(), tensor.dtype, pull)

    def _find_block(self, tensor: Tensor) -> tuple[int, int]:
        """The block id and offset of a tensor's storage; or 0 and the index of a storage to send."""
        address = tensor.untyped_storage().data_ptr()
        opened, staging = self._ipc_location(tensor), self.staging
        if opened is not None:
            return opened
        if staging is not None and address in staging.offsets:
            self.blocks[staging.block_id] = staging.memory
            return staging.block_id, staging.offsets[address]
        place = locate(tensor)
        if place is not None and isinstance(place.block.memory, SharedMemory):
            self.blocks[place.block.block_id] = place.block.memory
            return place.block.block_id, place.offset
        storage = tensor.untyped_storage()
        if address not in self._storage_indices or not storage.nbytes():
            self._storage_indices[address] = len(self.storages)
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return 0, self._storage_indices[address]

    def _ipc_location(self, tensor: Tensor) -> tuple[int, int] | None:
        """The block id and offset of a tensor in device memory that the worker opens by CUDA IPC."""
        place = locate(tensor) if self._same_device else None
        if place is None or not isinstance(place.block.memory, DeviceMemory):
            return None
        self.ipc_blocks[place.block.block_id] = place.block.memory
        return place.block.block_id, place.offset


def needs_device_copies(device: torch.device) -> bool:
    """Whether a worker on this device copies shared host memory to the device before computing."""
    return device.type != "cpu"


def _has_data(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta
