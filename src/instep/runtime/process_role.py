"""Whether this process is a worker process."""

from __future__ import annotations

_is_worker = False


def inside_worker() -> bool:
    """Whether this process is a worker, or was forked by one."""
    return _is_worker


def mark_worker() -> None:
    """Mark this process as a worker. Workers start no worker processes of their own."""
    global _is_worker
    _is_worker = True
