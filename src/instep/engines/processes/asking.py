"""One replica's part, asked of its worker: sent at once, and heard when the thread that asked comes to listen.

So one thread can ask every worker, run a replica of its own meanwhile, and hear the answers after that, or as far as to
where the replicas meet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from instep.engines.processes.desk import Desk
from instep.engines.processes.group import Broken
from instep.engines.processes.hands import Late, Worker, flush_output
from instep.engines.processes.hearing import Hearing, hear_out
from instep.engines.processes.hold import CannotShare
from instep.engines.processes.shore import Passage
from instep.engines.processes.waiting import Box, Stuck
from instep.engines.processes.wire import Gone

T = TypeVar("T")
Answer = TypeVar("Answer", covariant=True)


class Question(Protocol[Answer]):
    """What a worker is asked, in two halves."""

    def ask(self, desk: Desk) -> Box | None:
        """Say it; to a worker that takes the place of another, once more. Where the answer comes to, if one does."""
        ...

    def hear(self, desk: Desk) -> Hearing[Answer]:
        """Wait for the answer."""
        ...


class Office(Protocol):
    """Where workers are found, and what is done about one that is no use."""

    def worker(self, index: int) -> tuple[Worker, Desk]:
        """The worker of a replica, and where it is asked."""
        ...

    def settle(self, index: int, desk: Desk, passage: Passage, near: bool) -> None:
        """Let the worker of a replica take its device, and tensors pass."""
        ...

    def bury(self, index: int, worker: Worker | None, gone: Gone) -> None:
        """Make way for a new worker after one that died, in a call or as it came up, unless too many did lately."""
        ...

    def give_up(self, index: int) -> None:
        """Make way for a new worker after one that does not answer."""
        ...

    def part(self, worker: Worker | None) -> None:
        """See to it that nobody waits for a worker that did not take its part in a group."""
        ...


class Asked(Generic[T]):
    """A question that is put to a replica's worker; if it dies over it, its successor is asked."""

    _question: Question[T]
    _near: bool
    _desk: Desk

    def __init__(self, office: Office, index: int, passage: Passage) -> None:
        self._office, self._index, self._passage = office, index, passage
        self._alone = ExitStack()
        """Where tensors land in the caller's accelerator, nobody else uses the line before they have."""
        self._worker: Worker | None = None
        self._box: Box | None = None
        self._gone: Gone | None = None

    def ask(self, question: Question[T], near: bool) -> None:
        """Put the question. `near` says whether tensors may stay on a device that both processes work on."""
        self._question, self._near = question, near
        self._begin()

    def _begin(self) -> None:
        self._worker = self._box = self._gone = None
        self._alone.close()
        try:
            self._worker, self._desk = self._office.worker(self._index)
            with self._desk.busy:
                last = self._desk.newest
                try:
                    if self._passage.is_afar:
                        self._alone.enter_context(self._desk.busy)
                    self._office.settle(self._index, self._desk, self._passage, self._near)
                    self._box = self._question.ask(self._desk)
                except BaseException:  # it may have been asked nevertheless
                    self._desk.give_up_since(last)
                    raise
        except Gone as gone:  # whoever listens sees to that
            self._gone = gone
        except BaseException as error:
            self._alone.close()
            if isinstance(error, (Stuck, Late)):
                self._office.give_up(self._index)
            raise

    def meanwhile(self, do: Callable[[Desk], None]) -> None:
        """Do something before the answer is waited for, if the worker could be asked."""
        if self._gone is None:
            do(self._desk)

    def give_up(self) -> None:
        """Nobody is going to hear the answer, if there is one to come."""
        if self._box is not None:
            self._desk.give_up(self._box)

    def is_answer(self, error: BaseException) -> bool:
        """Whether an error is what the worker has answered, and did not come to be here."""
        return self._worker is not None and self._desk.failed == id(error)

    def hear(self) -> Hearing[T]:
        """The answer."""
        with self._alone:
            while True:
                try:
                    if self._gone is not None:
                        raise self._gone
                    return (yield from self._question.hear(self._desk))
                except Gone as gone:
                    self._office.bury(self._index, self._worker, gone)
                except CannotShare as refused:
                    self._desk.stop_sharing(str(refused))
                except Broken:  # what it was to get in a group comes otherwise
                    self._office.part(self._worker)
                except (Stuck, Late):
                    self._office.give_up(self._index)
                    raise
                finally:
                    flush_output()
                self._begin()


def ask_now(office: Office, index: int, question: Question[T], passage: Passage, near: bool) -> T:
    """The answer to a question, in a thread that waits for it."""
    asked: Asked[T] = Asked(office, index, passage)
    asked.ask(question, near)
    return hear_out(asked.hear())
