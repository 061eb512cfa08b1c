"""Sums gradients over all ranks, in buckets, also while the backward that computes them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instep.autograd.bridge import Gradients
from instep.collectives.buckets import all_present, gradient_buckets
from instep.engines.torchrun.local_buckets import LocalBuckets
from instep.replicas.tensors import get_grad
from instep.replicas.write_watch import get_version
from instep.runtime.modes import set_grad_mode, set_inference_mode

COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Settings of `reduce` that send gradients in another dtype."""
_get_layout: Callable[[Tensor], torch.layout] = attrgetter("layout")
_get_shape_and_dtype: Callable[[Tensor], tuple[torch.Size, torch.dtype]] = attrgetter("shape", "dtype")


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
        self._has_no_empty = [all(map(Tensor.numel, like)) for like in self._like]

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
        if self._has_no_empty[number]:
            return list(torch._C._nn.unflatten_dense_tensors(flat, like))
        parts = flat.split([source.numel() for source in like])
        return [part.view(source.shape) for part, source in zip(parts, like, strict=True)]


def _layout(sources: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return list(map(_get_shape_and_dtype, sources))


def _are_strided(gradients: Sequence[Tensor | None]) -> bool:
    """Whether no gradient is None or sparse."""
    return all_present(gradients) and all(map(is_, map(_get_layout, cast(Any, gradients)), repeat(torch.strided)))


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
        leaves: Sequence[Tensor],
        reduce: str | Callable[..., Any] | None = None,
        local: LocalBuckets | None = None,
    ) -> None:
        """
        Args:
            group: The process group, in which nothing else runs meanwhile.
            device: The device of the gradients.
            leaves: The tensors whose gradients are reduced, unless `set_gradients` is called before; empty if this rank
                has no replica.
            reduce: How a bucket is summed: a key of `COMPRESSED`, a function `(bucket, group)`, or by all-reduce.
            local: Memory through which ranks of one machine sum the buckets, instead of the process group.
        """
        self._plan, self._group, self._device, self._leaves = plan, group, device, leaves
        self._gradients: Gradients | None = None if leaves else [None] * len(plan.sources)
        """This rank's gradients; None while they are those of the leaves."""
        self._reduce, self._local = reduce, local
        if local is not None:
            local.begin()
        self._arrived: list[set[int]] = [set() for _ in plan.buckets]
        self._complete = [False] * len(plan.buckets)
        self._packed_indices: list[int] = []
        self._packed: list[Tensor] = []
        """The gradients in the buckets that have started."""
        self._packed_versions: list[int] = []
        self._flats: list[Tensor] = []
        self._works: list[Any] = []
        self._lock = threading.Lock()
        """Held by the thread of autograd in which gradients arrive."""

    @property
    def is_exact(self) -> bool:
        """False if a gradient has grown after its bucket was packed, for example by a reentrant checkpoint."""
        same = all(map(is_, self._read(self._packed_indices), self._packed))
        return same and list(map(get_version, self._packed)) == self._packed_versions

    @property
    def identity(self) -> tuple[int, int, int]:
        """The number and a digest of the parameters, and the number of the reduction. Equal on ranks in step."""
        plan = self._plan
        return len(plan.sources), plan.parameters_digest, 0 if self._local is None else self._local.number

    @property
    def num_buckets(self) -> int:
        return len(self._plan.buckets)

    def watched(self) -> set[int]:
        """The indices of the gradients whose arrival has to be reported with `mark_ready`."""
        return self._plan.watched()

    def set_gradients(self, gradients: Gradients) -> None:
        """Set this rank's gradients, for buckets that have not started."""
        self._gradients = gradients

    def _read(self, indices: Sequence[int]) -> list[Tensor | None]:
        """This rank's gradients with these indices."""
        if self._gradients is not None:
            return list(map(self._gradients.__getitem__, indices))
        return list(map(get_grad, map(self._leaves.__getitem__, indices)))

    def again(self) -> BucketAllReduce:
        """Another reduction of the same gradients, which are complete now."""
        other = BucketAllReduce(self._plan, self._group, self._device, self._leaves, self._reduce, self._local)
        other._gradients = self._gradients
        return other

    def reduces_all(self, gradients: Gradients) -> bool:
        """Whether all gradients are there and reduced in buckets."""
        return len(self._plan.numbers) == len(gradients) and _are_strided(gradients)

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
            if all_present(self._read(indices)):
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
        with set_grad_mode(False), set_inference_mode(False):
            indices, dtype = list(bucket.indices), self._sent_dtype(bucket.dtype)
            gradients = self._read(indices)
            dense = cast(list[Tensor], gradients) if _are_strided(gradients) else None
            if dense and place is None and len(dense) > 1 and {gradient.dtype for gradient in dense} == {dtype}:
                flat = torch._C._nn.flatten_dense_tensors(dense)
            else:
                flat = torch.empty(bucket.numel, dtype=dtype, device=self._device) if place is None else place
                if place is None or self._local is None:
                    views = self._plan.views(flat, number)
                else:
                    views = self._local.own_parts(number, self._plan)
                if dense is None:
                    flat.zero_()
                    found = zip(indices, gradients, views, strict=True)
                    rest = [(i, g, view) for i, g, view in found if g is not None and g.layout is torch.strided]
                    indices, dense, views = [i for i, _, _ in rest], [g for _, g, _ in rest], [v for _, _, v in rest]
                if dense:
                    torch._foreach_copy_(views, dense)
            self._packed_indices += indices
            self._packed += dense
            self._packed_versions += map(get_version, dense)
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
            total, local = flat, self._local
            if local is not None:
                if not local.is_on_cuda and flat.dtype is bucket.dtype:
                    parts = local.sum_parts(number, self._plan)
                    for index, part in zip(bucket.indices, parts, strict=True):
                        sums[index] = part
                    continue
                total = local.sum(number, flat)
            elif work is not None:
                work.wait()
            if total.dtype is not bucket.dtype:
                total = total.to(bucket.dtype)
            for index, view in zip(bucket.indices, self._plan.views(total, number), strict=True):
                sums[index] = view
        if self._local is not None:
            self._local.end()
        return sums
