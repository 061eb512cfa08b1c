"""Engine that runs each replica in a persistent thread of this process."""

from __future__ import annotations

from instep.engines.concurrent import ConcurrentEngine


class ThreadsEngine(ConcurrentEngine):
    """Runs replicas at the same time, each in its thread; on the CPU their backward too."""

    name = "threads"
