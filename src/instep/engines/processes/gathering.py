"""One thread that asks all workers, runs the first replica itself, and hears the workers after that.

Where replicas meet in the middle of a call, it hears each of them as far as to there. Nothing is handed from thread to
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from instep.engines import room
from instep.engines.bearings import Bearings
from instep.engines.processes.cores import watch_for
from instep.engines.processes.hearing import COME, TOLD, Hearing, unwrapped
from instep.engines.tasks import be_inside
from instep.locks import ProcessLock, surely
from instep.meeting import first_error
from instep.modes import inference
from instep.packages import lift

T = TypeVar("T")


class Ear(Generic[T]):
    """Asks one worker, and hears it as far as somebody lets it."""

    def __init__(self, index: int, hearing: Hearing[T]) -> None:
        self.index = index
        """The replica's."""
        self._hearing = hearing
        self.stands = TOLD
        """Where it has stopped; nowhere any longer when the worker has answered."""
        self._answer: list[T] = []
        self._error: BaseException | None = None

    def go_on(self) -> None:
        """Go on to the next stop; the first is where the worker was asked."""
        try:
            with inference(False):  # what a worker writes to state outlives the mode that the caller may be in
                self.stands = next(self._hearing)
        except StopIteration as end:
            self._answer, self.stands = [end.value], ""
        except Exception as error:
            self._error, self.stands = unwrapped(error), ""
        except BaseException:
            self.stands = ""  # what comes next is not heard any longer
            raise

    def end(self) -> T:
        """What the worker answers."""
        while self.stands:
            self.go_on()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._answer[0]

    def leave(self) -> None:
        """Hear no more of the worker."""
        self._hearing.close()
        self._error = None


class Gathering(room.Room):
    """A room where replicas of other processes meet, each through somebody here who hears it.

    That is a thread for each, or the thread of the first replica: it hears all others when it comes to a meeting.
    """

    homecoming: Any = None
    """How gradients of a backward come from all workers at once, if they do."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.ears: list[Ear[Any]] = []
        """By which the first replica's thread hears the others."""
        self._waits: tuple[str, float, int] | None = None
        """What the first replica has come to meet the others for, and since when it waits for which one."""
        self.lost = False
        """Whether a replica that was heard has failed."""
        self.glances: list[Callable[[], bool]] = []
        """Each says of one worker whether it has answered that it failed."""

    def somebody_failed(self) -> bool:
        """Whether a replica has failed, so that the others need not be waited for."""
        return self.lost or any(glance() for glance in self.glances)

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        payload = lift(payload)
        if not self.ears:
            return super().exchange(index, label, payload)
        awaited = self._arrive(index, label, payload)
        for ear in self.ears:
            self._waits = label, time.monotonic(), ear.index
            while ear.stands == TOLD and not self.is_broken():
                ear.go_on()
        self._waits = None
        for ear in self.ears:
            if ear.stands == COME:  # lets it know
                ear.go_on()
        return self._collect(awaited)

    def look(self) -> None:
        """Say for whom the first replica waits, if it has waited for long."""
        if self._waits is not None and not self._said:
            label, since, index = self._waits
            waited = time.monotonic() - since
            if waited > room.PATIENCE:
                self._said = True
                self._tell(label, waited, [index])

    def receive(self, index: int, label: str, payload: Any) -> Hearing[list[Any]]:
        """Let a replica of another process come, and say what all have brought."""
        if not self.ears:
            return self.exchange(index, label, payload)
        awaited = self._arrive(index, label, payload)
        yield COME
        return self._collect(awaited)


_in_order = ProcessLock()
"""Held while workers are asked: all get the calls of several threads in one order, and none waits for another's."""


def run_all(meeting: Gathering, first: Callable[[], T], hearings: Sequence[Hearing[T]]) -> list[T]:
    """What `first` gives, in this thread, after every worker was asked for its part; and what they answer.

    The first error of all is raised when every part has ended, an interruption at once.
    """
    results: list[T] = []
    errors: dict[int, BaseException] = {}
    ears = meeting.ears = [Ear(index, hearing) for index, hearing in enumerate(hearings, 1)]
    try:
        with _in_order:
            for ear in ears:
                ear.go_on()
        for number, part in enumerate([first, *(ear.end for ear in ears)]):
            try:
                results.append(part())
            except Exception as error:
                errors[number], meeting.lost = error, True
        meeting.close()
    except BaseException:
        surely(meeting.abort, meeting.close, *(ear.leave for ear in ears))
        raise
    finally:
        meeting.ears = []
    if errors:
        try:
            raise first_error(errors)
        finally:
            errors.clear()  # their tracebacks hold this frame
    return results


def here(run: Callable[[], T], count: int, *, looked_after: bool = False) -> T:
    """Do something in this thread as a replica does, with a replica's share of the cores of `count` replicas.

    If it fails or is interrupted, what it may have set is set back; only what this function has, where the rest is
    `looked_after` by whoever called it.
    """
    mine = torch.get_num_threads()
    share = max(1, mine // count)
    back = [partial(be_inside, False), partial(torch.set_num_threads, mine)] if looked_after else [Bearings().restore]
    try:
        if share != mine:
            torch.set_num_threads(share)
        be_inside(True)
        watch_for(count)
        result = run()
        watch_for(0)
        be_inside(False)
        if share != mine:
            torch.set_num_threads(mine)
    except BaseException:  # no context manager: an interruption could come on the way to it
        surely(*back, partial(watch_for, 0))
        raise
    return result
