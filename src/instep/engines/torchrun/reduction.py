"""Sums gradients over all ranks, in buckets, also while the backward that computes them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.autograd.bridge import Gradients
from instep.collectives.buckets import gradient_buckets
from instep.devices import Bucket
from instep.runtime.modes import set_inference_mode

COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Settings of `reduce` that send gradients in another dtype."""


class BucketAllReduce:
    """One rank's part of an all-reduce of gradients.

    All ranks reduce the same buckets in the same order: a bucket when all its gradients have arrived, and the rest in
    `start_rest`. A gradient that has not arrived by then counts as zero.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        group: Any,
        device: torch.device,
        gradient_of: Callable[[int], Tensor | None],
        reduce: str | Callable[..., Any] | None = None,
    ) -> None:
        """
        Args:
            sources: The tensors whose gradients are reduced. Their sizes and dtypes define the buckets.
            group: The process group, in which nothing else runs meanwhile.
            device: The device of the gradients.
            gradient_of: Returns this rank's gradient by index.
            reduce: How a bucket is summed: a key of `COMPRESSED`, a function `(bucket, group)`, or by all-reduce.
        """
        self._sources, self._group, self._device, self._gradient_of = sources, group, device, gradient_of
        self._reduce = reduce
        self._buckets = gradient_buckets(sources)
        self._numbers = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices}
        self._num_missing = [len(bucket.indices) for bucket in self._buckets]
        self._arrived: set[int] = set()
        self._flats: list[Tensor] = []
        self._works: list[Any] = []
        self._lock = threading.Lock()
        """Held by the thread of autograd in which gradients arrive."""
        self.is_exact = True
        """False if a gradient has grown after its bucket was reduced."""

    def set_gradients(self, gradients: Gradients) -> None:
        """Set this rank's gradients, for buckets that have not started."""
        self._gradient_of = gradients.__getitem__

    def again(self) -> BucketAllReduce:
        """Another reduction of the same gradients, which are complete now."""
        return BucketAllReduce(self._sources, self._group, self._device, self._gradient_of, self._reduce)

    def reduces(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is reduced in a bucket. Sparse ones, and those of some dtypes, are not."""
        return index in self._numbers and gradient.layout is torch.strided

    def mark_ready(self, index: int) -> None:
        """Called when a gradient has arrived, or has grown."""
        number = self._numbers.get(index)
        if number is None:
            return
        with self._lock:
            if index not in self._arrived:
                self._arrived.add(index)
                self._num_missing[number] -= 1
            elif number < len(self._works):  # for example by a reentrant checkpoint
                self.is_exact = False
            while len(self._works) < len(self._buckets) and not self._num_missing[len(self._works)]:
                self._start_next()

    def start_rest(self) -> None:
        """Start the reduction of all other buckets, at the end of a backward."""
        with self._lock:
            while len(self._works) < len(self._buckets):
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[len(self._works)]
        flat = self._pack(bucket)
        self._flats.append(flat)
        if callable(self._reduce):
            work = self._reduce(flat, self._group)
        else:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._works.append(work)

    def _pack(self, bucket: Bucket) -> Tensor:
        with torch.no_grad(), set_inference_mode(False):
            gradients = [self._gradient_of(index) for index in bucket.indices]
            present = [g is not None and g.layout is torch.strided for g in gradients]
            dtype = self._sent_dtype(bucket.dtype)
            make = torch.empty if all(present) else torch.zeros
            flat: Tensor = make(bucket.numel, dtype=dtype, device=self._device)
            pairs = [
                (view, gradient.detach())
                for view, gradient, is_dense in zip(self._views(flat, bucket), gradients, present, strict=True)
                if is_dense and gradient is not None
            ]
            if pairs:
                torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        return flat

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if isinstance(self._reduce, str) and dtype.is_floating_point:
            return COMPRESSED[self._reduce]
        is_half = dtype in COMPRESSED.values()
        return torch.float32 if is_half and self._device.type == "cpu" else dtype

    def _views(self, flat: Tensor, bucket: Bucket) -> list[Tensor]:
        sources = [self._sources[index] for index in bucket.indices]
        parts = flat.split([source.numel() for source in sources])
        return [part.view(source.shape) for part, source in zip(parts, sources, strict=True)]

    def finish(self) -> Gradients:
        """Wait for all buckets, on CUDA on the current stream. Returns the sums by index; None where there is none."""
        self.start_rest()
        sums: Gradients = [None] * len(self._sources)
        for work, flat, bucket in zip(self._works, self._flats, self._buckets, strict=True):
            if work is not None:
                work.wait()
            total = flat.to(bucket.dtype)
            for index, view in zip(bucket.indices, self._views(total, bucket), strict=True):
                sums[index] = view
        return sums
