"""Run code at a chosen point inside the code under test."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest


def run_before_next_call(target: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` before the next call of what is at the dotted path `target`, and only before that one."""
    owner, _, name = target.rpartition(".")
    original = getattr(pkgutil.resolve_name(owner), name)

    def wrapper(*args: Any) -> Any:
        monkeypatch.setattr(target, original)
        action()
        return original(*args)

    monkeypatch.setattr(target, wrapper)
