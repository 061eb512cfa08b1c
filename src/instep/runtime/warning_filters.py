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
"""Ignores cuDNN's warning about recurrent layers whose weights are not in one block of memory. A worker copies the
weights of a module on the CPU to its GPU one by one, so the user cannot avoid it."""

_cached: tuple[list[Any], tuple[WarningFilter, ...]] = [], ()
"""The filters that were encoded last, and their encoding."""


def get_warning_filters() -> tuple[WarningFilter, ...]:
    """Encode this process's filters for built-in categories; others may be slow to import in a worker."""
    global _cached
    if warnings.filters != _cached[0]:
        filters: list[Any] = list(warnings.filters)
        encoded = (
            (action, _pattern(message), category.__name__, _pattern(module), line)
            for action, message, category, module, line in filters
            if getattr(category, "__module__", None) == "builtins"
        )
        _cached = filters, tuple(encoded)
    return _cached[1]


def _pattern(value: Any) -> str:
    """A pattern as text; Python's default filters give the module as a string."""
    if value is None:
        return ""
    return rf"{re.escape(value)}\Z" if isinstance(value, str) else str(value.pattern)


def set_warning_filters(filters: tuple[WarningFilter, ...]) -> None:
    """Set this process's filters, unless they are equal."""
    if filters != get_warning_filters():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            category_class: type[Warning] = getattr(builtins, category)
            warnings.filterwarnings(action, message, category_class, module, line, append=True)  # type: ignore[arg-type]
