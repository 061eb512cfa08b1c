"""One thread that asks all workers, runs the first replica itself, and hears the workers after that.

Nothing is handed from thread to thread then. Only where replicas meet in the middle of a call somebody has to listen to
each worker meanwhile: threads of their own do so from the first meeting on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from instep.engines.bearings import Bearings
from instep.engines.pool import Lease
from instep.engines.processes.cores import watch_for
from instep.engines.room import Room
from instep.engines.tasks import be_inside
from instep.locks import surely
from instep.meeting import first_error

T = TypeVar("T")


class Gathering(Room):
    """A room of which it is known whether anybody met there."""

    met = False
    homecoming: Any = None
    """How gradients of a backward come from all workers at once, if they do."""
    serve: Callable[[], None] | None = None
    """Called before the first replica meets the others for the first time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost = False
        """Whether a replica that was heard has failed."""
        self.glances: list[Callable[[], bool]] = []
        """Each says of one worker whether it has answered that it failed."""

    def somebody_failed(self) -> bool:
        """Whether a replica has failed, so that the others need not be waited for."""
        return self.lost or any(glance() for glance in self.glances)

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        self.met = True
        if index == 0 and self.serve is not None:
            serve, self.serve = self.serve, None
            serve()
        return super().exchange(index, label, payload)


def run_all(
    room: Gathering, lease: Callable[[], Lease], first: Callable[[], T], ends: Sequence[Callable[[], T]]
) -> list[T]:
    """What `first` gives, in this thread, and after it what each worker was asked for before.

    The first error of all is raised when every part has ended, an interruption at once.
    """
    beside: list[Callable[[], list[T]]] = []
    results: list[T] = []
    errors: dict[int, BaseException] = {}
    room.serve = lambda: beside.append(lease().beside(ends))

    def take(number: int, part: Callable[[], list[T]]) -> None:
        try:
            results.extend(part())
        except Exception as error:
            errors[number], room.lost = error, True

    try:
        take(0, lambda: [first()])
        room.serve = None
        parts: Sequence[Callable[[], list[T]]] = beside or [partial(_alone, end) for end in ends]
        for number, part in enumerate(parts, 1):
            take(number, part)
        room.close()
    except BaseException:
        surely(room.abort, room.close)
        raise
    if errors:
        try:
            raise first_error(errors)
        finally:
            errors.clear()  # their tracebacks hold this frame
    return results


def _alone(end: Callable[[], T]) -> list[T]:
    return [end()]


def here(run: Callable[[], T], count: int, *, looked_after: bool = False) -> T:
    """Do something in this thread as a replica does, with a replica's share of the cores of `count` replicas.

    If it fails or is interrupted, what it may have set is set back; only what this function has, where the rest is
    `looked_after` by whoever called it.
    """
    mine = torch.get_num_threads()
    share = max(1, mine // count)
    back = [partial(be_inside, False), partial(torch.set_num_threads, mine)] if looked_after else [Bearings().restore]
    try:
        if share != mine:
            torch.set_num_threads(share)
        be_inside(True)
        watch_for(count)
        result = run()
        watch_for(0)
        be_inside(False)
        if share != mine:
            torch.set_num_threads(mine)
    except BaseException:  # no context manager: an interruption could come on the way to it
        surely(*back, partial(watch_for, 0))
        raise
    return result
