"""Replicas one after another in the caller's thread, in one joint graph: for debugging, and for double backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from instep.engines.protocol import Job, perform, raise_first
from instep.engines.room import FORWARD, Room, run_here
from instep.locks import surely
from instep.replicas.replica import Outcome, Replica
from instep.replicas.tensors import GradientsAside


class SerialEngine:
    """Runs replicas in turn; a breakpoint inside `forward` stops in the caller's own thread.

    Only replicas that do something together in the middle of `forward` need threads: while the first one waits, in the
    caller's thread, the others come as far as it is, one at a time.
    """

    name = "serial"
    joint = True
    far = False
    in_turn = True

    def kinds(self) -> Sequence[type[Replica]]:
        return ()

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        """Replicas of this process reach them wherever they are."""

    def words(self) -> str:
        return ""

    def forward(self, job: Job) -> list[Outcome]:
        names = [replica.name for replica in job.replicas]
        job.room = Room(names, FORWARD, joint=True, in_turn=True, step_aside=job.streams.step_aside)
        tasks = [partial(perform, job, index) for index in range(len(job.replicas))]
        sources = {id(source): source for replica in job.replicas for source, _ in replica.trainable}
        aside = GradientsAside(sources.values())
        try:
            aside.begin()
            outcomes = run_here(tasks, job.room, stop=lambda outcome: outcome.error is not None)
            raise_first(job.replicas[: len(outcomes)], outcomes)
            aside.check()
            surely(aside.end)
            return outcomes
        except BaseException:
            surely(aside.end)
            raise

    def wait(self) -> None:
        """Whoever is interrupted has waited already."""

    def afterwards(self, then: Callable[[], object]) -> None:
        """Nothing runs on."""

    def hold(self) -> AbstractContextManager[None]:
        """Nothing is ever held back: gradients go straight to the source."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
