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
from instep.engines.processes.controller.requests import send_and_wait
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.messages import BackwardReply, ReduceRequest
from instep.engines.processes.nccl.collectives import reduce_coalesced
from instep.engines.processes.nccl.group import GroupAborted, NcclGroup
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams

_MAX_ATTEMPTS = 4
"""Groups in which a sum is tried, before gradients come one by one."""


class GradientReduction:
    """The gradients of one backward; around the replicas' own parts of it."""

    def __init__(self, office: ThreadedWorkerProvider, fleet: NcclManager, passage: CallStreams, count: int) -> None:
        self._provider, self._nccl, self._streams = office, fleet, passage
        self._num_replicas = count
        self._backwards: dict[int, ReplicaBackward] = {}

    def __enter__(self) -> GradientReduction:
        return self

    def add(self, index: int, back: ReplicaBackward) -> None:
        """Have a worker keep the gradients of its part."""
        back.set_keep_gradients(True)
        self._backwards[index] = back

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._collect()
        finally:
            for back in self._backwards.values():
                back.release()

    def _collect(self) -> None:
        if not any(back.kept_gradients for back in self._backwards.values()):
            return
        for _ in range(_MAX_ATTEMPTS):
            lost = [index for index in self._backwards if not self._is_current(index)]
            if lost:
                self._run_per_worker(self._rerun, lost)
            home = self._nccl.get_group(self._streams) if self._nccl.can_use(self._num_replicas) else None
            if home is None and not self._nccl.can_use(self._num_replicas):
                break
            if home is not None and self._reduce(home):
                return
        self._run_per_worker(self._fetch, self._backwards)

    def _run_per_worker(self, do: Callable[[int], None], indices: Iterable[int]) -> None:
        """Do something for some workers, each in the thread of its replica; `Broken` only where nothing worse came."""
        broken: list[GroupAborted] = []

        def one(index: int) -> None:
            try:
                with self._streams.side_stream():
                    do(index)
            except GroupAborted as error:
                broken.append(error)

        wanted = set(indices)
        tasks = [partial(one, index) if index in wanted else _no_op for index in range(self._num_replicas)]
        self._provider.threads.run(tasks, first_inline=True)
        if broken:
            raise broken[0]

    def _rerun(self, index: int) -> None:
        """Where a worker was replaced, its part of the backward is run again."""
        back = self._backwards[index]
        back.mark_lost()
        went = send_and_wait(self._provider, index, back, self._streams, back.same_device)
        back.store_gradients(went, [])  # nothing comes late from a GPU

    def _is_current(self, index: int) -> bool:
        """Whether the worker that has kept the gradients is still the replica's."""
        try:
            return self._provider.get_worker(index)[1] is self._backwards[index].client
        except ConnectionClosed:
            return False

    def _reduce(self, home: ControllerGroup) -> bool:
        """Whether the sum of what workers have kept came; it is left where the first of them would leave its own."""
        kept = {index: back.kept_by_leaf() for index, back in sorted(self._backwards.items())}
        places = sorted({place for mine in kept.values() for place in mine})
        owners = [self._backwards[next(index for index in kept if place in kept[index])] for place in places]
        leaves = [owner.leaf(place) for owner, place in zip(owners, places, strict=True)]
        buckets, sizes = make_buckets(leaves), [leaf.numel() for leaf in leaves]
        sums: list[Tensor] = []
        together = GroupCollective(home)

        def begin(group: NcclGroup) -> None:
            sums.extend(reduce_coalesced(group, buckets, sizes, {}))

        def ask(index: int) -> None:
            call = self._backwards[index].request_id if index in kept else 0
            numbers = [kept.get(index, {}).get(place) for place in places]
            self._send_reduce(index, together, begin, ReduceRequest(0, call, numbers, sizes, buckets))

        try:
            self._run_per_worker(ask, range(1, self._num_replicas))
        except GroupAborted:
            return False
        except BaseException:
            together.abandon()
            raise
        self._streams.record_stream(sums)
        for flat, bucket in zip(sums, buckets, strict=True):
            for index, part in zip(bucket.indices, unpack(flat, leaves, bucket), strict=True):
                owners[index].set_gradient(places[index], part)
        return True

    def _send_reduce(
        self, index: int, together: GroupCollective, begin: Callable[[NcclGroup], None], order: ReduceRequest
    ) -> None:
        """Have one worker take part in a sum."""
        boxes: list[PendingReply] = []
        worker: WorkerProcess | None = None

        def say(ticket: int) -> None:
            boxes.append(desk.send(messages.REDUCE, replace(order, sequence_number=ticket)))

        try:
            worker, desk = self._provider.get_worker(index)
            if not together.join(worker, begin, say):
                raise GroupAborted("a worker takes no part in a sum")
            desk.wait_reply(boxes[0], None)
        except ConnectionClosed as gone:
            together.fail("a worker ended")
            self._provider.replace_dead(index, worker, gone)
            raise GroupAborted("a worker ended") from gone
        except ReplyTimeout:
            together.fail("a worker does not answer")
            self._provider.kill_stuck(index)
            raise
        except BaseException:
            together.fail("a worker failed")
            raise

    def _fetch(self, index: int) -> None:
        """Have one worker leave what it has kept in host memory; where another one took its place, its part again."""
        back = self._backwards[index]
        if self._is_current(index):
            desk = back.client
            try:
                fields, _ = desk.channel.decode(
                    desk.wait_reply(desk.send(messages.FETCH_GRADIENTS, back.request_id), None)
                )
                back.store_kept(BackwardReply(*fields))
                return
            except ConnectionClosed as gone:
                self._provider.replace_dead(index, desk.worker, gone)
            except ReplyTimeout:
                self._provider.kill_stuck(index)
                raise
        back.set_keep_gradients(False)
        self._rerun(index)


def _no_op() -> None:
    """There is nothing to do for the first replica, which is here."""
