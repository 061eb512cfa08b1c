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
    """Runs replicas one after another; a breakpoint inside `forward` stops in the caller's thread.

    Only collectives need threads: while the first replica waits in the caller's thread, the others run up to the
    collective in threads of their own, one at a time.
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
        """Nothing to release."""

    def replica_classes(self) -> Sequence[type[Replica]]:
        return ()

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do: replicas are in this process."""

    def describe_transport(self) -> str:
        return ""

    def forward(self, call: ReplicaCall) -> list[ReplicaResult]:
        names = [replica.name for replica in call.replicas]
        call.group = Rendezvous(names, LEFT_FORWARD, joint_graph=True, serialized=True, suspend=call.rng.suspend)
        tasks = [partial(run_forward, call, index) for index in range(len(call.replicas))]
        sources = {id(source): source for replica in call.replicas for source, _ in replica.trainable}
        saved_gradients = GradientStash(sources.values())
        try:
            saved_gradients.stash()
            results = run_serialized(tasks, call.group, should_stop=lambda result: result.error is not None)
            raise_first_error(call.replicas[: len(results)], results)
            saved_gradients.check()
            run_uninterrupted(saved_gradients.restore)
            return results
        except BaseException:
            run_uninterrupted(saved_gradients.restore)
            raise

    def wait_idle(self) -> None:
        """Nothing to do: an interrupted call has waited already."""

    def add_idle_callback(self, callback: Callable[[], object]) -> None:
        """Nothing to do: no replica runs after an interruption."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to defer: gradients accumulate directly in the source."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to release."""
