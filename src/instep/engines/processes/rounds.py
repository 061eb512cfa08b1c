"""One collective of a group as this process sees it: begun here once, and said to every worker once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from instep.engines.processes import orders
from instep.engines.processes.desk import Desk
from instep.engines.processes.flats import share
from instep.engines.processes.fleet import Home
from instep.engines.processes.group import Group
from instep.engines.processes.hands import Worker
from instep.engines.processes.orders import Share
from instep.engines.processes.told import Told


class Round:
    """One collective. The desk that comes first begins it; those that come to it all come in their own threads."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._seen: list[Worker] = []
        self._begun = threading.Event()
        self._asked = self._off = False
        self._ticket = 0

    def join(self, worker: Worker, work: Callable[[Group], None], say: Callable[[int], object]) -> int:
        """Have a worker take part, by what `say` tells it; returns the number of the collective.

        It is 0 where the worker has to do without: it was asked once more, is not of the group, or that is no more.
        """
        with self._lock:
            comes = worker in self._home.workers and worker not in self._seen and not self._off
            first = comes and not self._asked
            self._asked = self._asked or comes
            self._seen.append(worker)
        if not comes:
            self.fail("a worker does not take part")
            return 0
        if first:
            return self._begin(work, say)
        self._begun.wait()
        if self._off:
            return 0
        return self._say(self._ticket, say)

    def _begin(self, work: Callable[[Group], None], say: Callable[[int], object]) -> int:
        group = self._home.group
        try:
            with self._home.turn:
                self._ticket = group.last + 1
                with group.turn(self._ticket):
                    self._say(self._ticket, say)
                    self._begun.set()
                    work(group)
        except RuntimeError:  # of NCCL, or no memory for it: there is another way
            self._off = True
        except BaseException:
            self._off = True
            raise
        finally:
            self._begun.set()
        return 0 if self._off else self._ticket

    def _say(self, ticket: int, say: Callable[[int], object]) -> int:
        try:
            say(ticket)
        except BaseException:
            self.fail("a worker could not be asked")
            raise
        return ticket

    def abandon(self) -> None:
        """The call is over; a worker that was not asked will not be."""
        if len(set(self._seen)) < len(self._home.workers):
            self.fail("not every worker was asked")

    def fail(self, why: str) -> None:
        """Not every worker comes: those that were asked already wait no longer."""
        with self._lock:
            self._off = True
        if self._asked:
            self._home.group.abort(why)


class Sharing(Round):
    """The values of a module's tensors on their way to all workers, at the beginning of a call."""

    def ticket_for(self, desk: Desk, number: int, told: Told) -> int:
        """Send them to one more worker, which knows the module by this number; 0 where they come by host memory."""
        image = told.image
        if image is None or not told.pulled:  # there is nothing to send, to anybody
            self.fail("a worker has nothing to be sent")
            return 0
        pieces = image.pieces(told.pulled)
        nbytes = sum(piece.tensor.nbytes for piece in pieces)

        def say(ticket: int) -> None:
            desk.talk.say(orders.SHARE, 0, Share(number, ticket, len(pieces), nbytes))

        return self.join(desk.worker, lambda group: share(group, pieces), say)
