"""One replica's part, asked of its worker: sent at once, and heard when the thread that asked comes to listen.

So one thread can ask every worker, run a replica of its own meanwhile, and hear the answers after that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from instep.engines.processes.desk import Desk
from instep.engines.processes.hands import Late, Worker, flush_output
from instep.engines.processes.shore import Passage
from instep.engines.processes.waiting import Stuck
from instep.engines.processes.wire import Gone

T = TypeVar("T")
Answer = TypeVar("Answer", covariant=True)


class Question(Protocol[Answer]):
    """What a worker is asked, in two halves."""

    near: bool
    """Whether tensors may stay on a device that both processes work on."""

    def ask(self, desk: Desk) -> None:
        """Say it; to a worker that takes the place of another, once more."""
        ...

    def hear(self, desk: Desk) -> Answer:
        """Wait for the answer."""
        ...


class Office(Protocol):
    """Where workers are found, and what is done about one that is no use."""

    def worker(self, index: int) -> Worker:
        """The worker of a replica."""
        ...

    def desk(self, worker: Worker, index: int, passage: Passage, near: bool) -> AbstractContextManager[Desk]:
        """Where it is asked, for the one who speaks."""
        ...

    def end(self, index: int, worker: Worker | None, trouble: Exception) -> None:
        """End a worker that died or does not answer; raises unless there may be another one."""
        ...


class Asked(Generic[T]):
    """A question that was put to a replica's worker; if it dies over it, its successor is asked."""

    def __init__(self, office: Office, index: int, passage: Passage, question: Question[T]) -> None:
        self._office, self._index, self._passage, self._question = office, index, passage, question
        self._begin()

    def _begin(self) -> None:
        self._trouble: Exception | None = None
        self._worker: Worker | None = None
        try:
            self._worker = self._office.worker(self._index)
            with self._office.desk(self._worker, self._index, self._passage, self._question.near) as self._desk:
                self._question.ask(self._desk)
        except (Gone, Stuck, Late) as trouble:  # whoever listens sees to that
            self._trouble = trouble

    def hear(self) -> T:
        """The answer."""
        while True:
            try:
                if self._trouble is not None:
                    raise self._trouble
                return self._question.hear(self._desk)
            except (Gone, Stuck, Late) as trouble:
                self._office.end(self._index, self._worker, trouble)
            finally:
                flush_output()
            self._begin()
