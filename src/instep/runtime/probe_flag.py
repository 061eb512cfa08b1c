"""Whether the module runs in a probe trial, and exemptions that collectives report there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_exemptions: ContextVar[list[str] | None] = ContextVar("instep_excuses", default=None)


def exempt_trial(why: str) -> None:
    """Say, from inside `forward`, why parts and whole may differ; nothing happens outside a trial."""
    excuses = _exemptions.get()
    if excuses is not None:
        excuses.append(why)


def is_probing() -> bool:
    """Whether the module runs for a trial rather than for the caller."""
    return _exemptions.get() is not None


@contextmanager
def probe_context() -> Iterator[list[str]]:
    """The length of a trial; gives the list that collects its excuses."""
    excuses: list[str] = []
    token = _exemptions.set(excuses)
    try:
        yield excuses
    finally:
        _exemptions.reset(token)
