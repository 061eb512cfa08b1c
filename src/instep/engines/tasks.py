"""What a thread is handed to do for a replica, and where what comes of it is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from instep.locks import start
from instep.meeting import PeerFailed, first_error

_here = threading.local()


def inside_replica() -> bool:
    """Whether this thread is running a replica's part of a call."""
    return getattr(_here, "inside", False)


def be_inside(inside: bool) -> None:
    """Say whether this thread is running a replica's part of a call."""
    _here.inside = inside


@contextmanager
def as_replica() -> Iterator[None]:
    """Run a replica's part of a call in this thread, for the length of a `with` block."""
    before, _here.inside = inside_replica(), True
    try:
        yield
    finally:
        _here.inside = before


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


_GLANCE = 0.1
"""Seconds after which whoever waits for results looks again, without a bell."""


def _set_threads(count: int) -> None:
    torch.get_num_threads()  # a thread that asks for the first time takes the process's count: ask before setting
    torch.set_num_threads(count)


class Task:
    """A task with the place its result goes to. It is done once, by the first thread that comes to it."""

    __slots__ = ("done", "index", "share", "waiting")

    def __init__(self, index: int, task: Callable[[], Any], done: Results, share: int) -> None:
        self.index, self.done = index, done
        self.waiting = [task]
        self.share = share
        """The intra-op threads that it may take."""

    def withdraw(self) -> None:
        """See to it that no thread begins it any more, if none has."""
        if self._claim() is not None:
            self.done.put(self.index, None, PeerFailed("the call was interrupted."))

    def _claim(self) -> Callable[[], Any] | None:
        try:
            return self.waiting.pop()  # only one thread can
        except IndexError:
            return None

    def do_here(self) -> None:
        """Do it in the caller's thread, with the caller's share of the cores; an interruption is the caller's own."""
        task = self._claim()
        if task is None:
            return
        try:
            self.done.put(self.index, task(), None)
        except BaseException as error:
            self.done.put(self.index, None, error)
            if not isinstance(error, Exception):
                raise

    def __call__(self) -> None:
        task = self._claim()
        if task is None:
            return
        try:
            if getattr(_here, "share", 0) != self.share:
                self.done.shared = True
                _set_threads(self.share)
                _here.share = self.share
            result = task()
        except BaseException as error:
            self.done.put(self.index, None, error)
        else:
            self.done.put(self.index, result, None)


def begin_elsewhere(parts: Sequence[Task]) -> None:
    """Do what no replica thread has come to in threads of its own.

    A replica thread may be in the middle of a call that waits for this one: a wrapper called from a thread that the
    `forward` of another one has started.
    """
    for part in parts:
        if part.waiting:
            start(threading.Thread(target=_do_one, args=(part,), name=f"instep-beside-{part.index}", daemon=True))


def _do_one(part: Task) -> None:
    with as_replica():
        part()
