"""Whether the module runs for a trial, and what excuses it there.

A collective (`instep.all_gather`) is the identity outside a parallel call, so parts and whole rightly differ in a trial
that meets one: it says so by `excuse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_excuses: ContextVar[list[str] | None] = ContextVar("instep_excuses", default=None)


def excuse(why: str) -> None:
    """Say, from inside `forward`, why parts and whole may differ; nothing happens outside a trial."""
    excuses = _excuses.get()
    if excuses is not None:
        excuses.append(why)


def is_probing() -> bool:
    """Whether the module runs for a trial rather than for the caller."""
    return _excuses.get() is not None


@contextmanager
def probing() -> Iterator[list[str]]:
    """The length of a trial; gives the list that collects its excuses."""
    excuses: list[str] = []
    token = _excuses.set(excuses)
    try:
        yield excuses
    finally:
        _excuses.reset(token)
