"""Warnings that point at the user's line."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch

from instep.runtime.launcher import is_primary

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = tuple(
    os.path.join(os.path.dirname(os.__file__), name) for name in ("contextlib", "threading", "concurrent")
)
_LIBRARY_FILES = (_PACKAGE, _TORCH, *_STANDARD)


def warn_caller(message: str) -> None:
    """Warn with the location of the first frame outside of instep and torch; that of the caller if there is none.

    Of several ranks, the primary one warns.
    """
    if not is_primary():
        return
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_FILES):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=2 if frame is None else level)
