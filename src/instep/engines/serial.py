"""Engine that runs replicas one after another in the caller's thread, in one joint graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from instep.engines.base import Engine, ReplicaCall, raise_first_error, run_forward
from instep.engines.rendezvous import LEFT_FORWARD, Rendezvous, run_serialized
from instep.replicas.replica import ReplicaResult
from instep.replicas.tensors import GradientStash
from instep.runtime.locks import run_uninterrupted


class SerialEngine(Engine):
    """Runs replicas one after another; a breakpoint inside `forward` stops in the caller's thread.

    Only collectives need threads: while the first replica waits in the caller's thread, the others run up to the
    collective in threads of their own, one at a time.
    """

    name = "serial"
    joint_graph = True
    serialized = True

    @classmethod
    def create(cls, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> SerialEngine:  # noqa: ARG003
        return cls()

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]:
        group = Rendezvous(
            call.replica_names, LEFT_FORWARD, joint_graph=True, serialized=True, suspend=call.rng.suspend
        )
        tasks = [partial(run_forward, call, index, group) for index in range(len(call.replicas))]
        sources = {id(source): source for replica in call.replicas for source, _ in replica.trainable}
        saved_gradients = GradientStash(sources.values())
        try:
            saved_gradients.stash()
            results = run_serialized(tasks, group, should_stop=lambda result: result.error is not None)
            raise_first_error(call.replicas[: len(results)], results)
            saved_gradients.check()
            run_uninterrupted(saved_gradients.restore)
            return results
        except BaseException:
            run_uninterrupted(saved_gradients.restore)
            raise
