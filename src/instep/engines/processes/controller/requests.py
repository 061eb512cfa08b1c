"""Requests to a replica's worker that are retried on a replacement when the worker dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from instep.autograd.graph_walk import ReachedCollectives
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.controller.replies import ReplyGenerator, run_to_end
from instep.engines.processes.lifecycle.output import flush_output
from instep.engines.processes.lifecycle.pool import StartTimeout
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.nccl.group import GroupAborted
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.cuda_ipc import IpcError


class ReachabilityRequest:
    """Where one replica's backward from some of its outputs would meet the others."""

    def __init__(self, call: ReplayableCall, outputs: Sequence[Tensor]) -> None:
        self._replayable = call
        self._outputs = outputs
        self._pending: PendingReply

    def send(self, desk: WorkerClient) -> PendingReply:
        call = self._replayable
        spent = call.ensure_on(desk, self._outputs)
        self._pending = desk.send_reachability(
            call.call_id, [call.output_indices[id(output)] for output in self._outputs], spent
        )
        return self._pending

    def receive(self, desk: WorkerClient) -> ReplyGenerator[ReachedCollectives]:
        found, _ = desk.channel.decode((yield from desk.receive_reply(self._pending, self._replayable.collectives)))
        assert isinstance(found, ReachedCollectives)
        return found


class IpcCheck:
    """Whether tensors can stay on the device that a worker and this process both work on."""

    def send(self, desk: WorkerClient) -> None:
        """It was tried when the worker took its device."""

    def receive(self, desk: WorkerClient) -> ReplyGenerator[bool]:
        yield from ()
        return desk.same_device


T = TypeVar("T")
ReplyT = TypeVar("ReplyT", covariant=True)


class Request(Protocol[ReplyT]):
    """What a worker is asked, in two halves."""

    def send(self, desk: WorkerClient) -> PendingReply | None:
        """Say it; to a worker that takes the place of another, once more. Where the answer comes to, if one does."""
        ...

    def receive(self, desk: WorkerClient) -> ReplyGenerator[ReplyT]:
        """Wait for the answer."""
        ...


class WorkerProvider(Protocol):
    """Where workers are found, and what is done about one that is no use."""

    def get_worker(self, index: int) -> tuple[WorkerProcess, WorkerClient]:
        """The worker of a replica, and where it is asked."""
        ...

    def prepare_device(self, index: int, desk: WorkerClient, passage: CallStreams, near: bool) -> None:
        """Let the worker of a replica take its device, and tensors pass."""
        ...

    def replace_dead(self, index: int, worker: WorkerProcess | None, gone: ConnectionClosed) -> None:
        """Make way for a new worker after one that died, in a call or as it came up, unless too many did lately."""
        ...

    def kill_stuck(self, index: int) -> None:
        """Make way for a new worker after one that does not answer."""
        ...

    def abort_groups(self, worker: WorkerProcess | None) -> None:
        """See to it that nobody waits for a worker that did not take its part in a group."""
        ...


class RetryingRequest(Generic[T]):
    """A question that is put to a replica's worker; if it dies over it, its successor is asked."""

    _request: Request[T]
    _same_device: bool
    _client: WorkerClient

    def __init__(self, office: WorkerProvider, index: int, passage: CallStreams) -> None:
        self._provider, self._index, self._streams = office, index, passage
        self._exclusive = ExitStack()
        """Where tensors land in the caller's accelerator, nobody else uses the line before they have."""
        self._worker: WorkerProcess | None = None
        self._pending: PendingReply | None = None
        self._connection_error: ConnectionClosed | None = None

    def send(self, question: Request[T], near: bool) -> None:
        """Put the question. `near` says whether tensors may stay on a device that both processes work on."""
        self._request, self._same_device = question, near
        self._send()

    def _send(self) -> None:
        self._worker = self._pending = self._connection_error = None
        self._exclusive.close()
        try:
            self._worker, self._client = self._provider.get_worker(self._index)
            with self._client.lock:
                last = self._client.last_request_id
                try:
                    if self._streams.on_accelerator:
                        self._exclusive.enter_context(self._client.lock)
                    self._provider.prepare_device(self._index, self._client, self._streams, self._same_device)
                    self._pending = self._request.send(self._client)
                except BaseException:  # it may have been asked nevertheless
                    self._client.abandon_since(last)
                    raise
        except ConnectionClosed as gone:  # whoever listens sees to that
            self._connection_error = gone
        except BaseException as error:
            self._exclusive.close()
            if isinstance(error, (ReplyTimeout, StartTimeout)):
                self._provider.kill_stuck(self._index)
            raise

    def run_if_sent(self, do: Callable[[WorkerClient], None]) -> None:
        """Do something before the answer is waited for, if the worker could be asked."""
        if self._connection_error is None:
            do(self._client)

    def abandon(self) -> None:
        """Nobody is going to hear the answer, if there is one to come."""
        if self._pending is not None:
            self._client.abandon(self._pending)

    def is_reply_error(self, error: BaseException) -> bool:
        """Whether an error is what the worker has answered, and did not come to be here."""
        return self._worker is not None and self._client.last_error_id == id(error)

    def receive(self) -> ReplyGenerator[T]:
        """The answer."""
        with self._exclusive:
            while True:
                try:
                    if self._connection_error is not None:
                        raise self._connection_error
                    return (yield from self._request.receive(self._client))
                except ConnectionClosed as gone:
                    self._provider.replace_dead(self._index, self._worker, gone)
                except IpcError as refused:
                    self._client.disable_ipc(str(refused))
                except GroupAborted:  # what it was to get in a group comes otherwise
                    self._provider.abort_groups(self._worker)
                except (ReplyTimeout, StartTimeout):
                    self._provider.kill_stuck(self._index)
                    raise
                finally:
                    flush_output()
                self._send()


def send_and_wait(office: WorkerProvider, index: int, question: Request[T], passage: CallStreams, near: bool) -> T:
    """The answer to a question, in a thread that waits for it."""
    asked: RetryingRequest[T] = RetryingRequest(office, index, passage)
    asked.send(question, near)
    return run_to_end(asked.receive())
