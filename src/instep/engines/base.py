"""The engine protocol, and running one replica's part of a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from instep.collectives.group import PeerFailure, ReplicaContext, ReplicaInfo, first_error, use_context
from instep.replicas.replica import Replica, ReplicaResult, run_replica
from instep.replicas.tensors import check_no_inner_backward
from instep.runtime.ambient import AmbientState
from instep.runtime.rng import ReplicaRng


@dataclass
class ReplicaCall:
    """One call, ready to run: the active replicas and each one's arguments."""

    replicas: Sequence[Replica]
    arguments: Sequence[tuple[list[Any], dict[str, Any]]]
    method: str
    ambient: AmbientState
    sync_state: bool
    """Whether buffers and other state are brought up to the source first."""
    rng: ReplicaRng
    """Where the replicas draw random numbers from, and whether they run one after another for its sake."""
    sizes: Sequence[int] = ()
    """The samples of each replica's shard."""
    grad_inputs: Sequence[Sequence[Tensor]] = ()
    """Of each replica's arguments, the tensors that a gradient is wanted for."""
    mutable_argument_ids: Collection[int] = ()
    """The ids of what the caller's arguments hold and replicas may change in place, tensors apart."""
    argument_names: Sequence[str] = ()
    """The names of the arguments, positional ones first; for messages."""
    group: Any = None
    """Where the replicas meet in the middle of the call; the engine provides it."""
    device_transfer: Any = None
    """How tensors of the caller's accelerator leave for other processes; the engine that has such provides it."""
    python_seed: int | None = None
    """What seeds Python's and NumPy's generators of other processes, by the same engine."""

    def replica_context(self, index: int) -> ReplicaContext | None:
        """One replica's place in the meeting."""
        if self.group is None:
            return None
        size = self.sizes[index] if self.sizes else None
        where = ReplicaInfo(index, len(self.replicas), self.replicas[index].device, size, sum(self.sizes[:index]))
        return ReplicaContext(self.group, where, self.sizes, self.ambient.grad_enabled, _run_forward.__code__)


class Engine(Protocol):
    """Runs jobs. `joint` engines build the caller's own graph; the others are reached through the bridge."""

    name: str
    joint_graph: bool
    serialized: bool
    """Whether replicas always run one after another."""
    out_of_process: bool
    """Whether replicas live in other processes, with copies of their arguments."""

    def replica_classes(self) -> Sequence[type[Replica]]:
        """What each replica is in this process; nothing for the usual."""
        ...

    def share_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors of a source module to where its replicas can reach them."""
        ...

    def describe_transport(self) -> str:
        """What is to be said of how tensors come to the replicas; nothing where they are at home."""
        ...

    def forward(self, job: ReplicaCall) -> list[ReplicaResult]: ...

    def wait_idle(self) -> None:
        """Wait until nothing of an interrupted call runs any longer."""
        ...

    def add_idle_callback(self, then: Callable[[], object]) -> None:
        """Do something as soon as that is so; nothing if it was so when the interruption was raised."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients on the replicas while inside, and bring them home on the way out."""
        ...

    def close(self) -> None: ...


class EngineClass(Protocol):
    """A class of engines, as `engines.select` registers it."""

    def create(self, devices: Sequence[torch.device], *, restarts: int, timeout: float) -> Engine:
        """Create an engine.

        Args:
            devices: The replicas' devices.
            restarts: How often worker processes that died are replaced within a minute.
            timeout: Seconds that replicas wait for one that makes no progress.
        """
        ...

    def shutdown(self) -> None:
        """Release what the engines of this class share in this process."""
        ...


def run_forward(job: ReplicaCall, index: int) -> ReplicaResult:
    """One replica's part of a job, in whatever thread it runs; an exception becomes part of the outcome."""
    return job.ambient.context_vars.copy().run(_run_forward, job, index)


def _run_forward(job: ReplicaCall, index: int) -> ReplicaResult:
    replica = job.replicas[index]
    args, kwargs = job.arguments[index]
    seat = job.replica_context(index)
    failure: BaseException | None = None
    try:
        if job.group is not None:
            job.group.enter(index)
        guard = replica.tensors.guard
        guard.set(True)  # gradients taken inside forward are forward's own business
        guard.touched = False
        with job.ambient.enter(replica.device), job.rng.forward_context(index), use_context(seat):
            if job.sync_state:
                replica.sync_state()
            outcome = run_replica(replica, job.method, args, kwargs, job.ambient.compiler)
        if replica.tensors.may_have_gradients():
            check_no_inner_backward(leaf for _, leaf in replica.trainable)
        outcome.context = seat
        return outcome
    except BaseException as error:
        failure = error
        return ReplicaResult(error=error)
    finally:
        replica.tensors.guard.set(False)
        if job.group is not None and seat is not None:
            seat.forward_done = True
            job.group.leave(index, failure)
        failure = None  # its traceback holds this frame


def raise_first_error(replicas: Sequence[Replica | str], outcomes: Sequence[ReplicaResult]) -> None:
    """Raise the first replica's exception, with its own type and traceback, saying where it happened."""
    failed = {i: o.error for i, o in enumerate(outcomes) if o.error is not None}
    if failed:
        error = first_error(failed)
        own = [i for i, e in failed.items() if not isinstance(e, PeerFailure)]
        raise add_replica_note(
            str(replicas[next(i for i, e in failed.items() if e is error)]), error, max(0, len(own) - 1)
        )


def add_replica_note(replica: str, error: BaseException, others: int = 0) -> BaseException:
    """An exception that says which replica it comes from; it keeps its type."""
    note = f"raised in {replica}" + (f" (and in {others} more)" if others else "")
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:  # Python 3.10 has no notes
        error.__cause__ = RuntimeError(note)
    return error
