"""Capturing Python's warning filters and applying them in worker processes."""

from __future__ import annotations

import builtins
import re
import warnings
from typing import Any

WarningFilter = tuple[str, str, str, str, int]
"""What to do, the beginning of the message, the category's name, the module, and the line."""


CUDNN_WEIGHTS_FILTER: WarningFilter = (
    "ignore",
    "RNN module weights are not part of single contiguous chunk",
    "UserWarning",
    "",
    0,
)
"""cuDNN's word on recurrent weights that a worker copies to its GPU one by one, from where a module on the CPU has
them: nobody could do what it advises."""

_cached: tuple[list[Any], tuple[WarningFilter, ...]] = [], ()
"""Filters of this process as they were, and what was made of them."""


def get_warning_filters() -> tuple[WarningFilter, ...]:
    """Those of this process that are about Python's own categories: others may take long to import."""
    global _cached
    if warnings.filters != _cached[0]:
        present: list[Any] = list(warnings.filters)
        own = [one for one in present if getattr(one[2], "__module__", None) == "builtins"]
        read = ((action, _pattern(m), kind.__name__, _pattern(module), line) for action, m, kind, module, line in own)
        _cached = present, tuple(read)
    return _cached[1]


def _pattern(found: Any) -> str:
    """A pattern as text; Python's own filters name a module outright."""
    if found is None:
        return ""
    return rf"{re.escape(found)}\Z" if isinstance(found, str) else str(found.pattern)


def set_warning_filters(filters: tuple[WarningFilter, ...]) -> None:
    """Filter warnings as it is done elsewhere."""
    if filters != get_warning_filters():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            kind: Any = getattr(builtins, category)
            choice: Any = action
            warnings.filterwarnings(choice, message, kind, module, line, append=True)
