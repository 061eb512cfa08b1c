"""Engine that runs replicas one after another in the caller's thread, in one joint graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from instep.engines.base import ReplicaCall, raise_first_error, run_forward
from instep.engines.rendezvous import LEFT_FORWARD, Rendezvous, run_serialized
from instep.replicas.replica import Replica, ReplicaResult
from instep.replicas.tensors import GradientStash
from instep.runtime.locks import run_uninterrupted


class SerialEngine:
    """Runs replicas in turn; a breakpoint inside `forward` stops in the caller's own thread.

    Only replicas that do something together in the middle of `forward` need threads: while the first one waits, in the
    caller's thread, the others come as far as it is, one at a time.
    """

    name = "serial"
    joint_graph = True
    out_of_process = False
    serialized = True

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> SerialEngine:  # noqa: ARG003
        return cls()

    @classmethod
    def shutdown(cls) -> None:
        """Nothing is shared."""

    def replica_classes(self) -> Sequence[type[Replica]]:
        return ()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Replicas of this process reach them wherever they are."""

    def describe_transport(self) -> str:
        return ""

    def forward(self, job: ReplicaCall) -> list[ReplicaResult]:
        names = [replica.name for replica in job.replicas]
        job.group = Rendezvous(names, LEFT_FORWARD, joint_graph=True, serialized=True, suspend=job.rng.suspend)
        tasks = [partial(run_forward, job, index) for index in range(len(job.replicas))]
        sources = {id(source): source for replica in job.replicas for source, _ in replica.trainable}
        aside = GradientStash(sources.values())
        try:
            aside.stash()
            outcomes = run_serialized(tasks, job.group, should_stop=lambda outcome: outcome.error is not None)
            raise_first_error(job.replicas[: len(outcomes)], outcomes)
            aside.check()
            run_uninterrupted(aside.restore)
            return outcomes
        except BaseException:
            run_uninterrupted(aside.restore)
            raise

    def wait_idle(self) -> None:
        """Whoever is interrupted has waited already."""

    def add_idle_callback(self, then: Callable[[], object]) -> None:
        """Nothing runs on."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is ever held back: gradients go straight to the source."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is held."""
