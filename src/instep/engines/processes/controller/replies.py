"""Waiting for a worker's reply as a generator, which suspends at collectives and returns the reply.

A thread that serves one worker runs it to the end. Replica 0's thread, which serves all workers, resumes it up to the
next collective when it reaches that collective itself.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

ResultT = TypeVar("ResultT")

AT_COLLECTIVE, RUNNING = "at collective", "running"
"""What a reply generator yields: its worker waits in a collective, or has been sent a request or a result."""

ReplyGenerator = Generator[str, None, ResultT]

_thread_state = threading.local()


@contextmanager
def act_for_caller() -> Iterator[None]:
    """Context manager: this thread waits for replies in place of the calling thread, which waits for this one."""
    _thread_state.acts_for_caller = True
    try:
        yield
    finally:
        _thread_state.acts_for_caller = False


def acts_for_caller() -> bool:
    """Whether this thread may use the locks that the calling thread holds."""
    return getattr(_thread_state, "acts_for_caller", False)


class WrappedStopIteration(Exception):
    """Holds a `StopIteration` that a replica has raised, which cannot propagate out of a generator."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


def wrap_stop_iteration(error: BaseException) -> BaseException:
    """The error in a form that can propagate out of a reply generator."""
    return WrappedStopIteration(error) if isinstance(error, StopIteration) else error


def unwrap_stop_iteration(error: BaseException) -> BaseException:
    """The inverse of `wrap_stop_iteration`."""
    return error.error if isinstance(error, WrappedStopIteration) else error


def run_to_end(generator: ReplyGenerator[ResultT]) -> ResultT:
    """Run a reply generator in this thread until it returns the reply."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            reply: ResultT = end.value
            return reply
        except WrappedStopIteration as stopped:
            raise stopped.error from None
