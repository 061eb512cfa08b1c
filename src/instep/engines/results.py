"""What tasks in several threads came to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from instep.meeting import first_error

_GLANCE = 0.1
"""Seconds after which whoever waits for results looks again, without a bell."""


class Results:
    """What tasks gave, each in its own place; the queue is only a bell.

    An interruption may come when a bell has been taken and nothing has been done about it. Nothing is lost then but the
    bell, and whoever waits looks again after a while.
    """

    def __init__(self, count: int) -> None:
        self.shared = False
        """Whether a task gave its thread another share of the cores."""
        self._results: list[tuple[Any, BaseException | None] | None] = [None] * count
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._then: list[Callable[[], object]] = []

    def put(self, index: int, result: Any, error: BaseException | None) -> None:
        self._results[index] = result, error
        if None not in self._results:  # whoever waits is woken once, by the last
            self._end()
            self._bell.put(None)

    def afterwards(self, then: Callable[[], object]) -> None:
        """Do something when every task has ended."""
        self._then.append(then)
        if self.complete():
            self._end()

    def _end(self) -> None:
        while self._then:
            try:
                then = self._then.pop()
            except IndexError:  # another thread does it
                return
            then()

    def complete(self) -> bool:
        """Whether every task has ended."""
        return None not in self._results

    def collect(self, late: Callable[[], None]) -> list[Any]:
        """All results, or the first error. `late` is called whenever results are still missing after a while."""
        while not self.complete():
            try:
                self._bell.get(timeout=_GLANCE)
            except Empty:
                late()
        given = [result for result in self._results if result is not None]
        errors = {index: error for index, (_, error) in enumerate(given) if error is not None}
        if errors:
            raise first_error(errors)
        return [result for result, _ in given]

    def wait(self, seconds: float) -> bool:
        """Whether every task has ended, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while not self.complete() and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._bell.get(timeout=min(left, _GLANCE))
        return self.complete()
