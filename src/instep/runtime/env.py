"""Environment variables that instep reads."""

from __future__ import annotations

import os

ENGINE_NAMES = ("auto", "serial", "threads", "processes")


def is_quiet() -> bool:
    """`INSTEP_QUIET`: say nothing of what takes its time."""
    return os.environ.get("INSTEP_QUIET", "0") not in ("", "0")


def is_nccl_enabled() -> bool:
    """`INSTEP_NCCL`: 0 to have weights and gradients cross between GPUs by host memory."""
    return os.environ.get("INSTEP_NCCL", "1") not in ("", "0")


def engine_from_env() -> str | None:
    """`INSTEP_ENGINE`: an engine for every wrapper that does not name one (`serial` to debug)."""
    return os.environ.get("INSTEP_ENGINE") or None
