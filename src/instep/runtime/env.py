"""Environment variables that instep reads. They are read at each query and never cached."""

from __future__ import annotations

import os


def is_quiet() -> bool:
    """`INSTEP_QUIET`: whether progress notices (such as slow worker start-up) are turned off."""
    return os.environ.get("INSTEP_QUIET", "0") not in ("", "0")


def is_nccl_enabled() -> bool:
    """`INSTEP_NCCL`: 0 sends parameters and gradients between GPUs through host memory instead of NCCL."""
    return os.environ.get("INSTEP_NCCL", "1") not in ("", "0")


def is_peer_access_enabled() -> bool:
    """`INSTEP_PEER_ACCESS`: 0 sends tensors between GPUs through host memory instead of from GPU to GPU."""
    return os.environ.get("INSTEP_PEER_ACCESS", "1") not in ("", "0")


def engine_from_env() -> str | None:
    """`INSTEP_ENGINE`: the engine of every wrapper that does not name one (`serial` for debugging)."""
    return os.environ.get("INSTEP_ENGINE") or None
