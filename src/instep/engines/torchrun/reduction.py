"""Sums gradients over all ranks, in buckets, also while the backward that computes them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.autograd.bridge import Gradients
from instep.collectives.buckets import gradient_buckets
from instep.engines.torchrun.local_buckets import LocalBuckets
from instep.runtime.modes import set_inference_mode

COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Settings of `reduce` that send gradients in another dtype."""


class BucketPlan:
    """The buckets of the gradients of some tensors, and which gradient of each bucket arrives last.

    Backwards of one module compute gradients in the same order. Once it is known, only the arrival of the last one is
    reported: a call from autograd for each of hundreds of parameters takes milliseconds.
    """

    def __init__(self, sources: Sequence[Tensor], module: nn.Module | None = None) -> None:
        """
        Args:
            sources: The tensors whose gradients are reduced. Their sizes and dtypes define the buckets.
            module: The module that has them.
        """
        self.sources = list(sources)
        positions = {} if module is None else {id(tensor): i for i, tensor in enumerate(module.parameters())}
        self.parameters_digest = crc32(repr([positions.get(id(source)) for source in sources]).encode())
        """Of the positions of the sources among the module's parameters."""
        self._layout = _layout(sources)
        self.buckets = gradient_buckets(sources)
        self.numbers = {index: number for number, bucket in enumerate(self.buckets) for index in bucket.indices}
        self.last: dict[int, int] = {}
        """By the number of a bucket: the index of the gradient that arrives last, if it is known."""
        self._like = [[self.sources[index] for index in bucket.indices] for bucket in self.buckets]

    def is_current(self, sources: Sequence[Tensor]) -> bool:
        same_count = len(sources) == len(self.sources)
        return same_count and all(map(is_, sources, self.sources)) and _layout(sources) == self._layout

    def watched(self) -> set[int]:
        """The indices of the gradients whose arrival has to be reported."""
        found: set[int] = set()
        for number, bucket in enumerate(self.buckets):
            found.update([self.last[number]] if number in self.last else bucket.indices)
        return found

    def views(self, flat: Tensor, number: int) -> list[Tensor]:
        """The parts of a flat bucket, in the shapes of the tensors."""
        like = self._like[number]
        if all(map(Tensor.numel, like)):
            return list(torch._C._nn.unflatten_dense_tensors(flat, like))
        parts = flat.split([source.numel() for source in like])
        return [part.view(source.shape) for part, source in zip(parts, like, strict=True)]


def _layout(sources: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(source.shape, source.dtype) for source in sources]


class BucketAllReduce:
    """One rank's part of an all-reduce of gradients.

    All ranks reduce the same buckets in the same order: a bucket when all its gradients have arrived, and the rest in
    `start_rest`. A gradient that has not arrived by then counts as zero.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: Any,
        device: torch.device,
        gradient_of: Callable[[int], Tensor | None],
        reduce: str | Callable[..., Any] | None = None,
        local: LocalBuckets | None = None,
    ) -> None:
        """
        Args:
            group: The process group, in which nothing else runs meanwhile.
            device: The device of the gradients.
            gradient_of: Returns this rank's gradient by index.
            reduce: How a bucket is summed: a key of `COMPRESSED`, a function `(bucket, group)`, or by all-reduce.
            local: Memory through which ranks of one machine sum the buckets, instead of the process group.
        """
        self._plan, self._group, self._device, self._gradient_of = plan, group, device, gradient_of
        self._reduce, self._local = reduce, local
        if local is not None:
            local.begin()
        self._arrived: list[set[int]] = [set() for _ in plan.buckets]
        self._complete = [False] * len(plan.buckets)
        self._packed: list[tuple[int, Tensor, int]] = []
        """The gradients in the buckets that have started, by index, with their versions."""
        self._flats: list[Tensor] = []
        self._works: list[Any] = []
        self._lock = threading.Lock()
        """Held by the thread of autograd in which gradients arrive."""

    @property
    def is_exact(self) -> bool:
        """False if a gradient has grown after its bucket was packed, for example by a reentrant checkpoint."""
        packed, gradient_of = self._packed, self._gradient_of
        return all(gradient_of(index) is gradient and gradient._version == was for index, gradient, was in packed)

    @property
    def identity(self) -> tuple[int, int, int]:
        """The number and a digest of the parameters, and the number of the reduction. Equal on ranks in step."""
        plan = self._plan
        return len(plan.sources), plan.parameters_digest, 0 if self._local is None else self._local.number

    def set_gradients(self, gradients: Gradients) -> None:
        """Set this rank's gradients, for buckets that have not started."""
        self._gradient_of = gradients.__getitem__

    def again(self) -> BucketAllReduce:
        """Another reduction of the same gradients, which are complete now."""
        return BucketAllReduce(self._plan, self._group, self._device, self._gradient_of, self._reduce, self._local)

    def reduces(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is reduced in a bucket. Sparse ones, and those of some dtypes, are not."""
        return index in self._plan.numbers and gradient.layout is torch.strided

    def mark_ready(self, index: int) -> None:
        """Called when one of the watched gradients has arrived, or has grown."""
        number = self._plan.numbers.get(index)
        if number is None:
            return
        with self._lock:
            self._complete[number] = self._complete[number] or self._is_complete(number, index)
            while len(self._works) < len(self._complete) and self._complete[len(self._works)]:
                self._start_next()

    def _is_complete(self, number: int, index: int) -> bool:
        """Whether a bucket has all its gradients, now that one has arrived."""
        last, indices = self._plan.last, self._plan.buckets[number].indices
        if number in last:
            if last[number] != index:
                return False
            if all(self._gradient_of(other) is not None for other in indices):
                return True
            del last[number]  # this backward has another order: the bucket starts at the end
            return False
        self._arrived[number].add(index)
        if len(self._arrived[number]) < len(indices):
            return False
        last[number] = index
        return True

    def start_rest(self) -> None:
        """Start the reduction of all other buckets, at the end of a backward."""
        with self._lock:
            while len(self._works) < len(self._complete):
                self._start_next()

    def _start_next(self) -> None:
        number, work = len(self._works), None
        place = None if self._local is None else self._local.place(number)
        flat = self._pack(number, place)
        self._flats.append(flat)
        if self._local is not None:
            if place is not None:
                self._local.publish(number)
            else:
                work = self._local.copy(number, flat)
        elif callable(self._reduce):
            work = self._reduce(flat, self._group)
        else:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        self._works.append(work)

    def _pack(self, number: int, place: Tensor | None) -> Tensor:
        """A bucket with this rank's gradients, in `place` if given. A gradient that has not arrived counts as zero."""
        bucket = self._plan.buckets[number]
        with torch.no_grad(), set_inference_mode(False):
            gradients = [(index, self._gradient_of(index)) for index in bucket.indices]
            dense = [(index, g) for index, g in gradients if g is not None and g.layout is torch.strided]
            self._packed += [(index, gradient, gradient._version) for index, gradient in dense]
            flat = place
            if flat is None:
                flat = torch.empty(bucket.numel, dtype=self._sent_dtype(bucket.dtype), device=self._device)
            if len(dense) < len(gradients):
                flat.zero_()
            views = self._plan.views(flat, number)
            if len(dense) < len(gradients):
                present = {index for index, _ in dense}
                views = [view for view, (index, _) in zip(views, gradients, strict=True) if index in present]
            if dense:
                torch._foreach_copy_(views, [gradient.detach() for _, gradient in dense])
        return flat

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if isinstance(self._reduce, str) and dtype.is_floating_point:
            return COMPRESSED[self._reduce]
        is_half = dtype in COMPRESSED.values()
        return torch.float32 if is_half and self._device.type == "cpu" else dtype

    def finish(self) -> Gradients:
        """Wait for all buckets, on CUDA on the current stream. Returns the sums by index; None where there is none."""
        self.start_rest()
        if self._local is not None:
            for number, (work, flat) in enumerate(zip(self._works, self._flats, strict=True)):
                self._local.complete(number, flat, work)
        sums: Gradients = [None] * len(self._plan.sources)
        for number, (work, flat, bucket) in enumerate(zip(self._works, self._flats, self._plan.buckets, strict=True)):
            total = flat
            if self._local is not None:
                total = self._local.sum(number, flat)
            elif work is not None:
                work.wait()
            total = total.to(bucket.dtype)
            for index, view in zip(bucket.indices, self._plan.views(total, number), strict=True):
                sums[index] = view
        if self._local is not None:
            self._local.end()
        return sums
