"""Sums gradients that workers keep on their devices, over NCCL or through host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType

from torch import Tensor

from instep.devices import make_buckets, unpack
from instep.engines.processes import messages
from instep.engines.processes.controller.backward import ReplicaBackward
from instep.engines.processes.controller.nccl_manager import (
    ControllerGroup,
    GroupCollective,
    NcclManager,
    ThreadedWorkerProvider,
)
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator, run_to_end
from instep.engines.processes.controller.requests import send_and_wait
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.messages import BackwardReply, ReduceRequest
from instep.engines.processes.nccl.collectives import reduce_coalesced
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams

_MAX_ATTEMPTS = 4
"""Attempts to reduce in a group before gradients are fetched from each worker through host memory."""


class GradientReduction:
    """Reduces the gradients of one backward on exit; used as a context around the replicas' backwards."""

    def __init__(
        self, provider: ThreadedWorkerProvider, manager: NcclManager, streams: CallStreams, count: int
    ) -> None:
        self._provider, self._nccl, self._streams = provider, manager, streams
        self._num_replicas = count
        self._backwards: dict[int, ReplicaBackward] = {}

    def __enter__(self) -> GradientReduction:
        return self

    def add(self, index: int, backward: ReplicaBackward) -> None:
        """Make a worker keep its gradients."""
        backward.set_keep_gradients(True)
        self._backwards[index] = backward

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._collect()
        finally:
            for backward in self._backwards.values():
                backward.release()

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
        positions = sorted(set().union(*kept.values()))
        owners = [self._backwards[next(index for index in kept if p in kept[index])] for p in positions]
        leaves = [owner.leaf(position) for owner, position in zip(owners, positions, strict=True)]
        buckets, numels = make_buckets(leaves), [leaf.numel() for leaf in leaves]
        sums: list[Tensor] = []
        collective = GroupCollective(group, deferred=self._streams.in_caller)

        def run(nccl_group: NcclGroup) -> None:
            sums.extend(reduce_coalesced(nccl_group, buckets, numels, {}))

        def reduce_from(index: int) -> ReplyGenerator[None]:
            backward_id = self._backwards[index].request_id if index in kept else 0
            tensor_indices = [kept.get(index, {}).get(position) for position in positions]
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
            for index, gradient in zip(bucket.indices, unpack(flat, leaves, bucket), strict=True):
                owners[index].set_gradient(positions[index], gradient)
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
