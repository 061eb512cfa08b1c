"""Moves parameters into memory that workers map, and stages accelerator tensors in host memory."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.engines.processes.transport.copy_streams import StagedTensor, copy_all_to_host
from instep.engines.processes.transport.cuda_driver import DeviceMemory
from instep.engines.processes.transport.shared_memory import SharedMemory
from instep.errors import CannotCross, EngineError
from instep.runtime.locks import ForkSafeLock
from instep.runtime.modes import set_inference_mode
from instep.runtime.torch_private import storage_use_count
from instep.structure.shapes import is_dense

_ALIGNMENT = 64
_HOST = torch.device("cpu")
_block_ids = itertools.count(1)


class SharedBlock:
    """A block of shared host or device memory that holds tensors of a module."""

    def __init__(self, memory: SharedMemory | DeviceMemory) -> None:
        self.block_id = next(_block_ids)
        self.live_storages: list[None] = []
        """One entry for each storage in the block. Finalizers pop entries, which is atomic."""
        self.memory = memory
        self.address = memory.tensor(0, memory.nbytes).data_ptr()


class SharedLocation(NamedTuple):
    """The location of a tensor's storage in a shared block."""

    block: SharedBlock
    offset: int
    nbytes: int


_blocks: list[SharedBlock] = []


def share_parameters(
    tensors: Iterable[Tensor],
    allocate: Callable[[int], SharedMemory | DeviceMemory] = SharedMemory.create,
    device: torch.device = _HOST,
) -> None:
    """Move the storages of the tensors on a device into shared memory, allocated by `allocate`.

    Views of one storage remain views of one storage.
    """
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.device == device and _can_share(tensor) and locate(tensor) is None:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    groups = [group for group in by_storage.values() if storage_use_count(group[0]) <= len(group)]
    if not groups:
        return
    sizes = [group[0].untyped_storage().nbytes() for group in groups]
    offsets, total = pack_offsets(sizes)
    block = SharedBlock(allocate(total))
    block.live_storages += [None] * len(groups)
    _blocks.append(block)
    with torch.no_grad(), set_inference_mode(False):
        for group, offset, nbytes in zip(groups, offsets, sizes, strict=True):
            shared = block.memory.tensor(offset, nbytes)
            shared.copy_(_storage_bytes(group[0]))
            storage = shared.untyped_storage()
            weakref.finalize(storage, _release_storage, block)
            for tensor in group:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(
                    storage, tensor.storage_offset(), tensor.size(), tensor.stride()
                )


def _storage_bytes(tensor: Tensor) -> Tensor:
    """A tensor's storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _release_storage(block: SharedBlock) -> None:
    block.live_storages.pop()
    if not block.live_storages:
        _blocks.remove(block)


def locate(tensor: Tensor) -> SharedLocation | None:
    """The location of a tensor in shared memory, or None.

    In a forked child, memory that the parent shared is replaced by the child's own (see `SharedMemory.share`).
    """
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    for block in tuple(_blocks):  # the garbage collector may run finalizers that remove blocks
        if block.address <= address < block.address + block.memory.nbytes:
            if isinstance(block.memory, SharedMemory):
                block.memory.share()
            return SharedLocation(block, address - block.address, storage.nbytes())
    return None


def find_shared_memory(run: Sequence[StagedTensor]) -> Tensor | None:
    """The shared device memory of neighbouring tensors, as bytes; None if they are not neighbours there."""
    first, start = locate(run[0].tensor), run[0].offset
    if first is None or not isinstance(first.block.memory, DeviceMemory):
        return None
    address = run[0].tensor.data_ptr()
    if any(staged.tensor.data_ptr() - address != staged.offset - start for staged in run):
        return None
    return first.block.memory.tensor(first.offset, run[-1].end - start)


def pack_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Aligned offsets for pieces of these sizes in one block, and the size of the block."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(at, _ALIGNMENT)


def _can_share(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and is_dense(tensor)
        and not tensor.is_inference()
        and tensor.is_leaf
        and tensor.untyped_storage().nbytes() > 0
        and tensor.untyped_storage().resizable()
    )


class HostStagingCopy:
    """A copy of accelerator storages in shared host memory, which workers read."""

    def __init__(self, storages: Mapping[int, Tensor]) -> None:
        """`storages` are byte tensors by address."""
        offsets, total = pack_offsets([storage.nbytes for storage in storages.values()])
        try:
            self.memory = SharedMemory.create(total, "a copy of the module's tensors for replicas on other devices")
        except EngineError as error:
            raise CannotCross(f"{error}\nWrite engine='threads'.") from error
        self.block_id = SharedBlock(self.memory).block_id
        self.offsets = dict(zip(storages, offsets, strict=True))
        self._regions = [
            StagedTensor(offset, storage) for offset, storage in zip(offsets, storages.values(), strict=True)
        ]
        self._last_call: object = None
        self._lock = ForkSafeLock()

    def covers(self, storages: Mapping[int, Tensor]) -> bool:
        """Whether it includes all of these storages."""
        sizes = {address: staged.tensor.nbytes for address, staged in zip(self.offsets, self._regions, strict=True)}
        return all(sizes.get(address) == storage.nbytes for address, storage in storages.items())

    def regions(self, offsets: Collection[int]) -> list[StagedTensor]:
        """The storages at these offsets."""
        return [staged for staged in self._regions if staged.offset in offsets]

    def refresh(self, call: object) -> None:
        """Copy the storages' current values, once per call."""
        with self._lock:
            if self._last_call is not call:
                copy_all_to_host(self.memory, self._regions)
                self._last_call = call


_staging_copies: weakref.WeakKeyDictionary[nn.Module, HostStagingCopy] = weakref.WeakKeyDictionary()
_staging_lock = ForkSafeLock(_staging_copies.clear)


def staging_copy_for(root: nn.Module, tensors: Sequence[Tensor]) -> HostStagingCopy | None:
    """The staging copy for tensors of a module; None if there are no storages to copy."""
    storages: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages and storage.nbytes():
            storages[storage.data_ptr()] = _storage_bytes(tensor)
    if not storages:
        return None
    with _staging_lock:
        staging = _staging_copies.get(root)
        if staging is None or not staging.covers(storages):
            staging = _staging_copies[root] = HostStagingCopy(storages)
        return staging


def needs_staging(tensor: Tensor) -> bool:
    """Whether workers cannot map a tensor's memory."""
    return tensor.device.type != "cpu"
