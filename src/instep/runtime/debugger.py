"""Whether a debugger is attached or stops a thread. Coverage tools and profilers, which trace too, do not count."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "_pydevd_sys_monitoring", "debugpy"}


def is_debugger_attached() -> bool:
    """Whether the trace function of this thread, or the registered debugging tool, is a debugger's."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    trace: Any = sys.gettrace()
    if trace is None:
        return False
    owner = getattr(trace, "__self__", None)
    return any(_is_debugger_module(item) for item in (trace, *type(trace).__mro__, *type(owner).__mro__))


def is_in_debugger(frame: FrameType | None) -> bool:
    """Whether a debugger is in the stack of this frame."""
    while frame is not None:
        if _top_level(frame.f_globals.get("__name__")) in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _is_debugger_module(item: Any) -> bool:
    return _top_level(getattr(item, "__module__", None)) in _DEBUGGERS


def _top_level(module: Any) -> str:
    return str(module).partition(".")[0]
