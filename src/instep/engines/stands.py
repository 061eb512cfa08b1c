"""What threads are doing: whether they have worked, and whether a debugger holds them."""

from __future__ import annotations

from types import FrameType

_DEBUGGERS = {"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"}


def worked(task: int) -> list[str]:
    """How long a thread has worked, as the system counts; nothing where it does not say."""
    try:
        with open(f"/proc/self/task/{task}/stat") as file:
            return file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return []


def is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger is in a thread's stack."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
