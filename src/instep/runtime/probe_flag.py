"""Whether the module runs in a probe trial, and exemptions that collectives report there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_exemptions: ContextVar[list[str] | None] = ContextVar("instep_probe_exemptions", default=None)


def exempt_trial(reason: str) -> None:
    """Report, from inside `forward`, why outputs of parts and whole may differ; does nothing outside a trial."""
    exemptions = _exemptions.get()
    if exemptions is not None:
        exemptions.append(reason)


def is_probing() -> bool:
    """Whether the module runs in a trial."""
    return _exemptions.get() is not None


@contextmanager
def probe_context() -> Iterator[list[str]]:
    """Context manager for a trial; yields the list of reported exemptions."""
    exemptions: list[str] = []
    token = _exemptions.set(exemptions)
    try:
        yield exemptions
    finally:
        _exemptions.reset(token)
