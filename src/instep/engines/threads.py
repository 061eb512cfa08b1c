"""Engine that runs each replica in a persistent thread of this process."""

from __future__ import annotations

from instep.engines.concurrent import ConcurrentEngine


class ThreadsEngine(ConcurrentEngine):
    """Runs replicas concurrently, each in a persistent thread of this process."""

    name = "threads"
