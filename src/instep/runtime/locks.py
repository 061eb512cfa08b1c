"""Locks that are safe across fork, and steps that complete despite KeyboardInterrupt."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def _do_nothing() -> None:
    """Do nothing."""


_RLock: Any = type(threading.RLock())


class ForkSafeLock(_RLock):  # type: ignore[misc]
    """A re-entrant lock that is released in a forked child, where `after_fork` is called.

    A child has none of its parent's other threads: a lock that one of them held at the fork would stay locked. What
    that thread was changing is in an unknown state; `after_fork` resets it.

    It subclasses Python's RLock, so that acquiring and releasing run no Python code in which a KeyboardInterrupt could
    leave it locked.
    """

    def __init__(self, after_fork: Callable[[], object] = _do_nothing) -> None:
        super().__init__()
        self._after_fork = after_fork
        _locks.add(self)

    def is_owned(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._is_owned())

    def reset_in_child(self) -> None:
        """Release the lock if another thread of the parent held it; the forking thread keeps it."""
        if not self._is_owned():
            self._at_fork_reinit()
            self._after_fork()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _reset_all_in_child() -> None:
    for lock in list(_locks):
        lock.reset_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all_in_child)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. If this is interrupted, the thread may or may not run.

    `Thread.start` waits for the thread; an interruption meanwhile may surface as a RuntimeError about its lock.
    """
    try:
        thread.start()
    except RuntimeError as error:
        cause = error.__context__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None
        raise


def run_uninterrupted(*steps: Callable[[], object]) -> None:
    """Run every step to completion, despite KeyboardInterrupt, which is raised when all steps are done.

    An interrupted step runs again, so steps have to be idempotent. To cover an interruption on the way here, callers
    call it in a `try` block and again in its `except BaseException`.
    """
    pending = list(steps)
    failure: BaseException | None = None
    while pending:
        try:
            while pending:
                pending[0]()
                pending.pop(0)
        except Exception as error:
            pending.pop(0)
            failure = failure or error
        except BaseException as interruption:
            failure = interruption
    if failure is not None:
        raise failure
