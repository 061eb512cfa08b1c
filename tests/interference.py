"""Run code at a chosen point inside the code under test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest


def run_before_next_call(target: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` before the next call of the function at the dotted path `target`, and only before that one."""
    module, _, name = target.rpartition(".")
    original = getattr(sys.modules[module], name)

    def wrapper(*args: Any) -> Any:
        monkeypatch.setattr(target, original)
        action()
        return original(*args)

    monkeypatch.setattr(target, wrapper)
