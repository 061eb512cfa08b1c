"""What a worker was told of a module, as the process that told it knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CellType

import torch
from torch import Tensor

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.bell import Bell
from instep.engines.processes.bulk import fetch
from instep.engines.processes.closures import is_still
from instep.engines.processes.constants import Constants
from instep.engines.processes.driver import DeviceMemory
from instep.engines.processes.image import Image
from instep.engines.processes.spaces import Seen, seen
from instep.replicas.memory import Lay
from instep.structure.shapes import is_dense


@dataclass
class Told:
    """What a worker was told of a module."""

    table: list[Tensor]
    """Its tensors, in the order of their numbers; for one that an earlier call left there, what stands for it here."""
    counterparts: list[Tensor]
    """What stands here for each of them."""
    slots: dict[int, Tensor]
    """By number: where the worker leaves the tensor's gradient."""
    loose: list[int]
    """The numbers of tensors that lie in no common memory."""
    memory: SharedMemory | DeviceMemory
    """Where the slots are."""
    offsets: dict[int, int]
    """By number: where in it."""
    image: Image | None
    """Where the worker finds the values of tensors that it cannot reach."""
    near: bool
    """Whether tensors may stay on a device that both processes work on."""
    opened: bool
    """Whether they did, when the worker was told."""
    generators: list[torch.Generator]
    """The generators that the module holds, in the order of their numbers."""
    variables: list[tuple[CellType, Seen]]
    """The variables of closures that went with it, as they were."""
    bell: Bell | None
    """Tells of large gradients that lie in their slots."""
    pulled: set[int] = field(default_factory=set)
    """Where in the image lies what the worker copies from it."""
    constants: Constants = field(default_factory=lambda: Constants(()))
    """Those of imported modules that the worker reads for itself."""

    def __post_init__(self) -> None:
        self.new = True
        self.numbers = {id(tensor): number for number, tensor in enumerate(self.table)}
        self.sources = {id(made): id(source) for source, made in zip(self.table, self.counterparts, strict=True)}
        """By the id of what stands for it here: the id of each tensor."""
        self.places = {id(made): number for number, made in enumerate(self.counterparts)}
        """By the same: the number of each."""
        self.counted = counted(self.counterparts)
        self._all_near = all(slot.device == self.table[number].device for number, slot in self.slots.items())
        self._marks = _marks(self.table)
        self._weights = [tensor for tensor in self.table if is_dense(tensor) and tensor.requires_grad]
        self._pointers = list(map(_pointer, self._weights))
        self._state = Lay([tensor for tensor in self.table if not tensor.requires_grad])

    def moved(self) -> bool:
        """Whether a tensor was given other memory, something was set on one, or a closure reads something else."""
        # How weights are read is looked at before every call; of the rest, it is here.
        if list(map(_pointer, self._weights)) != self._pointers or not self._state.holds():
            return True
        if not all(is_still(cell, before) for cell, before in self.variables):
            return True
        return any(map(_is_marked_anew, self.table, self._marks))

    def renew(self, call: object, follow: bool) -> None:
        """Let the worker find the values that tensors have now, in this call; where it need not, only at first."""
        if self.image is not None and (follow or self.new):
            self.image.renew(call)
        self.new = False

    def gradients(self, numbers: Sequence[int]) -> dict[int, Tensor]:
        """What the worker has left in the slots of these tensors, on the device of the tensors."""
        memory = self.memory
        if self._all_near:
            return {n: self.slots[n] for n in numbers}
        far = [n for n in numbers if self.slots[n].device != self.table[n].device]
        near = {n: self.slots[n] for n in numbers if self.slots[n].device == self.table[n].device}
        if not far:
            return near
        assert isinstance(memory, SharedMemory)
        brought = fetch(memory, [(self.offsets[n], self.slots[n]) for n in far], self.table[far[0]].device)
        return near | dict(zip(far, brought, strict=True))

    def fresh(self) -> dict[int, Tensor]:
        """The values of the tensors that lie in no common memory."""
        return {number: self.table[number].detach() for number in self.loose}


def counted(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """The tensors whose writes are counted, after their places; those of inference mode have no such counter."""
    places = [place for place, tensor in enumerate(tensors) if not tensor.is_inference()]
    return places, [tensors[place] for place in places]


_pointer = torch._C.TensorBase.data_ptr


def _marks(tensors: Sequence[Tensor]) -> list[dict[str, Seen]]:
    """What is set on each tensor, as it is now."""
    return [{name: seen(value) for name, value in tensor.__dict__.items()} for tensor in tensors]


def _is_marked_anew(tensor: Tensor, marks: dict[str, Seen]) -> bool:
    """Whether other things are set on a tensor, or what is set was changed."""
    found = tensor.__dict__
    if not found and not marks:
        return False
    return found.keys() != marks.keys() or not all(marks[name].still(value) for name, value in found.items())
