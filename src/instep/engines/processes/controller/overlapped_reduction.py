"""The controller's part of a reduction over NCCL that begins while the replicas' backwards run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from instep.collectives.buckets import gradient_buckets
from instep.devices import unpack
from instep.engines.processes.controller.nccl_manager import ControllerGroup
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.messages import BackwardReduction
from instep.engines.processes.nccl.bucket_reducer import BucketReducer
from instep.engines.processes.nccl.group import GroupAborted
from instep.runtime.torch_private import register_own_hook


class OverlappedReduction:
    """Sums the workers' gradients of one backward on rank 0, the controller.

    The controller contributes zeros: its own gradients are added afterwards, as without NCCL. Its part in the reduction
    of a bucket starts when its own backward has reached the bucket's last leaf.
    """

    def __init__(self, group: ControllerGroup, leaves: Sequence[Tensor], *, stream_ordered: bool) -> None:
        """`leaves` are those of replica 0. Raises `GroupAborted`.

        `stream_ordered` is whether the caller's stream waits for the workers, so that this thread need not.
        """
        self._group, self._process_group, self._leaves = group, group.process_group, leaves
        self._buckets = gradient_buckets(leaves)
        self._process_group.begin(self._process_group.last_sequence_number + 1)
        numel = sum(bucket.numel for bucket in self._buckets)
        self._request = BackwardReduction(self._process_group.last_sequence_number, numel, stream_ordered)
        self._stream_ordered = stream_ordered
        self._reducer = BucketReducer(
            self._process_group, self._buckets, [leaf.numel() for leaf in leaves], lambda _: None
        )
        self._flats: list[Tensor] | None = None
        self._end: torch.cuda.Event | None = None
        self.is_running = True
        """Whether the controller's part is not complete yet."""
        self._hooks = [
            register_own_hook(leaf, partial(self._start_up_to, number), after_accumulation=True)
            for number, bucket in enumerate(self._buckets)
            if (leaf := leaves[bucket.indices[-1]]).is_leaf and leaf.requires_grad
        ]

    def _start_up_to(self, number: int, _: Tensor) -> None:
        self._reducer.start_up_to(number)

    def request_for(self, worker: WorkerProcess | None) -> tuple[Any, ...]:
        """The part of a worker. Without one, or for one that is not in the group, the reduction is aborted."""
        if worker not in self._group.workers:
            self.abort("a worker does not take part")
            return ()
        return tuple(self._request)

    def abort(self, reason: str) -> None:
        """Release all members. Gradients that are still needed are reduced in another way."""
        self._process_group.abort(reason)

    def run_first(self, backward: Callable[[], None]) -> None:
        """Run the backward of replica 0, and reduce the rest."""
        try:
            backward()
            self._flats = self._reducer.finish()
            self._end = self._process_group.record_end()
        except GroupAborted as error:
            self.abort(str(error))
        except BaseException:
            self.abort("replica 0 failed")
            raise
        finally:
            self.is_running = False

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def sums(self) -> dict[int, Tensor] | None:
        """When all workers take part and have replied: the sum of each leaf's gradients; None if it has failed."""
        if self._flats is None:
            return None
        self._process_group.last_end = self._end
        if not self._stream_ordered:
            self._process_group.wait_for_last_end()
        if self._process_group.is_aborted():
            return None
        return {
            index: part
            for flat, bucket in zip(self._flats, self._buckets, strict=True)
            for index, part in zip(bucket.indices, unpack(flat, self._leaves, bucket), strict=True)
        }


@contextmanager
def reduce_during_backward(
    group: ControllerGroup | None, leaves: Sequence[Tensor], *, stream_ordered: bool
) -> Iterator[OverlappedReduction | None]:
    """Context manager around the replicas' backwards; None if there is no group, or something else uses it."""
    if group is None or not group.begin_backward():
        yield None
        return
    reduction: OverlappedReduction | None = None
    try:
        with suppress(GroupAborted):
            reduction = OverlappedReduction(group, leaves, stream_ordered=stream_ordered)
        yield reduction
    except BaseException:
        if reduction is not None:
            reduction.abort("the backward failed")
        raise
    finally:
        if reduction is not None:
            reduction.close()
        group.end_backward()
