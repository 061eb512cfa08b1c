"""What an engine is: the place where replicas run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from instep.meeting import PeerFailed, Position, Seat, attend, first_error
from instep.random import Streams
from instep.replicas.ambient import Ambient
from instep.replicas.replica import Outcome, Replica, run
from instep.replicas.tensors import refuse_gradients


@dataclass
class Job:
    """One call, ready to run: the active replicas and each one's arguments."""

    replicas: Sequence[Replica]
    arguments: Sequence[tuple[list[Any], dict[str, Any]]]
    method: str
    ambient: Ambient
    follow: bool
    """Whether buffers and other state are brought up to the source first."""
    streams: Streams
    """Where the replicas draw random numbers from, and whether they run one after another for its sake."""
    sizes: Sequence[int] = ()
    """The samples of each replica's shard."""
    inputs: Sequence[Sequence[Tensor]] = ()
    """Of each replica's arguments, the tensors that a gradient is wanted for."""
    theirs: Collection[int] = ()
    """The ids of what the caller's arguments hold and replicas may change in place, tensors apart."""
    room: Any = None
    """Where the replicas meet in the middle of the call; the engine provides it."""
    passage: Any = None
    """How tensors of the caller's accelerator leave for other processes; the engine that has such provides it."""
    dice: int | None = None
    """What seeds Python's and NumPy's generators of other processes, by the same engine."""

    def seat(self, index: int) -> Seat | None:
        """One replica's place in the meeting."""
        if self.room is None:
            return None
        size = self.sizes[index] if self.sizes else None
        where = Position(index, len(self.replicas), self.replicas[index].device, size, sum(self.sizes[:index]))
        return Seat(self.room, where, self.sizes, self.ambient.grad, _perform.__code__)


class Engine(Protocol):
    """Runs jobs. `joint` engines build the caller's own graph; the others are reached through the bridge."""

    name: str
    joint: bool
    in_turn: bool
    """Whether replicas always run one after another."""
    far: bool
    """Whether replicas live in other processes, with copies of their arguments."""

    def kinds(self) -> Sequence[type[Replica]]:
        """What each replica is in this process; nothing for the usual."""
        ...

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors of a source module to where its replicas can reach them."""
        ...

    def words(self) -> str:
        """What is to be said of how tensors come to the replicas; nothing where they are at home."""
        ...

    def forward(self, job: Job) -> list[Outcome]: ...

    def wait(self) -> None:
        """Wait until nothing of an interrupted call runs any longer."""
        ...

    def afterwards(self, then: Callable[[], object]) -> None:
        """Do something as soon as that is so; nothing if it was so when the interruption was raised."""
        ...

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
    seat = job.seat(index)
    failure: BaseException | None = None
    try:
        if job.room is not None:
            job.room.enter(index)
        guard = replica.tensors.guard
        guard.set(True)  # gradients taken inside forward are forward's own business
        guard.touched = False
        with job.ambient.enter(replica.device), job.streams.forward(index), attend(seat):
            if job.follow:
                replica.follow_state()
            outcome = run(replica, job.method, args, kwargs, job.ambient.compiler)
        if replica.tensors.may_have_gradients():
            refuse_gradients(leaf for _, leaf in replica.trainable)
        outcome.seat = seat
        return outcome
    except BaseException as error:
        failure = error
        return Outcome(error=error)
    finally:
        replica.tensors.guard.set(False)
        if job.room is not None and seat is not None:
            seat.over = True
            job.room.leave(index, failure)
        failure = None  # its traceback holds this frame


def raise_first(replicas: Sequence[Replica | str], outcomes: Sequence[Outcome]) -> None:
    """Raise the first replica's exception, with its own type and traceback, saying where it happened."""
    failed = {i: o.error for i, o in enumerate(outcomes) if o.error is not None}
    if failed:
        error = first_error(failed)
        own = [i for i, e in failed.items() if not isinstance(e, PeerFailed)]
        raise raised_in(str(replicas[next(i for i, e in failed.items() if e is error)]), error, max(0, len(own) - 1))


def raised_in(replica: str, error: BaseException, others: int = 0) -> BaseException:
    """An exception that says which replica it comes from; it keeps its type."""
    note = f"raised in {replica}" + (f" (and in {others} more)" if others else "")
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.__cause__ is None:  # Python 3.10 has no notes
        error.__cause__ = RuntimeError(note)
    return error
