"""Capturing Python's warning filters and applying them in worker processes."""

from __future__ import annotations

import builtins
import re
import warnings
from typing import Any

WarningFilter = tuple[str, str, str, str, int]
"""Action, message pattern, category name, module pattern, line."""


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
"""The filters that were encoded last, and their encoding."""


def get_warning_filters() -> tuple[WarningFilter, ...]:
    """Encode this process's filters for built-in categories; others may be slow to import in a worker."""
    global _cached
    if warnings.filters != _cached[0]:
        present: list[Any] = list(warnings.filters)
        builtin = [one for one in present if getattr(one[2], "__module__", None) == "builtins"]
        encoded = (
            (action, _pattern(m), kind.__name__, _pattern(module), line) for action, m, kind, module, line in builtin
        )
        _cached = present, tuple(encoded)
    return _cached[1]


def _pattern(found: Any) -> str:
    """A pattern as text; Python's default filters give the module as a string."""
    if found is None:
        return ""
    return rf"{re.escape(found)}\Z" if isinstance(found, str) else str(found.pattern)


def set_warning_filters(filters: tuple[WarningFilter, ...]) -> None:
    """Set this process's filters, unless they are equal."""
    if filters != get_warning_filters():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            kind: Any = getattr(builtins, category)
            choice: Any = action
            warnings.filterwarnings(choice, message, kind, module, line, append=True)
