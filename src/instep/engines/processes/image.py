"""The tensors of a module that lies on an accelerator, as workers elsewhere read them: an image in shared memory.

It is renewed at the beginning of each call, in a few large copies and once for all workers. A worker on a device of its
own copies from it what it computes with; one on the host computes with the image itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.bulk import Piece, to_host
from instep.engines.processes.estate import Block, layout
from instep.errors import CannotCross, EngineError
from instep.locks import ProcessLock


class Image:
    """The values of some storages."""

    def __init__(self, storages: Mapping[int, Tensor]) -> None:
        """`storages` are bytes, by their addresses."""
        offsets, total = layout([storage.nbytes for storage in storages.values()])
        try:
            self.memory = SharedMemory.create(total, "an image of the module for replicas of other devices")
        except EngineError as error:
            raise CannotCross(f"{error}\nWrite engine='threads'.") from error
        self.number = Block(self.memory).number
        self.offsets = dict(zip(storages, offsets, strict=True))
        self._pieces = [Piece(offset, storage) for offset, storage in zip(offsets, storages.values(), strict=True)]
        self._call: object = None
        self._lock = ProcessLock()

    def holds(self, storages: Mapping[int, Tensor]) -> bool:
        """Whether it is of these storages, or of more."""
        known = {offset: piece.tensor.nbytes for (offset, piece) in zip(self.offsets, self._pieces, strict=True)}
        return all(known.get(address) == storage.nbytes for address, storage in storages.items())

    def pieces(self, offsets: Collection[int]) -> list[Piece]:
        """The storages whose values lie at these places."""
        return [piece for piece in self._pieces if piece.offset in offsets]

    def renew(self, call: object) -> None:
        """Bring it up to the storages' values, once for each call."""
        with self._lock:
            if self._call is not call:
                to_host(self.memory, self._pieces)
                self._call = call


_images: weakref.WeakKeyDictionary[nn.Module, Image] = weakref.WeakKeyDictionary()
_lock = ProcessLock(_images.clear)


def image_of(root: nn.Module, tensors: Sequence[Tensor]) -> Image | None:
    """The image for tensors of a module; None where there is none to make."""
    storages: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages and storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage.data_ptr()] = whole
    if not storages:
        return None
    with _lock:
        known = _images.get(root)
        if known is None or not known.holds(storages):
            known = _images[root] = Image(storages)
        return known


def needs_image(tensor: Tensor) -> bool:
    """Whether workers cannot reach a tensor's memory by themselves."""
    return tensor.device.type != "cpu"
