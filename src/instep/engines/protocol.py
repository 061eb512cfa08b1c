"""What an engine is: the place where replicas run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from instep.replicas.ambient import Ambient
from instep.replicas.replica import Outcome, Replica, run
from instep.replicas.tensors import Way, no_gradients_left, refuse_gradients


@dataclass
class Job:
    """One call, ready to run: the active replicas and each one's arguments."""

    replicas: Sequence[Replica]
    arguments: Sequence[tuple[list[Any], dict[str, Any]]]
    method: str
    ambient: Ambient
    follow: bool
    """Whether buffers and other state are brought up to the source first."""


class Engine(Protocol):
    """Runs jobs. `joint` engines build the caller's own graph; the others are reached through the bridge."""

    name: str
    joint: bool
    in_turn: bool
    """Whether replicas run one after another."""

    def forward(self, job: Job) -> list[Outcome]: ...

    def hold(self) -> AbstractContextManager[None]:
        """Leave gradients on the replicas while inside, and bring them home on the way out."""
        ...

    def close(self) -> None: ...


def perform(job: Job, index: int) -> Outcome:
    """One replica's part of a job, in whatever thread it runs; an exception becomes part of the outcome."""
    return job.ambient.context.copy().run(_perform, job, index)


def _perform(job: Job, index: int) -> Outcome:
    replica = job.replicas[index]
    args, kwargs = job.arguments[index]
    try:
        guard = replica.tensors.guard
        guard.set(True)  # gradients taken inside forward are forward's own business
        guard.touched = False
        with job.ambient.enter(replica.device):
            if job.follow:
                replica.follow_state()
            joint = replica.tensors.way in (Way.SHARE, Way.LINK)
            with no_gradients_left(source for source, _ in replica.trainable if joint):
                outcome = run(replica, job.method, args, kwargs)
        if guard.touched:
            refuse_gradients(leaf for _, leaf in replica.trainable)
        return outcome
    except BaseException as error:
        return Outcome(error=error)
    finally:
        replica.tensors.guard.set(False)


def raise_first(replicas: Sequence[Replica | str], outcomes: Sequence[Outcome]) -> None:
    """Raise the first replica's exception, with its own type and traceback, saying where it happened."""
    failed = [(r, o.error) for r, o in zip(replicas, outcomes, strict=True) if o.error is not None]
    if failed:
        replica, error = failed[0]
        with name_replica(str(replica), len(failed) - 1):
            raise error


@contextmanager
def name_replica(replica: str, others: int = 0) -> Iterator[None]:
    """Says on an exception which replica it comes from; it keeps its type."""
    try:
        yield
    except BaseException as error:
        note = f"raised in {replica}" + (f" (and in {others} more)" if others else "")
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.__cause__ is None:  # Python 3.10 has no notes
            raise error from RuntimeError(note)
        raise
