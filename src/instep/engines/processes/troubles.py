"""What went wrong in a worker with messages that nobody waits for an answer to: the next call gets it."""

from __future__ import annotations

from collections.abc import Iterable

from instep.errors import EngineError


class Troubles:
    """By the number of the module that a message was about, 0 for all of them."""

    def __init__(self) -> None:
        self._found: dict[int, Exception] = {}

    def note(self, number: int, error: BaseException) -> None:
        """Keep the first one: what follows may fail for want of what it did not bring."""
        self._found.setdefault(number, error if isinstance(error, Exception) else EngineError(repr(error)))

    def forget(self, numbers: Iterable[int]) -> None:
        """These modules are told of anew, or are gone."""
        for number in numbers:
            self._found.pop(number, None)

    def of(self, number: int) -> Exception | None:
        """What went wrong before a call of a module."""
        return self._found.pop(0, None) or self._found.pop(number, None)

    def first(self) -> Exception | None:
        """What went wrong before a call that cannot even be read."""
        found, self._found = list(self._found.values()), {}
        return found[0] if found else None
