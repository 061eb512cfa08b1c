"""Sums gradients that workers keep on their devices, over NCCL or through host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from torch import Tensor

from instep.autograd.bridge import ReplicaGraph
from instep.collectives.buckets import gradient_buckets
from instep.devices import unpack
from instep.engines.processes import messages
from instep.engines.processes.controller.backward import ReplicaBackward
from instep.engines.processes.controller.nccl_manager import (
    ControllerGroup,
    GroupCollective,
    NcclManager,
    ThreadedWorkerProvider,
)
from instep.engines.processes.controller.overlapped_reduction import OverlappedReduction, reduce_during_backward
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator, run_to_end
from instep.engines.processes.controller.requests import send_and_wait
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.messages import BackwardReply, ReduceRequest
from instep.engines.processes.nccl.bucket_reducer import BucketReducer
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams

_MAX_ATTEMPTS = 4
"""Attempts to reduce in a group before gradients are fetched from each worker through host memory."""


class GradientReduction:
    """Reduces the gradients of one backward; used as a context around the replicas' backwards.

    If possible, the reduction begins while they run. Otherwise, and if that fails, gradients are reduced on exit.
    """

    def __init__(
        self,
        provider: ThreadedWorkerProvider,
        manager: NcclManager,
        streams: CallStreams,
        replicas: Sequence[ReplicaGraph],
        *,
        overlaps: bool,
    ) -> None:
        """`overlaps` is whether all replicas run at the same time, so that each can wait for the others."""
        self._provider, self._nccl, self._streams = provider, manager, streams
        self._num_replicas, self._leaves = len(replicas), replicas[0].leaves
        self._overlaps = overlaps and all((replica.remote is None) == (replica is replicas[0]) for replica in replicas)
        self._backwards: dict[int, ReplicaBackward] = {}
        self.overlapped: OverlappedReduction | None = None
        """The reduction that begins while the backwards run."""
        self._running = ExitStack()

    def __enter__(self) -> GradientReduction:
        if self._overlaps:
            self.overlapped = self._running.enter_context(
                reduce_during_backward(self._nccl.get_group(), self._leaves, stream_ordered=self._streams.in_caller)
            )
        return self

    def add(self, index: int, backward: ReplicaBackward) -> None:
        """Make a worker keep its gradients."""
        backward.set_keep_gradients(True)
        backward.reduction = self.overlapped
        self._backwards[index] = backward

    def abort(self, reason: str) -> None:
        """Release all members of a reduction that has begun."""
        if self.overlapped is not None:
            self.overlapped.abort(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._running.__exit__(kind, error, traceback)
            if error is None and not self._store_sums():
                self._collect()
        finally:
            for backward in self._backwards.values():
                backward.release()

    def _store_sums(self) -> bool:
        """Store each sum as the gradient of the first replica that has one; False if they are incomplete."""
        is_reduced = len(self._backwards) == self._num_replicas - 1 and all(
            backward.is_reduced for backward in self._backwards.values()
        )
        sums = self.overlapped.sums() if self.overlapped is not None and is_reduced else None
        if sums is None:
            return False
        for _, backward in sorted(self._backwards.items()):
            for position in backward.kept_by_position():
                if position in sums:
                    backward.set_gradient(position, sums.pop(position))
        return True

    def _collect(self) -> None:
        if not any(backward.kept_gradients for backward in self._backwards.values()):
            return
        for _ in range(_MAX_ATTEMPTS):
            lost = [index for index in self._backwards if not self._is_current(index)]
            if lost:
                self._run_per_worker(self._rerun, lost)
            group = self._nccl.get_group() if self._nccl.can_use(self._num_replicas) else None
            if group is None and not self._nccl.can_use(self._num_replicas):
                break
            if group is not None and group.in_backward:  # another one, which may wait for this one
                break
            if group is not None and self._reduce(group):
                return
        self._run_per_worker(self._fetch, self._backwards)

    def _run_per_worker(self, function: Callable[[int], None], indices: Iterable[int]) -> None:
        """Run a function per worker, each in its replica's thread. `GroupAborted` is raised only if nothing else is.

        In a call that the calling thread makes alone, it runs them one after another.
        """
        if self._streams.in_caller:
            for index in indices:
                function(index)
            return
        aborted: list[GroupAborted] = []

        def run_one(index: int) -> None:
            try:
                with self._streams.side_stream():
                    function(index)
            except GroupAborted as error:
                aborted.append(error)

        selected = set(indices)
        tasks = [partial(run_one, index) if index in selected else _no_op for index in range(self._num_replicas)]
        self._provider.threads.run(tasks, first_inline=True)
        if aborted:
            raise aborted[0]

    def _rerun(self, index: int) -> None:
        """Run the backward again on a replacement worker."""
        backward = self._backwards[index]
        backward.mark_lost()
        reply = send_and_wait(self._provider, index, backward, self._streams)
        backward.store_gradients(reply, [])  # on a GPU no gradient is late

    def _is_current(self, index: int) -> bool:
        """Whether the worker that keeps the gradients has not been replaced."""
        try:
            return self._provider.get_worker(index)[1] is self._backwards[index].client
        except ConnectionClosed:
            return False

    def _reduce(self, group: ControllerGroup) -> bool:
        """Reduce the kept gradients, and store each sum as the gradient of the first replica that has one."""
        kept = {index: backward.kept_by_position() for index, backward in sorted(self._backwards.items())}
        owners = {
            position: backward
            for index, backward in sorted(self._backwards.items(), reverse=True)
            for position in kept[index]
        }
        leaves, buckets = self._leaves, gradient_buckets(self._leaves)
        numels = [leaf.numel() for leaf in leaves]
        sums: list[Tensor] = []
        collective = GroupCollective(group, deferred=self._streams.in_caller)

        def run(nccl_group: NcclGroup) -> None:
            sums.extend(BucketReducer(nccl_group, buckets, numels, lambda _: None).finish())

        def reduce_from(index: int) -> ReplyGenerator[None]:
            backward_id = self._backwards[index].request_id if index in kept else 0
            tensor_indices = [kept.get(index, {}).get(position) for position in range(len(leaves))]
            request = ReduceRequest(0, backward_id, tensor_indices, numels, buckets)
            return self._reduce_from(index, collective, run, request)

        workers = range(1, self._num_replicas)
        try:
            with collective:
                if self._streams.in_caller:
                    replies = [reduce_from(index) for index in workers]
                    for reply in replies:
                        next(reply)
                    collective.run_deferred()
                    for reply in replies:
                        run_to_end(reply)
                else:
                    self._run_per_worker(lambda index: run_to_end(reduce_from(index)), workers)
        except GroupAborted:
            return False
        self._streams.record_stream(sums)
        for flat, bucket in zip(sums, buckets, strict=True):
            for position, gradient in zip(bucket.indices, unpack(flat, leaves, bucket), strict=True):
                if position in owners:
                    owners[position].set_gradient(position, gradient)
        return True

    def _reduce_from(
        self, index: int, collective: GroupCollective, run: Callable[[NcclGroup], None], request: ReduceRequest
    ) -> ReplyGenerator[None]:
        """Make one worker take part in the reduction. Suspends between its request and its reply."""
        pending: list[PendingReply] = []
        worker: WorkerProcess | None = None

        def send(sequence_number: int) -> None:
            pending.append(client.send(messages.REDUCE, replace(request, sequence_number=sequence_number)))

        try:
            worker, client = self._provider.get_worker(index)
            if not collective.join(worker, run, send):
                raise GroupAborted("a worker does not take part in a reduction")
            yield RUNNING
            client.wait_reply(pending[0], None)
        except ConnectionClosed as error:
            collective.fail("a worker ended")
            self._provider.replace_dead(index, worker, error)
            raise GroupAborted("a worker ended") from error
        except ReplyTimeout:
            collective.fail("a worker does not reply")
            self._provider.kill_stuck(index)
            raise
        except BaseException:
            collective.fail("a worker failed")
            raise

    def _fetch(self, index: int) -> None:
        """Fetch the gradients of one worker through host memory; rerun its backward if it was replaced."""
        backward = self._backwards[index]
        if self._is_current(index):
            client = backward.client
            try:
                fields, _ = client.channel.decode(
                    client.wait_reply(client.send(messages.FETCH_GRADIENTS, backward.request_id), None)
                )
                backward.store_kept(BackwardReply(*fields))
                return
            except ConnectionClosed as error:
                self._provider.replace_dead(index, client.worker, error)
            except ReplyTimeout:
                self._provider.kill_stuck(index)
                raise
        backward.set_keep_gradients(False)
        self._rerun(index)


def _no_op() -> None:
    """Replica 0 has nothing to do."""
