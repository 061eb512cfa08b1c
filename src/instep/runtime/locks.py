"""Locks that are safe across fork, and steps that complete despite KeyboardInterrupt."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def _do_nothing() -> None:
    """There is nothing to begin anew."""


_RLock: Any = type(threading.RLock())


class ForkSafeLock(_RLock):  # type: ignore[misc]
    """A re-entrant lock that is free in a forked child, where `in_child` is called at once.

    It is taken and given back by Python's own lock, without a line of Python between: an interruption (Ctrl-C) that
    came in such a line would leave it taken for ever.
    """

    def __init__(self, in_child: Callable[[], object] = _do_nothing) -> None:
        super().__init__()
        self._after_fork = in_child
        _locks.add(self)

    def is_owned(self) -> bool:
        """Whether this thread holds it."""
        return bool(self._is_owned())

    def reset_in_child(self) -> None:
        """See to it that no thread of the parent holds it; the one that forked goes on holding it."""
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
    """Start a thread. It may run or not if this is interrupted.

    Python waits for it to come up, and an interruption there may come out as an error about Python's own lock.
    """
    try:
        thread.start()
    except RuntimeError as error:
        cause = error.__context__
        if cause is not None and not isinstance(cause, Exception):
            raise cause from None
        raise


def run_uninterrupted(*steps: Callable[[], object]) -> None:
    """Take every step to its end, whatever interruption (Ctrl-C) comes meanwhile; it is raised when all are taken.

    A step that was interrupted is taken again, so each has to come to the same if it is taken twice. The caller covers
    the way here, by calling it in a `try` and once more in its `except BaseException`.
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
