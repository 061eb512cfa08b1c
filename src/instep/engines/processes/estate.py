"""Where the source's tensors live so that workers can read them: shared memory, moved into once.

A worker maps the same memory, so a step of the optimizer is there without anything being sent. What cannot be moved,
because somebody else holds the memory too (a numpy array, a flat buffer of the user's), is sent by value.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.driver import DeviceMemory
from instep.modes import inference
from instep.private import storage_users
from instep.structure.shapes import is_dense

_ALIGNED = 64
_HOST = torch.device("cpu")
_numbers = itertools.count(1)


class Block:
    """One piece of memory, of the host or of an accelerator, that tensors of a module were moved into."""

    def __init__(self, memory: SharedMemory | DeviceMemory) -> None:
        self.number = next(_numbers)
        self.memory = memory
        self.start = memory.tensor(0, memory.nbytes).data_ptr()


class Location(NamedTuple):
    """Where a tensor's storage lies: a block, and the bytes of it."""

    block: Block
    offset: int
    nbytes: int


_blocks: list[Block] = []
_users: dict[int, int] = {}
"""By the number of a block: how many storages still lie in it."""


def move_in(
    tensors: Iterable[Tensor],
    make: Callable[[int], SharedMemory | DeviceMemory] = SharedMemory.create,
    device: torch.device = _HOST,
) -> None:
    """Move tensors' memory into shared memory, whole storages at a time; views of one storage stay views of one.

    Those of a device are moved, into memory that `make` gives.
    """
    found: dict[int, list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.device == device and _can_move(tensor) and locate(tensor) is None:
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    groups = [group for group in found.values() if storage_users(group[0]) <= len(group)]
    if not groups:
        return
    sizes = [group[0].untyped_storage().nbytes() for group in groups]
    offsets, total = layout(sizes)
    block = Block(make(total))
    _blocks.append(block)
    _users[block.number] = len(groups)
    with torch.no_grad(), inference(False):
        for group, offset, nbytes in zip(groups, offsets, sizes, strict=True):
            there = block.memory.tensor(offset, nbytes)
            there.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(group[0].untyped_storage()))
            storage = there.untyped_storage()
            weakref.finalize(storage, _leave, block)
            for tensor in group:
                view = torch.empty(0, dtype=tensor.dtype, device=device).set_(
                    storage, tensor.storage_offset(), tensor.size(), tensor.stride()
                )
                tensor.data = view


def _leave(block: Block) -> None:
    _users[block.number] -= 1
    if not _users[block.number]:
        del _users[block.number]
        _blocks.remove(block)


def locate(tensor: Tensor) -> Location | None:
    """Where a tensor lies in shared memory; None for one that does not.

    In a forked child, what its parent shared is from now on shared by the child, in memory of its own.
    """
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    for block in _blocks:
        if block.start <= address < block.start + block.memory.nbytes:
            if isinstance(block.memory, SharedMemory):
                block.memory.share()
            return Location(block, address - block.start, storage.nbytes())
    return None


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of these sizes go in one piece of memory, and its size."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNED) * _ALIGNED
    return offsets, max(at, _ALIGNED)


def _can_move(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and is_dense(tensor)
        and not tensor.is_inference()
        and tensor.is_leaf
        and tensor.untyped_storage().nbytes() > 0
        and tensor.untyped_storage().resizable()
    )
