"""Collectives between replica 0 and remote replicas, run from the controller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from instep.collectives.exchange import (
    EncodedPayload,
    Payload,
    all_gather_by_exchange,
    decode_payload,
    encode_payload,
    stage_on_host,
)
from instep.collectives.group import describe_row, first_error
from instep.engines.processes.controller.replies import (
    AT_COLLECTIVE,
    RUNNING,
    ReplyGenerator,
    act_for_caller,
    unwrap_stop_iteration,
)
from instep.engines.processes.messages import RowRequest
from instep.engines.processes.transport.channel import FlatValue
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.processes.transport.device_rows import DeviceRowExchange, RowLog
from instep.engines.processes.transport.row_memory import RowExchange, RowMemory, fits_slot
from instep.engines.rendezvous import Rendezvous
from instep.engines.thread_pool import set_replica_thread
from instep.errors import CollectiveError, EngineError, LostExchange
from instep.runtime.affinity import set_spin_wait
from instep.runtime.ambient import ThreadState
from instep.runtime.locks import ForkSafeLock, run_uninterrupted
from instep.runtime.modes import NO_CONTEXT, set_inference_mode

T = TypeVar("T")


class ReplyTask(Generic[T]):
    """Waits for a worker's reply; suspends at collectives."""

    def __init__(self, index: int, generator: ReplyGenerator[T]) -> None:
        self.index = index
        """The replica's index."""
        self._generator = generator
        self._thread = threading.get_ident()
        self.status = RUNNING
        """What the generator yielded last; empty when it has ended."""
        self._result: list[T] = []
        self._error: BaseException | None = None

    def resume(self) -> None:
        """Run to the next suspension. The first one is after the request was sent."""
        in_caller = self._thread == threading.get_ident()
        try:
            if in_caller and not torch.is_inference_mode_enabled():
                self.status = next(self._generator)
            else:
                # State written by the worker outlives inference mode. In another thread, one of autograd, replica 0 is
                # in a backward.
                with set_inference_mode(False), NO_CONTEXT if in_caller else act_for_caller():
                    self.status = next(self._generator)
        except StopIteration as end:
            self._result, self.status = [end.value], ""
        except Exception as error:
            self._error, self.status = unwrap_stop_iteration(error), ""
        except BaseException:
            self.status = ""  # interrupted: it is not resumed
            raise

    def result(self) -> T:
        """The worker's reply; raises its error."""
        while self.status:
            self.resume()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # breaks the cycle with this frame
        return self._result[0]

    def cancel(self) -> None:
        """Stop waiting for the worker."""
        self._generator.close()
        self._error = None


class ControllerRendezvous(Rendezvous):
    """A rendezvous in which remote replicas take part through the controller.

    Either a thread of the controller waits for each worker, or replica 0's thread resumes all `reply_tasks` when it
    reaches a collective itself.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reply_tasks: list[ReplyTask[Any]] = []
        """The tasks that replica 0's thread resumes; empty if each worker has its own thread."""
        self.has_failed = False
        """Whether a replica is known to have failed."""
        self.failure_checks: list[Callable[[], bool]] = []
        """One function per worker: whether the worker has replied with an error."""
        self.row_memory: RowMemory | None = None
        """The memory through which rows are exchanged; None if they are exchanged by messages."""
        self._rows: RowExchange | None = None
        self._device_rows: DeviceRowExchange | None = None
        self._device_row_call: DeviceRowExchange | None = None
        """The same, also after `close`."""
        self.row_log = RowLog()
        """The results of the exchanges through the memory, for workers that replay them."""
        self.is_polling = False
        """Whether replica 0 waits for rows: reply tasks must not wait for messages meanwhile."""
        self.logs_rows = True
        """Whether `row_log` is needed for rows on a device. Rows on the CPU are always kept."""
        self.has_gathered = False
        """Whether `all_gather` was called."""

    def use_row_memory(self, memory: RowMemory) -> None:
        """Exchange rows through memory. For calls whose workers all have a reply task."""
        self.row_memory = memory
        self._rows = RowExchange(memory, memory.start_call(), 0, len(self._names))
        if memory.device_rows is not None:
            base = memory.device_rows.start_call()
            self._device_rows = DeviceRowExchange(memory.device_rows, base, 0, len(self._names))
            self._device_row_call = self._device_rows

    def row_request(self) -> tuple[int, ...]:
        """How a worker takes part in the exchange of rows (see `RowRequest`)."""
        if self.row_memory is None or self._rows is None:
            return ()
        device_base = 0 if self._device_rows is None else self._device_rows.base
        return tuple(RowRequest(self.row_memory.memory_id, self._rows.base, self._rows.num_completed, device_base))

    @property
    def uses_device_rows(self) -> bool:
        """Whether replicas wait for each other on their device."""
        return self._device_rows is not None

    def rows_to_replay(self) -> list[Tensor]:
        """The results that a worker does not exchange again. Of rows on a device there are none (see `can_send`)."""
        return self.row_log.on_host() if self._device_rows is not None else self.row_log.all()

    def can_send(self, index: int, *, again: bool) -> bool:
        """Whether a worker can take part; with `again`, in place of one that died.

        If the other one has exchanged rows on its device, it cannot.
        """
        return self._device_rows is None or self._device_rows.memory.can_send(index, again=again)

    def abort(self) -> None:
        super().abort()
        if self._device_rows is not None:
            self._device_rows.leave(failed=True)

    def check_device_rows(self) -> None:
        """After a call without errors: raise if the replicas have not called the same collectives on their device.

        Raises `LostExchange` if a worker has died and others may have used its rows.
        """
        if self._device_row_call is None:
            return
        counts = self._device_row_call.counts()
        if len(set(counts)) > 1:
            described = ", ".join(f"{name}: {count}" for name, count in zip(self._names, counts, strict=True))
            raise CollectiveError(
                f"the replicas called different numbers of collectives ({described}).\n"
                f"Every replica has to make the same calls: move them out of branches and loops that depend on the "
                f"shard."
            )
        if not self._device_row_call.memory.complete_call(self._device_row_call.base):
            raise LostExchange("a worker ended while the others used its tensors on their device.")

    @property
    def num_collectives(self) -> int:
        """The number of completed collectives, if rows are exchanged through memory."""
        return 0 if self._rows is None else self._rows.num_completed

    def any_failed(self) -> bool:
        """Whether a replica has failed, so that the others need not be awaited."""
        return self.has_failed or any(check() for check in self.failure_checks)

    def leave(self, index: int, error: BaseException | None = None) -> None:
        super().leave(index, error)
        if index == 0 and self._rows is not None:
            self._rows.leave()
        if self._device_rows is not None and index == 0:
            self._device_rows.leave(error is not None, self.row_log)
        elif self._device_rows is not None and error is not None:
            self._device_rows.memory.release_unsent(index, self._device_rows.base)

    def close(self) -> None:
        super().close()
        self.row_memory = self._rows = self._device_rows = None
        self.row_log = RowLog()

    def _break(self, error: CollectiveError) -> None:
        super()._break(error)
        if self._rows is not None:
            self._rows.break_call()

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        if index == 0 and self._rows is not None:
            self._rows.begin(label)
        return self._exchange_messages(index, label, payload)

    def _exchange_messages(self, index: int, label: str, payload: Any) -> list[Any]:
        payload = stage_on_host(payload)
        if not self.reply_tasks:
            return super().exchange(index, label, payload)
        awaited = self._arrive(index, label, payload)
        for task in self.reply_tasks:
            while task.status == RUNNING and not self.is_broken():
                task.resume()
        for task in self.reply_tasks:
            if task.status == AT_COLLECTIVE:  # it receives the result
                task.resume()
        return self._collect(awaited)

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        self.has_gathered = True
        rows, row, label, count = self._rows, row.detach(), describe_row(label, row), len(self._names)
        on_device = self._device_rows
        if on_device is not None and index == 0 and on_device.accepts(row):
            gathered = on_device.gather(label, row, self.row_log if self.logs_rows else None)
            if gathered is not None:
                return gathered
        if rows is None or index != 0 or not fits_slot(row):
            return all_gather_by_exchange(self.exchange, index, count, label, row)
        rows.put(label, row)
        gathered = rows.wait(self._poll_workers)
        if gathered is None:  # a worker called something else, left or failed: this raises the error
            all_gather_by_exchange(self._exchange_messages, index, count, label, row)
            raise EngineError(f"{label} was not completed.")
        self.row_log.append(gathered)
        return gathered

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        return None if self._device_rows is None else self._device_rows.row_buffer(numel, dtype, device)

    def _poll_workers(self) -> bool:
        """Look for messages of the workers whose rows are awaited; returns whether one of them will send none.

        A worker that has died is replaced.
        """
        assert self._rows is not None
        self.is_polling = True
        try:
            for task in self.reply_tasks:
                if task.status == RUNNING and not self._rows.has_arrived(task.index):
                    task.resume()
        finally:
            self.is_polling = False
        return self.is_broken() or any(
            task.status != RUNNING and not self._rows.has_arrived(task.index) for task in self.reply_tasks
        )

    def exchange_remote(self, index: int, label: str, payload: Any) -> ReplyGenerator[list[Any]]:
        """Take part on behalf of a remote replica; suspends until all replicas have arrived."""
        if not self.reply_tasks:
            return self._exchange_messages(index, label, payload)
        awaited = self._arrive(index, label, payload)
        yield AT_COLLECTIVE
        return self._collect(awaited)


send_lock = ForkSafeLock()
"""Held while requests are sent, so that all workers receive the calls of several threads in the same order."""


def run_replicas(
    group: ControllerRendezvous, first: Callable[[], T], generators: Sequence[ReplyGenerator[T]]
) -> list[T]:
    """Send every worker its request, run `first` in this thread, and wait for the replies. Returns all results.

    The first error is raised when every replica has ended; an interruption is raised at once.
    """
    results: list[T] = []
    errors: dict[int, BaseException] = {}
    tasks = group.reply_tasks = [ReplyTask(index, generator) for index, generator in enumerate(generators, 1)]
    try:
        with send_lock:
            for task in tasks:
                task.resume()
        for index, run in enumerate([first, *(task.result for task in tasks)]):
            try:
                results.append(run())
            except Exception as error:
                errors[index], group.has_failed = error, True
        group.close()
    except BaseException:
        run_uninterrupted(group.abort, group.close, *(task.cancel for task in tasks))
        raise
    finally:
        group.reply_tasks = []
    if errors:
        try:
            raise first_error(errors)
        finally:
            errors.clear()  # breaks the cycle with this frame
    return results


def threads_per_replica(count: int) -> int:
    """The number of intra-op threads of each of `count` replicas."""
    return max(1, torch.get_num_threads() // count)


def run_as_replica(
    run: Callable[[], T], count: int, *, caller_restores: bool = False, on_accelerator: bool = False
) -> T:
    """Run a function in this thread as a replica thread would, with the intra-op threads of one of `count` replicas.

    If it fails or is interrupted, the thread's whole ambient state is restored; with `caller_restores`, only what this
    function sets.
    """
    num_threads, share = torch.get_num_threads(), threads_per_replica(count)
    restore: list[Callable[[], object]]
    if caller_restores:
        restore = [partial(set_replica_thread, False), partial(torch.set_num_threads, num_threads)]
    else:
        restore = [ThreadState.capture().restore]
    try:
        if share != num_threads:
            torch.set_num_threads(share)
        set_replica_thread(True)
        set_spin_wait(count, on_accelerator=on_accelerator)
        result = run()
        set_spin_wait(0)
        set_replica_thread(False)
        if share != num_threads:
            torch.set_num_threads(num_threads)
    except BaseException:  # not a context manager: an interruption could arrive before it is entered
        run_uninterrupted(*restore, partial(set_spin_wait, 0))
        raise
    return result


class CollectiveLog:
    """The results of a remote replica's collectives in one call. A worker that replays the call gets them again."""

    def __init__(self, rendezvous: ControllerRendezvous | None = None, streams: CallStreams | None = None) -> None:
        """Without a rendezvous: of a call without collectives."""
        self._rendezvous = rendezvous
        self._streams = streams
        self._results: list[FlatValue] = []
        self._position = 0
        self.row_log = RowLog() if rendezvous is None else rendezvous.row_log
        """The results of exchanges through shared memory, in order."""

    def rewind(self) -> None:
        """Start the call, or its replay."""
        self._position = 0

    def seal(self) -> None:
        """End the call: from now on only logged results are replayed."""
        self._rendezvous = None

    def add_failure_check(self, check: Callable[[], bool]) -> None:
        """Register a check that tells the waiting replicas whether this one has failed."""
        if self._rendezvous is not None:
            self._rendezvous.failure_checks.append(check)

    def is_polling(self) -> bool:
        """Whether the caller wants to know what has arrived, and not to wait."""
        return self._rendezvous is not None and self._rendezvous.is_polling

    def progress(self) -> int:
        """A number that grows with each collective in which the replicas have taken part."""
        return 0 if self._rendezvous is None else self._rendezvous.num_collectives

    def any_failed(self) -> bool:
        """Whether a replica of the call has failed."""
        return self._rendezvous is not None and self._rendezvous.any_failed()

    def exchange(
        self, index: int, label: str, payload: EncodedPayload, tensors: Sequence[Tensor]
    ) -> ReplyGenerator[FlatValue]:
        """The result of the next collective, or its error."""
        if self._position < len(self._results):
            result = self._results[self._position]
        elif self._rendezvous is None:
            result = error_result(EngineError(f"a replayed forward called {label}, which the first run did not call."))
        else:
            try:
                payloads = yield from self._rendezvous.exchange_remote(index, label, decode_payload(payload, tensors))
                result = _result_for(payloads, index)
                if self._streams is not None and any(tensor.device.type != "cpu" for tensor in result.tensors):
                    self._streams.wait_for_caller()
            except Exception as error:
                result = error_result(error)
            self._results.append(result)
        self._position += 1
        return result


def _result_for(payloads: Sequence[Payload], index: int) -> FlatValue:
    """Encode all replicas' payloads for one replica."""
    tensors: list[Tensor] = []
    encoded = [encode_payload(payload, tensors, index) for payload in payloads]
    return FlatValue((encoded, None), tensors, [payload.metadata for payload in payloads])


def error_result(error: Exception | str) -> FlatValue:
    """Encode a collective's failure."""
    return FlatValue((None, error), [], [error])
