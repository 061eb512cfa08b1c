"""Replicas one after another in the caller's thread, in one joint graph: for debugging, and for double backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from instep.engines.protocol import Job, perform, raise_first
from instep.replicas.replica import Outcome


class SerialEngine:
    """Runs replicas in turn; a breakpoint inside `forward` stops in the caller's own thread."""

    name = "serial"
    joint = True
    in_turn = True

    def forward(self, job: Job) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for index in range(len(job.replicas)):
            outcomes.append(perform(job, index))
            if outcomes[-1].error is not None:
                break
        raise_first(job.replicas[: len(outcomes)], outcomes)
        return outcomes

    def hold(self) -> AbstractContextManager[None]:
        """Nothing is ever held back: gradients go straight to the source."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
