"""Collectives between replica 0 and remote replicas, run from the controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from instep.collectives.exchange import EncodedPayload, Payload, decode_payload, encode_payload, stage_on_host
from instep.collectives.group import first_error
from instep.engines import rendezvous
from instep.engines.processes.controller.replies import AT_COLLECTIVE, RUNNING, ReplyGenerator, unwrap_stop_iteration
from instep.engines.processes.transport.channel import FlatValue
from instep.engines.processes.transport.copy_streams import CallStreams
from instep.engines.thread_pool import set_replica_thread
from instep.errors import EngineError
from instep.runtime.affinity import set_spin_wait
from instep.runtime.ambient import AmbientState
from instep.runtime.locks import ForkSafeLock, run_uninterrupted
from instep.runtime.modes import set_inference_mode

T = TypeVar("T")


class ReplyTask(Generic[T]):
    """Asks one worker, and hears it as far as somebody lets it."""

    def __init__(self, index: int, hearing: ReplyGenerator[T]) -> None:
        self.index = index
        """The replica's."""
        self._generator = hearing
        self.status = RUNNING
        """Where it has stopped; nowhere any longer when the worker has answered."""
        self._result: list[T] = []
        self._error: BaseException | None = None

    def resume(self) -> None:
        """Go on to the next stop; the first is where the worker was asked."""
        try:
            with set_inference_mode(False):  # what a worker writes to state outlives the mode that the caller may be in
                self.status = next(self._generator)
        except StopIteration as end:
            self._result, self.status = [end.value], ""
        except Exception as error:
            self._error, self.status = unwrap_stop_iteration(error), ""
        except BaseException:
            self.status = ""  # what comes next is not heard any longer
            raise

    def result(self) -> T:
        """What the worker answers."""
        while self.status:
            self.resume()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._result[0]

    def cancel(self) -> None:
        """Hear no more of the worker."""
        self._generator.close()
        self._error = None


class ControllerRendezvous(rendezvous.Rendezvous):
    """A room where replicas of other processes meet, each through somebody here who hears it.

    That is a thread for each, or the thread of the first replica: it hears all others when it comes to a meeting.
    """

    gradient_reduction: Any = None
    """How gradients of a backward come from all workers at once, if they do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reply_tasks: list[ReplyTask[Any]] = []
        """By which the first replica's thread hears the others."""
        self._waiting_for: tuple[str, float, int] | None = None
        """What the first replica has come to meet the others for, and since when it waits for which one."""
        self.has_failed = False
        """Whether a replica that was heard has failed."""
        self.failure_checks: list[Callable[[], bool]] = []
        """Each says of one worker whether it has answered that it failed."""

    def any_failed(self) -> bool:
        """Whether a replica has failed, so that the others need not be waited for."""
        return self.has_failed or any(glance() for glance in self.failure_checks)

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        payload = stage_on_host(payload)
        if not self.reply_tasks:
            return super().exchange(index, label, payload)
        awaited = self._arrive(index, label, payload)
        for ear in self.reply_tasks:
            self._waiting_for = label, time.monotonic(), ear.index
            while ear.status == RUNNING and not self.is_broken():
                ear.resume()
        self._waiting_for = None
        for ear in self.reply_tasks:
            if ear.status == AT_COLLECTIVE:  # lets it know
                ear.resume()
        return self._collect(awaited)

    def warn_if_slow(self) -> None:
        """Say for whom the first replica waits, if it has waited for long."""
        if self._waiting_for is not None and not self._warned:
            label, since, index = self._waiting_for
            waited = time.monotonic() - since
            if waited > rendezvous.WARN_AFTER_SECONDS:
                self._warned = True
                self._warn_slow(label, waited, [index])

    def exchange_remote(self, index: int, label: str, payload: Any) -> ReplyGenerator[list[Any]]:
        """Let a replica of another process come, and say what all have brought."""
        if not self.reply_tasks:
            return self.exchange(index, label, payload)
        awaited = self._arrive(index, label, payload)
        yield AT_COLLECTIVE
        return self._collect(awaited)


_send_lock = ForkSafeLock()
"""Held while workers are asked: all get the calls of several threads in one order, and none waits for another's."""


def run_replicas(
    meeting: ControllerRendezvous, first: Callable[[], T], hearings: Sequence[ReplyGenerator[T]]
) -> list[T]:
    """What `first` gives, in this thread, after every worker was asked for its part; and what they answer.

    The first error of all is raised when every part has ended, an interruption at once.
    """
    results: list[T] = []
    errors: dict[int, BaseException] = {}
    ears = meeting.reply_tasks = [ReplyTask(index, hearing) for index, hearing in enumerate(hearings, 1)]
    try:
        with _send_lock:
            for ear in ears:
                ear.resume()
        for number, part in enumerate([first, *(ear.result for ear in ears)]):
            try:
                results.append(part())
            except Exception as error:
                errors[number], meeting.has_failed = error, True
        meeting.close()
    except BaseException:
        run_uninterrupted(meeting.abort, meeting.close, *(ear.cancel for ear in ears))
        raise
    finally:
        meeting.reply_tasks = []
    if errors:
        try:
            raise first_error(errors)
        finally:
            errors.clear()  # their tracebacks hold this frame
    return results


def run_as_replica(run: Callable[[], T], count: int, *, caller_restores: bool = False) -> T:
    """Do something in this thread as a replica does, with a replica's share of the cores of `count` replicas.

    If it fails or is interrupted, what it may have set is set back; only what this function has, where the rest is
    `looked_after` by whoever called it.
    """
    mine = torch.get_num_threads()
    share = max(1, mine // count)
    back = (
        [partial(set_replica_thread, False), partial(torch.set_num_threads, mine)]
        if caller_restores
        else [AmbientState.capture().restore]
    )
    try:
        if share != mine:
            torch.set_num_threads(share)
        set_replica_thread(True)
        set_spin_wait(count)
        result = run()
        set_spin_wait(0)
        set_replica_thread(False)
        if share != mine:
            torch.set_num_threads(mine)
    except BaseException:  # no context manager: an interruption could come on the way to it
        run_uninterrupted(*back, partial(set_spin_wait, 0))
        raise
    return result


class RemoteExchange(Protocol):
    """A meeting that replicas of other processes take part in."""

    def exchange_remote(self, index: int, label: str, payload: Payload) -> ReplyGenerator[list[Any]]:
        """Let a replica come, and say what all have brought."""
        ...


class CollectiveLog:
    """What one replica met the others for in a call, and what came of it: a worker that begins again is told that."""

    def __init__(self, room: RemoteExchange, passage: CallStreams) -> None:
        self._rendezvous: RemoteExchange | None = room
        self._streams = passage
        self._results: list[FlatValue] = []
        self._position = 0

    def rewind(self) -> None:
        """The call begins, or begins again."""
        self._position = 0

    def seal(self) -> None:
        """Nobody is met any longer: the answers are all that there is."""
        self._rendezvous = None

    def add_failure_check(self, glance: Callable[[], bool]) -> None:
        """Let whoever waits for another replica see whether this one has failed."""
        glances: list[Callable[[], bool]] | None = getattr(self._rendezvous, "failure_checks", None)
        if glances is not None:
            glances.append(glance)

    def warn_if_slow(self) -> None:
        """A moment has passed in which this replica was not heard of."""
        look: Any = getattr(self._rendezvous, "look", None)
        if look is not None:
            look()

    def any_failed(self) -> bool:
        """Whether a worker has failed, so that the call is lost."""
        asked: Any = getattr(self._rendezvous, "any_failed", None)
        return asked is not None and bool(asked())

    def exchange(
        self, index: int, label: str, bare: EncodedPayload, tensors: Sequence[Tensor]
    ) -> ReplyGenerator[FlatValue]:
        """What the replicas brought, or why they did not come."""
        if self._position < len(self._results):
            answer = self._results[self._position]
        elif self._rendezvous is None:
            again = EngineError(f"a forward that was run again came to {label}, where it had not been before.")
            answer = error_result(again)
        else:
            try:
                packages = yield from self._rendezvous.exchange_remote(index, label, decode_payload(bare, tensors))
                answer = _result_for(packages, index)
                if any(tensor.device.type != "cpu" for tensor in answer.tensors):
                    self._streams.wait_for_caller()
            except Exception as error:
                answer = error_result(error)
            self._results.append(answer)
        self._position += 1
        return answer


def _result_for(packages: Sequence[Payload], index: int) -> FlatValue:
    """What the replicas brought for one of them."""
    tensors: list[Tensor] = []
    bares = [encode_payload(package, tensors, index) for package in packages]
    return FlatValue((bares, None), tensors, [package.metadata for package in packages])


def error_result(error: Exception | str) -> FlatValue:
    """Why they did not come."""
    return FlatValue((None, error), [], [error])
