"""The tensors of a source module as a worker is told of them: where each lies, or what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.driver import DeviceMemory
from instep.engines.processes.estate import locate
from instep.engines.processes.image import image_of, needs_image
from instep.engines.processes.orders import Entry, Spot
from instep.engines.processes.shadow import Shadow
from instep.structure.shapes import is_dense


class Entries:
    """The entries of a table, the memory that they lie in, and what lies in none."""

    def __init__(self, tensors: Sequence[Tensor], shadow: Shadow, near: bool) -> None:
        """`near` says whether the worker can open memory of the source's device."""
        self.blocks: dict[int, SharedMemory] = {}
        self.opened: dict[int, DeviceMemory] = {}
        self._near = near
        self.sent: list[Tensor] = []
        self.loose: list[int] = []
        self._home = shadow.home
        self._pulls = copies_to(shadow.place)
        self.pulled: set[int] = set()
        """Where in the image lies what the worker copies from it."""
        self._storages: dict[int, int] = {}
        dense = [tensor for tensor in tensors if _has_data(tensor)]
        far = [tensor for tensor in dense if needs_image(tensor) and self._open(tensor) is None]
        self.image = image_of(shadow.source_modules[0], far)
        self.entries = [self._entry(number, tensor) for number, tensor in enumerate(tensors)]

    def _entry(self, number: int, tensor: Tensor) -> Entry:
        spot = self._spot(tensor) if _has_data(tensor) else None
        if spot is None or not spot.block:
            self.loose.append(number)
        value = tensor.detach() if spot is None else None
        near = tensor.device == self._home
        return Entry(type(tensor), tensor.requires_grad, dict(tensor.__dict__), spot, value, near)

    def _spot(self, tensor: Tensor) -> Spot:
        storage = tensor.untyped_storage()
        block, offset = self._place(tensor)
        start, size = int(tensor.storage_offset()), tuple(tensor.size())
        pull = self._pulls and block in self.blocks and tensor.device == self._home
        if pull and self.image is not None and block == self.image.number:
            self.pulled.add(offset)
        return Spot(block, offset, storage.nbytes(), start, size, tensor.stride(), tensor.dtype, pull)

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """The number of the block that a tensor's storage lies in, and where; or 0 and the number of a storage sent."""
        address = tensor.untyped_storage().data_ptr()
        opened, image = self._open(tensor), self.image
        if opened is not None:
            return opened
        if image is not None and address in image.offsets:
            self.blocks[image.number] = image.memory
            return image.number, image.offsets[address]
        place = locate(tensor)
        if place is not None and isinstance(place.block.memory, SharedMemory):
            self.blocks[place.block.number] = place.block.memory
            return place.block.number, place.offset
        storage = tensor.untyped_storage()
        if address not in self._storages or not storage.nbytes():
            self._storages[address] = len(self.sent)
            self.sent.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return 0, self._storages[address]

    def _open(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a tensor lies in memory of its device that the worker opens, if it does."""
        place = locate(tensor) if self._near else None
        if place is None or not isinstance(place.block.memory, DeviceMemory):
            return None
        self.opened[place.block.number] = place.block.memory
        return place.block.number, place.offset


def copies_to(device: torch.device) -> bool:
    """Whether a worker of this device computes with copies of what lies in memory that it shares with others."""
    return device.type != "cpu"


def _has_data(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_meta
