"""Reduces gradients to rank 0 over an NCCL group, in buckets, also while the backward that computes them runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.devices import Bucket
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.runtime.modes import NO_CONTEXT, set_inference_mode


class BucketReducer:
    """One member's part of a reduction to rank 0.

    All members reduce the same buckets in the same order: a bucket when all its gradients have arrived, and the rest in
    `finish`. A gradient that has not arrived by then counts as zero. No member changes its own gradients, so that they
    can be reduced again if the reduction fails.
    """

    def __init__(
        self,
        group: NcclGroup,
        buckets: Sequence[Bucket],
        numels: Sequence[int],
        gradient_of: Callable[[int], Tensor | None],
    ) -> None:
        """`numels` are the sizes of all gradients, and `gradient_of` returns this member's, by index."""
        self._group, self._buckets, self._numels = group, buckets, numels
        self._gradient_of = gradient_of
        self._stream: Any = torch.cuda.current_stream(group.device) if group.device.type == "cuda" else None
        """The stream of the backward. All work of the reduction is ordered with it."""
        self._numbers = {index: number for number, bucket in enumerate(buckets) for index in bucket.indices}
        self._num_missing = [len(bucket.indices) for bucket in buckets]
        """For each bucket: the number of gradients that have not arrived."""
        self._arrived: set[int] = set()
        self._flats: list[Tensor] = []
        self._waits: list[Callable[[], None]] = []
        """One function for each reduction that has started, which waits for it."""
        self._num_started = 0
        self._error: RuntimeError | None = None
        self._lock = threading.Lock()
        """Held by the thread of autograd in which gradients arrive."""
        self.is_exact = True
        """False if a gradient has grown after its bucket was reduced, or a reduction could not be started."""

    def mark_ready(self, index: int) -> None:
        """Called when a gradient has arrived, or has grown, on the current stream."""
        number = self._numbers.get(index)
        if number is None:
            return
        with self._lock:
            if self._stream is not None:
                current = torch.cuda.current_stream(self._group.device)
                if current != self._stream:
                    self._stream.wait_stream(current)
            if index not in self._arrived:
                self._arrived.add(index)
                self._num_missing[number] -= 1
            elif number < self._num_started:  # for example by a reentrant checkpoint
                self.is_exact = False
            while self._num_started < len(self._buckets) and not self._num_missing[self._num_started]:
                self._start_next()

    def start_up_to(self, number: int) -> None:
        """Start the reduction of all buckets up to one."""
        with self._lock:
            while self._num_started <= number:
                self._start_next()

    def start_rest(self) -> None:
        """Start the reduction of all other buckets, at the end of a backward, which copies the gradients."""
        self.start_up_to(len(self._buckets) - 1)

    def _start_next(self) -> None:
        """Start the reduction of the next bucket. A backward goes on if that is not possible."""
        bucket = self._buckets[self._num_started]
        self._num_started += 1
        if self._error is not None:
            return
        try:
            self._group.raise_if_aborted()
            with NO_CONTEXT if self._stream is None else torch.cuda.stream(self._stream):
                flat = self._pack(bucket)
                self._waits.append(self._group.start_reduce(flat))
            self._flats.append(flat)
        except RuntimeError as error:  # of the group, or out of memory
            self._error, self.is_exact = error, False
            self._group.abort(f"{type(error).__name__}: {error}")

    def _pack(self, bucket: Bucket) -> Tensor:
        with torch.no_grad(), set_inference_mode(False):
            gradients = [self._gradient_of(index) for index in bucket.indices]
            make = torch.zeros if any(gradient is None for gradient in gradients) else torch.empty
            flat: Tensor = make(bucket.numel, dtype=bucket.dtype, device=self._group.device)
            parts = flat.split([self._numels[index] for index in bucket.indices])
            pairs = [
                (part.view(gradient.shape), gradient.detach())
                for part, gradient in zip(parts, gradients, strict=True)
                if gradient is not None
            ]
            if pairs:
                torch._foreach_copy_([part for part, _ in pairs], [gradient for _, gradient in pairs])
        return flat

    def finish(self) -> list[Tensor]:
        """Start the rest, and make the current stream wait for all, not this thread. Raises `GroupAborted` on failure.

        Returns the flat buckets, which are the sums on rank 0 only. A member's part is complete when it has sent its
        data, perhaps before rank 0 has received them. So rank 0 broadcasts one byte at the end: a member that has
        received it knows that the sums are complete.
        """
        self.start_rest()
        if self._error is not None:
            raise GroupAborted(str(self._error)) from self._error
        for wait in self._waits:
            wait()
        self._group.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._group.device))
        return self._flats
