"""`breakpoint()` in a worker, which has no terminal: the first replica stops in the process that has one."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any


def pass_over(*_: Any, **__: Any) -> None:
    """Go on, and say so once, unless breakpoints were switched off."""
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _say()


@cache
def _say() -> None:
    sys.stderr.write(
        "breakpoint() is passed over in a worker process, which has no terminal: the first replica stops in yours. "
        "With engine='serial' each one does.\n"
    )
