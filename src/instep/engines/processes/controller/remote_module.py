"""The controller's record of the module state a worker has, and the table of tensors sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
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
    may_use_ipc: bool
    """Whether tensors are sent through memory on the caller's device, if the worker can open it."""
    used_ipc: bool
    """Whether they were when the module was sent."""
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
        self.tensor_indices = {id(tensor): index for index, tensor in enumerate(self.tensors)}
        """By `id()` of one of the module's tensors: its index."""
        self.source_ids = dict(zip(map(id, self.local_tensors), map(id, self.tensors), strict=True))
        """By `id()` of a local tensor: `id()` of the module's tensor."""
        self.local_indices = {id(tensor): index for index, tensor in enumerate(self.local_tensors)}
        """By `id()` of a local tensor: its index."""
        self.versioned = versioned_tensors(self.local_tensors)
        self._host_slots = {i for i, slot in self.gradient_slots.items() if slot.device != self.tensors[i].device}
        """Indices of tensors on a device whose gradient slots are on the host."""
        self._tensor_attributes = _snapshot_attributes(self.tensors)
        self._has_no_attributes = not any(self._tensor_attributes)
        self._parameters = [tensor for tensor in self.tensors if is_dense(tensor) and tensor.requires_grad]
        self._data_ptrs = list(map(_data_ptr, self._parameters))
        self._state_layout = MemoryLayout([tensor for tensor in self.tensors if not tensor.requires_grad])

    def has_changed(self) -> bool:
        """Whether a tensor's memory or attributes, or a closure variable, changed since the module was sent."""
        if list(map(_data_ptr, self._parameters)) != self._data_ptrs or not self._state_layout.is_unchanged():
            return True
        if not all(snapshot.matches(read_cell(cell)) for cell, snapshot in self.closure_cells):
            return True
        if self._has_no_attributes:
            return any(map(_get_attributes, self.tensors))
        return any(map(_attributes_changed, self.tensors, self._tensor_attributes))

    def refresh_staging(self, call: object, follow: bool) -> None:
        """Refresh the staging copy for a call, if `follow` is set or the worker has never read it."""
        if self.staging is not None and (follow or self.is_new):
            self.staging.refresh(call)
        self.is_new = False

    def read_gradients(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Gradients from the slots of these tensors, on the tensors' device."""
        gradients = {i: self.gradient_slots[i] for i in indices}
        on_host = [i for i in indices if i in self._host_slots] if self._host_slots else []
        if on_host:
            assert isinstance(self.gradient_memory, SharedMemory)
            slots = [(self.slot_offsets[i], gradients[i]) for i in on_host]
            fetched = fetch_to_device(self.gradient_memory, slots, self.tensors[on_host[0]].device)
            gradients.update(zip(on_host, fetched, strict=True))
        return gradients

    def unshared_values(self) -> dict[int, Tensor]:
        """Values of the tensors that are not in shared memory, by index."""
        return {index: self.tensors[index].detach() for index in self.unshared}


def versioned_tensors(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The indices and tensors that have a version counter; inference tensors have none."""
    indices = [index for index, tensor in enumerate(tensors) if not tensor.is_inference()]
    return indices, [tensors[index] for index in indices]


_data_ptr = torch._C.TensorBase.data_ptr
_get_attributes = attrgetter("__dict__")


def _snapshot_attributes(tensors: Sequence[Tensor]) -> list[dict[str, ValueSnapshot]]:
    """Snapshots of the attributes of each tensor."""
    return [{name: take_snapshot(value) for name, value in tensor.__dict__.items()} for tensor in tensors]


def _attributes_changed(tensor: Tensor, snapshots: dict[str, ValueSnapshot]) -> bool:
    """Whether a tensor's attributes differ from their snapshots."""
    attributes = tensor.__dict__
    if not attributes and not snapshots:
        return False
    if attributes.keys() != snapshots.keys():
        return True
    return not all(snapshots[name].matches(value) for name, value in attributes.items())


class TensorTableBuilder:
    """Builds a tensor table: the specs, the memory blocks that they refer to, and storages to send."""

    def __init__(self, tensors: Sequence[Tensor], replica: RemoteReplica, share_memory: bool) -> None:
        """`share_memory`: whether the worker uses the source's memory on its device, and can open it."""
        self.blocks: dict[int, SharedMemory] = {}
        self.ipc_blocks: dict[int, DeviceMemory] = {}
        self._share_memory = share_memory
        self.storages: list[Tensor] = []
        self.unshared: list[int] = []
        self._source_device = replica.source_device
        self._needs_copies = needs_device_copies(replica.worker_device)
        self.staged_offsets: set[int] = set()
        """Offsets in the staging copy that the worker copies from."""
        self._storage_indices: dict[int, int] = {}
        dense = [tensor for tensor in tensors if _has_data(tensor)]
        staged = [tensor for tensor in dense if needs_staging(tensor) and self._ipc_location(tensor) is None]
        self.staging = staging_copy_for(replica.source_modules[0], staged)
        self.specs = [self._spec(index, tensor) for index, tensor in enumerate(tensors)]

    def _spec(self, index: int, tensor: Tensor) -> TensorSpec:
        location = self._location(tensor) if _has_data(tensor) else None
        if location is None or not location.block_id:
            self.unshared.append(index)
        return TensorSpec(
            tensor_type=type(tensor),
            requires_grad=tensor.requires_grad,
            attributes=dict(tensor.__dict__),
            location=location,
            value=tensor.detach() if location is None else None,
            on_source_device=tensor.device == self._source_device,
        )

    def _location(self, tensor: Tensor) -> TensorLocation:
        block_id, offset = self._find_block(tensor)
        needs_copy = self._needs_copies and block_id in self.blocks and tensor.device == self._source_device
        if needs_copy and self.staging is not None and block_id == self.staging.block_id:
            self.staged_offsets.add(offset)
        return TensorLocation(
            block_id,
            offset,
            nbytes=tensor.untyped_storage().nbytes(),
            storage_offset=int(tensor.storage_offset()),
            size=tuple(tensor.size()),
            stride=tensor.stride(),
            dtype=tensor.dtype,
            needs_copy=needs_copy,
        )

    def _find_block(self, tensor: Tensor) -> tuple[int, int]:
        """The block id and offset of a tensor's storage; or 0 and the index of a storage to send."""
        storage, staging = tensor.untyped_storage(), self.staging
        address = storage.data_ptr()
        ipc_location = self._ipc_location(tensor)
        if ipc_location is not None:
            return ipc_location
        if staging is not None and address in staging.offsets:
            self.blocks[staging.block_id] = staging.memory
            return staging.block_id, staging.offsets[address]
        shared = locate(tensor)
        if shared is not None and isinstance(shared.block.memory, SharedMemory):
            self.blocks[shared.block.block_id] = shared.block.memory
            return shared.block.block_id, shared.offset
        if address not in self._storage_indices or not storage.nbytes():
            self._storage_indices[address] = len(self.storages)
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return 0, self._storage_indices[address]

    def _ipc_location(self, tensor: Tensor) -> tuple[int, int] | None:
        """The block id and offset of a tensor in device memory that the worker opens by CUDA IPC."""
        shared = locate(tensor) if self._share_memory else None
        if shared is None or not isinstance(shared.block.memory, DeviceMemory):
            return None
        self.ipc_blocks[shared.block.block_id] = shared.block.memory
        return shared.block.block_id, shared.offset


def needs_device_copies(device: torch.device) -> bool:
    """Whether a worker on this device copies shared host memory to the device before computing."""
    return device.type != "cpu"


def _has_data(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta
