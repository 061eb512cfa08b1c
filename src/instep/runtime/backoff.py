"""The schedule of checks that run often at first and rarely later."""

from __future__ import annotations

import sys
from dataclasses import dataclass

NEVER = sys.maxsize
_STEADY_CALLS = 16
"""Calls after which eager checks, too, become less frequent."""


@dataclass
class Backoff:
    """Decides at which calls a check runs.

    The first check is due at the first call. The first `eager` checks may follow at every call, and after 16 calls
    whenever the number of calls has grown by a quarter. After them, each check is due when the number of calls has
    doubled since the last one. After `limit` checks none is due.

    `is_due` is a query. The owner calls `advance()` once a call, `record()` after a check, and `reschedule()` if it
    looked and found nothing to check.

    >>> backoff, due = Backoff(limit=4, eager=1), []
    >>> for call in range(1, 40):
    ...     backoff.advance()
    ...     if backoff.is_due:
    ...         backoff.record()
    ...         due.append(call)
    >>> due
    [1, 2, 4, 8]
    """

    limit: int
    eager: int = 0
    count: int = 0
    """Checks recorded so far."""
    calls: int = 0
    next_call: int = 1
    """The call at which the next check is due."""

    @property
    def is_due(self) -> bool:
        """Whether a check is due at the current call."""
        return self.calls >= self.next_call

    @property
    def is_due_next(self) -> bool:
        """Whether a check is due at the next call."""
        return self.calls + 1 >= self.next_call

    def advance(self) -> None:
        """Count a call."""
        self.calls += 1

    def record(self) -> None:
        """Count a check and schedule the next one."""
        self.count += 1
        self.reschedule()

    def reschedule(self) -> None:
        """Schedule the next check without counting one."""
        if self.count >= self.limit:
            self.stop()
        elif self.count >= self.eager:
            self.next_call = max(2 * self.calls, self.calls + 1)
        else:
            steady = self.calls >= _STEADY_CALLS
            self.next_call = self.calls + 1 + (self.calls // 4 if steady else 0)

    def stop(self) -> None:
        """Schedule no further check, until `reschedule` is called."""
        self.next_call = NEVER
