"""Hearing a worker, as a generator: it stops wherever somebody else may go on first, and ends with the answer.

A thread that has nothing else to do lets it run on. One that is a replica itself lets it run as far as to a meeting,
when it has come there too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")

AT_COLLECTIVE, RUNNING = "come", "told"
"""Where a hearing stops: the worker has come to where replicas meet; it was told what came of that, or what to do."""

ReplyGenerator = Generator[str, None, ResultT]


class WrappedStopIteration(Exception):
    """Holds a `StopIteration` that a replica has raised: as it is, it would not come out of a generator."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


def wrap_stop_iteration(error: BaseException) -> BaseException:
    """An error as it can pass through a hearing."""
    return WrappedStopIteration(error) if isinstance(error, StopIteration) else error


def unwrap_stop_iteration(error: BaseException) -> BaseException:
    """The error that a hearing has ended with."""
    return error.error if isinstance(error, WrappedStopIteration) else error


def run_to_end(hearing: ReplyGenerator[ResultT]) -> ResultT:
    """What comes of a hearing, in a thread that waits for it."""
    while True:
        try:
            next(hearing)
        except StopIteration as end:
            answer: ResultT = end.value
            return answer
        except WrappedStopIteration as stopped:
            raise stopped.error from None
