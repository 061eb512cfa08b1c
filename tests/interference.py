"""Doing something in the middle of what is tested."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


def begin_with(place: str, first: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something before the next call of a function, and of no later one."""
    module, _, name = place.rpartition(".")
    then = getattr(sys.modules[module], name)

    def begin(*args: Any) -> Any:
        monkeypatch.setattr(place, then)
        first()
        return then(*args)

    monkeypatch.setattr(place, begin)
