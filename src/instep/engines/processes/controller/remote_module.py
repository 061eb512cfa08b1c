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
from instep.engines.processes.serialization.globals import ValueSnapshot, cell_matches, take_snapshot
from instep.engines.processes.transport.copy_streams import fetch_to_device
from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.doorbell import Doorbell
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.replicas.write_watch import MemoryLayout
from instep.structure.shapes import is_dense


@dataclass
class RemoteModuleState:
    """What a worker was told of a module."""

    tensors: list[Tensor]
    """Its tensors, in the order of their numbers; for one that an earlier call left there, what stands for it here."""
    local_tensors: list[Tensor]
    """What stands here for each of them."""
    gradient_slots: dict[int, Tensor]
    """By number: where the worker leaves the tensor's gradient."""
    unshared: list[int]
    """The numbers of tensors that lie in no common memory."""
    gradient_memory: SharedMemory | DeviceMemory
    """Where the slots are."""
    slot_offsets: dict[int, int]
    """By number: where in it."""
    staging: HostStagingCopy | None
    """Where the worker finds the values of tensors that it cannot reach."""
    same_device: bool
    """Whether tensors may stay on a device that both processes work on."""
    used_ipc: bool
    """Whether they did, when the worker was told."""
    generators: list[torch.Generator]
    """The generators that the module holds, in the order of their numbers."""
    closure_variables: list[tuple[CellType, ValueSnapshot]]
    """The variables of closures that went with it, as they were."""
    doorbell: Doorbell | None
    """Tells of large gradients that lie in their slots."""
    staged_offsets: set[int] = field(default_factory=set)
    """Where in the image lies what the worker copies from it."""

    def __post_init__(self) -> None:
        self.is_new = True
        self.tensor_indices = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.source_ids = {id(made): id(source) for source, made in zip(self.tensors, self.local_tensors, strict=True)}
        """By the id of what stands for it here: the id of each tensor."""
        self.local_indices = {id(made): number for number, made in enumerate(self.local_tensors)}
        """By the same: the number of each."""
        self.versioned = versioned_tensors(self.local_tensors)
        self._slots_on_device = all(
            slot.device == self.tensors[number].device for number, slot in self.gradient_slots.items()
        )
        self._tensor_attributes = _snapshot_attributes(self.tensors)
        self._parameters = [tensor for tensor in self.tensors if is_dense(tensor) and tensor.requires_grad]
        self._data_ptrs = list(map(_data_ptr, self._parameters))
        self._state_layout = MemoryLayout([tensor for tensor in self.tensors if not tensor.requires_grad])

    def has_changed(self) -> bool:
        """Whether a tensor was given other memory, something was set on one, or a closure reads something else."""
        # How weights are read is looked at before every call; of the rest, it is here.
        if list(map(_data_ptr, self._parameters)) != self._data_ptrs or not self._state_layout.is_unchanged():
            return True
        if not all(cell_matches(cell, before) for cell, before in self.closure_variables):
            return True
        return any(map(_attributes_changed, self.tensors, self._tensor_attributes))

    def refresh_staging(self, call: object, follow: bool) -> None:
        """Let the worker find the values that tensors have now, in this call; where it need not, only at first."""
        if self.staging is not None and (follow or self.is_new):
            self.staging.refresh(call)
        self.is_new = False

    def read_gradients(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """What the worker has left in the slots of these tensors, on the device of the tensors."""
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
        """The values of the tensors that lie in no common memory."""
        return {number: self.tensors[number].detach() for number in self.unshared}


def versioned_tensors(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The tensors whose writes are counted, after their places; those of inference mode have no such counter."""
    places = [place for place, tensor in enumerate(tensors) if not tensor.is_inference()]
    return places, [tensors[place] for place in places]


_data_ptr = torch._C.TensorBase.data_ptr


def _snapshot_attributes(tensors: Sequence[Tensor]) -> list[dict[str, ValueSnapshot]]:
    """What is set on each tensor, as it is now."""
    return [{name: take_snapshot(value) for name, value in tensor.__dict__.items()} for tensor in tensors]


def _attributes_changed(tensor: Tensor, marks: dict[str, ValueSnapshot]) -> bool:
    """Whether other things are set on a tensor, or what is set was changed."""
    found = tensor.__dict__
    if not found and not marks:
        return False
    return found.keys() != marks.keys() or not all(marks[name].matches(value) for name, value in found.items())


class TensorTableBuilder:
    """The entries of a table, the memory that they lie in, and what lies in none."""

    def __init__(self, tensors: Sequence[Tensor], shadow: RemoteReplica, near: bool) -> None:
        """`near` says whether the worker can open memory of the source's device."""
        self.blocks: dict[int, SharedMemory] = {}
        self.ipc_blocks: dict[int, DeviceMemory] = {}
        self._same_device = near
        self.storages: list[Tensor] = []
        self.unshared: list[int] = []
        self._source_device = shadow.source_device
        self._needs_copies = needs_device_copies(shadow.worker_device)
        self.staged_offsets: set[int] = set()
        """Where in the image lies what the worker copies from it."""
        self._storage_indices: dict[int, int] = {}
        dense = [tensor for tensor in tensors if _has_data(tensor)]
        far = [tensor for tensor in dense if needs_staging(tensor) and self._ipc_location(tensor) is None]
        self.staging = staging_copy_for(shadow.source_modules[0], far)
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
        """The number of the block that a tensor's storage lies in, and where; or 0 and the number of a storage sent."""
        address = tensor.untyped_storage().data_ptr()
        opened, image = self._ipc_location(tensor), self.staging
        if opened is not None:
            return opened
        if image is not None and address in image.offsets:
            self.blocks[image.block_id] = image.memory
            return image.block_id, image.offsets[address]
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
        """Where a tensor lies in memory of its device that the worker opens, if it does."""
        place = locate(tensor) if self._same_device else None
        if place is None or not isinstance(place.block.memory, DeviceMemory):
            return None
        self.ipc_blocks[place.block.block_id] = place.block.memory
        return place.block.block_id, place.offset


def needs_device_copies(device: torch.device) -> bool:
    """Whether a worker of this device computes with copies of what lies in memory that it shares with others."""
    return device.type != "cpu"


def _has_data(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta
