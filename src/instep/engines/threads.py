"""Engine that runs each replica in a persistent thread of this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep.engines.concurrent import ConcurrentEngine
from instep.engines.rendezvous import Rendezvous


class ThreadsEngine(ConcurrentEngine[Rendezvous]):
    """Runs replicas concurrently, each in a persistent thread of this process."""

    name = "threads"
    group_class = Rendezvous

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> ThreadsEngine:  # noqa: ARG003
        return cls(devices, timeout=timeout)
