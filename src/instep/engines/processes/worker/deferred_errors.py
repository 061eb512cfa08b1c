"""Errors of messages without a reply, in a worker."""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import EngineError


class DeferredErrors:
    """Errors of messages without a reply, by module id (0 for all modules). The next call raises them."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def record(self, number: int, error: BaseException) -> None:
        """Keep the first error of a module: later ones may follow from it."""
        self._errors.setdefault(number, error if isinstance(error, Exception) else EngineError(repr(error)))

    def discard(self, numbers: Iterable[int]) -> None:
        """Drop the errors of modules that are sent again or released."""
        for number in numbers:
            self._errors.pop(number, None)

    def pop(self, number: int) -> Exception | None:
        """Remove and return the error to raise at a call of a module."""
        return self._errors.pop(0, None) or self._errors.pop(number, None)

    def pop_any(self) -> Exception | None:
        """Remove all errors and return the first, for a request that cannot be decoded."""
        found, self._errors = list(self._errors.values()), {}
        return found[0] if found else None
