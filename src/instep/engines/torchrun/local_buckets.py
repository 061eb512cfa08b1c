"""Sums of gradients of the ranks of one machine, through memory that all of them map.

Every rank has a row, with a place for each bucket. It packs its gradients there and writes a number. The sum of a
bucket reads the rows of all ranks, in the order of the ranks: all of them get the same bits. Gradients on a GPU, for
ranks that would send them by Gloo, are copied to the row and from the rows of the others.

A rank writes to its row only when every rank has finished the last reduction, or has given it up, which shows when it
begins the next one. A rank reads a bucket only when the number of its owner has reached it. Only `complete` and `sum`
wait for other ranks: by then all of them have exchanged the last message of the backward, and are in this reduction.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from instep.devices import Bucket
from instep.engines.torchrun.channel import RankChannel
from instep.engines.torchrun.local_memory import CACHE_LINE

_LABEL = "the reduction of gradients"


class BucketLayout(Protocol):
    """Divides flat buckets into tensors."""

    def views(self, flat: Tensor, number: int) -> list[Tensor]:
        """The parts of a flat bucket, in the shapes of the tensors."""
        ...


class LocalBuckets:
    """The buckets of one module. Its ranks reduce them again and again, all buckets each time."""

    def __init__(self, memory: mmap.mmap, channel: RankChannel, places: Sequence[tuple[torch.dtype, int]]) -> None:
        """`memory` has `nbytes(count, places)` bytes. `places` are the dtype and the length of each bucket."""
        self._channel, self._rank, self._device, count = channel, channel.rank, channel.device, channel.count
        self._copies: list[Any] = []
        """The events of the copies from a device in this reduction."""
        self.is_on_cuda: bool = self._device.type == "cuda"
        if self.is_on_cuda:
            _pin(self, memory, self._device, self._copies)
        words = CACHE_LINE // 8
        numbers = np.frombuffer(memory, np.int64, 2 * count * words).reshape(2, count, words)[:, :, 0]
        self._packed = memoryview(numbers[0])
        """By rank: how many buckets it has packed, in all reductions."""
        self._finished = memoryview(numbers[1])
        """By rank: how many reductions it has finished. For those it gave up, this is written at the next `begin`."""
        at, self._rows = 2 * count * CACHE_LINE, []
        for _ in range(count):
            row: list[Tensor] = []
            for dtype, numel in places:
                row.append(_tensor_at(memory, at, dtype, numel))
                at += _aligned(numel * dtype.itemsize)
            self._rows.append(row)
        self._part_views: dict[int, tuple[weakref.ref[BucketLayout], list[list[Tensor]]]] = {}
        """By bucket: the last layout, and the parts of the bucket's places."""
        self.number = 0
        """The number of reductions that this rank has begun."""
        self._num_published = 0
        """The number of buckets that it has published in this reduction, in order."""

    @staticmethod
    def nbytes(count: int, places: Sequence[tuple[torch.dtype, int]]) -> int:
        """The size of the memory."""
        return count * (2 * CACHE_LINE + sum(_aligned(numel * dtype.itemsize) for dtype, numel in places))

    def begin(self) -> None:
        """Begin a reduction."""
        for copy in self._copies:  # of a reduction that was given up
            copy.synchronize()
        self._copies.clear()
        self._finished[self._rank] = self.number
        self.number += 1
        self._num_published = 0

    def place(self, bucket: int) -> Tensor | None:
        """Where this rank packs a bucket; None if it is on another device, or if other ranks may read the last one.

        Then it is packed elsewhere, as are those after it.
        """
        is_next = not self.is_on_cuda and bucket == self._num_published
        return self._rows[self._rank][bucket] if is_next and self._is_free() else None

    def _is_free(self) -> bool:
        """Whether no rank reads the buckets of the last reduction."""
        return all(map(self._has_finished, range(len(self._rows))))

    def copy(self, bucket: int, packed: Tensor) -> Any:
        """Begin to copy a bucket from a device to its place. Returns the event of its completion, for `complete`.

        None if that has to wait for other ranks, or if the bucket is on the CPU.
        """
        if packed.device.type == "cpu" or not self._is_free():
            return None
        self._rows[self._rank][bucket].copy_(packed, non_blocking=True)
        self._copies.append(torch.cuda.current_stream(packed.device).record_event())
        return self._copies[-1]

    def _has_finished(self, rank: int) -> bool:
        """Whether a rank has finished the last reduction."""
        return self._finished[rank] >= self.number - 1

    def publish(self, bucket: int) -> None:
        """Let other ranks read a bucket, which has been packed in its place, and those before it."""
        self._channel.fence()
        self._num_published = bucket + 1
        self._packed[self._rank] = self._last_number(bucket)

    def _last_number(self, bucket: int) -> int:
        return (self.number - 1) * len(self._rows[0]) + bucket + 1

    def complete(self, bucket: int, packed: Tensor, copied: Any = None) -> None:
        """Publish a bucket that was packed elsewhere. Every bucket is completed, in order, before the first `sum`.

        Args:
            bucket: The index of the bucket.
            packed: The bucket of this rank.
            copied: The event that `copy` has returned.
        """
        own = self._rows[self._rank][bucket]
        if packed is own:
            return
        if copied is None:
            self._channel.wait(_LABEL, self._has_finished)
            own.copy_(packed)
        else:
            copied.synchronize()
        self.publish(bucket)

    def _wait_for(self, bucket: int) -> None:
        """Wait until all ranks have published a bucket."""
        number = self._last_number(bucket)
        self._channel.wait(_LABEL, lambda peer: self._packed[peer] >= number)
        self._channel.fence()

    def _parts(self, bucket: int, layout: BucketLayout) -> list[list[Tensor]]:
        """The places of a bucket in all rows, divided into tensors."""
        found = self._part_views.get(bucket)
        if found is None or found[0]() is not layout:
            views = [layout.views(row[bucket], bucket) for row in self._rows]
            found = self._part_views[bucket] = weakref.ref(layout), views
        return found[1]

    def own_parts(self, bucket: int, layout: BucketLayout) -> list[Tensor]:
        """The tensors of the place where this rank packs a bucket."""
        return self._parts(bucket, layout)[self._rank]

    def sum_parts(self, bucket: int, layout: BucketLayout) -> list[Tensor]:
        """The sums of all ranks' buckets on the CPU, as new tensors: other ranks may overwrite the rows later."""
        self._wait_for(bucket)
        first, second, *others = self._parts(bucket, layout)
        totals = list(torch._foreach_add(first, second))
        for other in others:
            torch._foreach_add_(totals, other)
        return totals

    def sum(self, bucket: int, packed: Tensor) -> Tensor:
        """The sum of all ranks' buckets, of which `packed` is that of this rank."""
        self._wait_for(bucket)
        first, second, *others = (
            packed if rank == self._rank else row[bucket].to(packed.device, non_blocking=True)
            for rank, row in enumerate(self._rows)
        )
        total = first + second
        for other in others:
            total += other
        return total

    def end(self) -> None:
        """End a reduction: all sums are taken."""
        if self.is_on_cuda:
            torch.cuda.current_stream(self._device).synchronize()
        self._copies.clear()
        self._channel.fence()
        self._finished[self._rank] = self.number


def bucket_places(buckets: Sequence[Bucket]) -> list[tuple[torch.dtype, int]]:
    """The dtypes and lengths of buckets that are sent by the host, where half precision is summed in float32."""
    half = (torch.float16, torch.bfloat16)
    return [(torch.float32 if bucket.dtype in half else bucket.dtype, bucket.numel) for bucket in buckets]


def _tensor_at(memory: mmap.mmap, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
    if not numel:  # torch.frombuffer refuses it
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def _pin(owner: object, memory: mmap.mmap, device: torch.device, copies: list[Any]) -> None:
    """Pin memory until its owner is freed, so that a GPU copies it fast, and while the host goes on."""
    cudart: Any = torch.cuda.cudart()
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with torch.cuda.device(device):
        if cudart.cudaHostRegister(address, len(memory), 0) == cudart.cudaError.success:
            weakref.finalize(owner, _unpin, cudart, address, memory, copies).atexit = False
        else:  # copies are slower
            with suppress(RuntimeError):  # a kernel takes the error of the call, which torch would raise later
                torch.zeros(1, device=device)


def _unpin(cudart: Any, address: int, _: mmap.mmap, copies: list[Any]) -> None:
    for copy in copies:
        copy.synchronize()
    cudart.cudaHostUnregister(address)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // CACHE_LINE) * CACHE_LINE
