"""One persistent thread for each replica, in this process: any object, no pickling, notebooks."""

from __future__ import annotations

from instep.engines.side_by_side import SideBySide


class ThreadsEngine(SideBySide):
    """Runs replicas at the same time, each in its thread; on the CPU their backward too."""

    name = "threads"
