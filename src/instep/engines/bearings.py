"""Where a thread stands: what a call sets for itself and would be left behind by an interruption (Ctrl-C).

A context manager is left by a line of Python, and an interruption may come in just that line.
"""

from __future__ import annotations

import torch

from instep import meeting, random
from instep.engines import tasks

_KINDS = ("cpu", "cuda")


class Bearings:
    """The settings of this thread as they were, to be set again."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._threads = torch.get_num_threads()
        self._cache = torch.is_autocast_cache_enabled()
        self._casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
        self._nested = _nesting()
        self._seat = meeting.seat()
        self._drawing = random.drawing()
        self._inside = tasks.inside_replica()

    def restore(self) -> None:
        """Set what is not as it was; it may be called twice."""
        torch.set_grad_enabled(self._grad)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        torch.set_autocast_cache_enabled(self._cache)
        for kind, enabled, dtype in self._casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_nesting() - self._nested):
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        meeting.sit(self._seat)
        random.draw_by(self._drawing)
        tasks.be_inside(self._inside)


def _nesting() -> int:
    """How many autocast blocks this thread is in."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
