"""One replica's part, asked of its worker: sent at once, and heard when the thread that asked comes to listen.

So one thread can ask every worker, run a replica of its own meanwhile, and hear the answers after that.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from instep.engines.processes.desk import Desk, Stuck
from instep.engines.processes.hands import Worker, flush_output
from instep.engines.processes.wire import Gone

T = TypeVar("T")
Answer = TypeVar("Answer", covariant=True)


class Question(Protocol[Answer]):
    """What a worker is asked, in two halves."""

    def ask(self, desk: Desk) -> None:
        """Say it; to a worker that takes the place of another, once more."""
        ...

    def hear(self, desk: Desk) -> Answer:
        """Wait for the answer."""
        ...


class Office(Protocol):
    """Where workers are found, and what is done about one that is no use."""

    def worker(self, index: int) -> tuple[Worker, Desk]:
        """The worker of a replica, and where it is asked."""
        ...

    def replace(self, index: int, worker: Worker, gone: Gone) -> None:
        """A new worker for one that died, unless too many did lately."""
        ...

    def give_up(self, index: int) -> None:
        """A new worker for one that does not answer."""
        ...


class Asked(Generic[T]):
    """A question that was put to a replica's worker; if it dies over it, its successor is asked."""

    def __init__(self, office: Office, index: int, question: Question[T]) -> None:
        self._office, self._index, self._question = office, index, question
        self._begin()

    def _begin(self) -> None:
        self._gone: Gone | None = None
        self._worker, self._desk = self._office.worker(self._index)
        try:
            with self._desk.busy:
                self._question.ask(self._desk)
        except Gone as gone:  # whoever listens sees to that
            self._gone = gone

    def hear(self) -> T:
        """The answer."""
        while True:
            try:
                if self._gone is not None:
                    raise self._gone
                return self._question.hear(self._desk)
            except Gone as gone:
                self._office.replace(self._index, self._worker, gone)
            except Stuck:
                self._office.give_up(self._index)
                raise
            finally:
                flush_output()
            self._begin()
