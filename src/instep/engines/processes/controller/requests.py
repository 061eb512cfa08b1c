"""Requests to a replica's worker that are retried on a replacement when the worker dies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from instep.autograd.graph_walk import ReachedCollectives
from instep.engines.processes import messages
from instep.engines.processes.controller.client import WorkerClient
from instep.engines.processes.controller.replay import ReplayableCall
from instep.engines.processes.controller.replies import RUNNING, ReplyGenerator, run_to_end
from instep.engines.processes.lifecycle.output import flush_output
from instep.engines.processes.lifecycle.pool import StartTimeout
from instep.engines.processes.lifecycle.process import WorkerProcess
from instep.engines.processes.lifecycle.watchdog import PendingReply, ReplyTimeout
from instep.engines.processes.nccl.group import GroupAborted
from instep.engines.processes.transport.connection import ConnectionClosed
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.cuda_ipc import IpcError
from instep.errors import WorkerFailure

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", covariant=True)


class Request(Protocol[ReplyT]):
    """A request to a worker."""

    @property
    def may_use_ipc(self) -> bool:
        """Whether tensors are sent through memory on the caller's device, if the worker can open it."""
        ...

    def send(self, client: WorkerClient) -> PendingReply | None:
        """Send it; called again for a replacement worker. None if there will be no reply."""
        ...

    def receive(self, client: WorkerClient) -> ReplyGenerator[ReplyT]:
        """Wait for the reply."""
        ...


class ReachabilityRequest:
    """Asks which collectives a replica's backward from some of its outputs reaches."""

    def __init__(self, call: ReplayableCall, outputs: Sequence[Tensor]) -> None:
        self._call = call
        self._outputs = outputs
        self._pending: PendingReply

    @property
    def may_use_ipc(self) -> bool:
        return self._call.module_state.may_use_ipc

    def send(self, client: WorkerClient) -> PendingReply:
        consumed = self._call.ensure_on(client, self._outputs)
        numbers = [self._call.output_indices[id(output)] for output in self._outputs]
        self._pending = client.send(messages.REACHABILITY, (self._call.call_id, numbers, consumed))
        return self._pending

    def receive(self, client: WorkerClient) -> ReplyGenerator[ReachedCollectives]:
        found, _ = client.channel.decode((yield from client.receive_reply(self._pending, self._call.collectives)))
        assert isinstance(found, ReachedCollectives)
        return found


class IpcCheck:
    """Asks whether CUDA IPC works with a worker."""

    may_use_ipc = True

    def send(self, client: WorkerClient) -> None:
        """Nothing to send: it was tested when the worker selected its device."""

    def receive(self, client: WorkerClient) -> ReplyGenerator[bool]:
        yield from ()
        return client.uses_ipc


class WorkerProvider(Protocol):
    """Provides workers, and replaces those that die or get stuck."""

    def get_worker(self, index: int) -> tuple[WorkerProcess, WorkerClient]:
        """The worker of a replica, and its client."""
        ...

    def prepare_device(self, index: int, client: WorkerClient, streams: CallStreams, may_use_ipc: bool) -> None:
        """Make a worker select its device, and set up the transfer of tensors."""
        ...

    def replace_dead(self, index: int, worker: WorkerProcess | None, closed: ConnectionClosed) -> None:
        """Replace a worker that died; raises `WorkerFailure` if too many died recently."""
        ...

    def kill_stuck(self, index: int) -> None:
        """Kill a worker that does not reply; the next call starts another."""
        ...

    def abort_groups(self, worker: WorkerProcess | None) -> None:
        """Abort the process groups of a worker that did not take part in a collective."""
        ...


class RetryingRequest(Generic[T]):
    """A request that is sent again to the replacement if the worker dies."""

    _request: Request[T]
    _client: WorkerClient

    def __init__(self, provider: WorkerProvider, index: int, streams: CallStreams, locks: ExitStack | None) -> None:
        """`locks` holds the client's lock until tensors have been copied to the caller's accelerator, if it has one."""
        self._provider, self._index, self._streams, self._locks = provider, index, streams, locks
        self._thread = threading.get_ident()
        self._worker: WorkerProcess | None = None
        self._pending: PendingReply | None = None
        self._connection_error: ConnectionClosed | None = None

    def send(self, request: Request[T], *, replace_at_once: bool = False) -> None:
        """Send the request.

        If the worker has died, `receive` replaces it; with `replace_at_once`, this does, because the other replicas may
        wait for it on their device before `receive` is called.
        """
        self._request = request
        self._send(check=replace_at_once)
        while replace_at_once and self._connection_error is not None:
            self._provider.replace_dead(self._index, self._worker, self._connection_error)
            self._send(check=True)

    def _send(self, *, check: bool = False) -> None:
        """Send the request; with `check`, not to a worker that has exited, whose mailbox still takes messages."""
        self._worker = self._pending = self._connection_error = None
        try:
            self._worker, self._client = self._provider.get_worker(self._index)
            if check and not self._worker.is_alive():
                raise ConnectionClosed(f"{self._worker.name} has exited")
            with self._client.lock:
                last_id = self._client.last_request_id
                try:
                    if self._streams.on_accelerator and self._locks is not None:
                        self._locks.enter_context(self._client.lock)
                    self._provider.prepare_device(self._index, self._client, self._streams, self._request.may_use_ipc)
                    self._pending = self._request.send(self._client)
                    if self._pending is not None:
                        self._pending.holds_lock = self._streams.on_accelerator
                except BaseException:  # the request may have been sent nevertheless
                    self._client.abandon_since(last_id)
                    raise
        except ConnectionClosed as error:  # the worker is replaced
            self._connection_error = error
        except (ReplyTimeout, StartTimeout):
            self._provider.kill_stuck(self._index)
            raise

    def abandon(self) -> None:
        """Ignore the reply."""
        if self._pending is not None:
            self._client.abandon(self._pending)

    def is_reply_error(self, error: BaseException) -> bool:
        """Whether an error is the worker's reply, rather than one of this process."""
        return self._worker is not None and self._client.last_error_id == id(error)

    def receive(self) -> ReplyGenerator[T]:
        """Wait for the reply."""
        while True:
            try:
                if self._connection_error is not None:
                    raise self._connection_error
                return (yield from self._request.receive(self._client))
            except ConnectionClosed as error:
                self._provider.replace_dead(self._index, self._worker, error)
            except IpcError as error:
                self._client.disable_ipc(str(error))
            except GroupAborted:  # send the same tensors without NCCL
                self._provider.abort_groups(self._worker)
            except (ReplyTimeout, StartTimeout):
                self._provider.kill_stuck(self._index)
                raise
            finally:
                flush_output()
            if self._streams.on_accelerator and self._thread != threading.get_ident():
                raise WorkerFailure(
                    f"the worker of replica {self._index} failed in a collective during autograd.grad inside forward. "
                    f"Its request cannot be sent again there.\nNothing has changed. Run the step again."
                )
            self._send()
            yield RUNNING


def send_and_wait(provider: WorkerProvider, index: int, request: Request[T], streams: CallStreams) -> T:
    """Send a request and wait for the reply in this thread."""
    with ExitStack() as locks:
        retrying: RetryingRequest[T] = RetryingRequest(provider, index, streams, locks)
        retrying.send(request)
        return run_to_end(retrying.receive())
