"""One worker process for each replica but the first, which is this process's own: no GIL between them.

The thread that calls asks every worker for its part, runs the first replica, and hears the workers where replicas meet
and after that. Where they run in turn, work on accelerators, or something is around the call (hooks on saved tensors,
for one), a thread of this process sits at each worker's desk instead, as each replica has one on `threads`: who meets
whom, and what becomes of an interruption, is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from instep.bridge import Gradients, Span
from instep.engines.processes.ahead import Ahead
from instep.engines.processes.asking import Asked, ask_now
from instep.engines.processes.call import Call
from instep.engines.processes.desk import Desk
from instep.engines.processes.desks import desk_of, leave_desks
from instep.engines.processes.dice import Dice
from instep.engines.processes.driver import Refused
from instep.engines.processes.estate import move_in
from instep.engines.processes.fleet import Fleet
from instep.engines.processes.gathering import Gathering, here, run_all
from instep.engines.processes.hands import Hands, Worker
from instep.engines.processes.hearing import TOLD, Hearing, hear_out, unwrapped
from instep.engines.processes.hold import allocate
from instep.engines.processes.homecoming import Homecoming
from instep.engines.processes.parts import BackwardPart, ForwardPart
from instep.engines.processes.questions import NearPart, ReachPart
from instep.engines.processes.rounds import Sharing
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.shore import Passage
from instep.engines.processes.wire import Gone
from instep.engines.protocol import Job, perform, raise_first
from instep.engines.room import FORWARD
from instep.engines.side_by_side import Part, SideBySide
from instep.engines.tasks import inside_replica
from instep.errors import EngineError, WorkerFailure
from instep.locks import ProcessLock
from instep.private import saves_as_usual
from instep.reaching import Reach
from instep.reduce import add_up, free_to_use
from instep.replicas.replica import Outcome, Replica

WINDOW = 60.0
"""Seconds in which deaths of workers are counted."""


class ProcessesEngine(SideBySide):
    """Runs the first replica here and each other one in a worker process."""

    name = "processes"
    far = True

    def __init__(self, devices: Sequence[torch.device], *, restarts: int = 3, timeout: float = 600.0) -> None:
        if any(device.type not in ("cpu", "cuda") for device in devices):
            raise EngineError("engine='processes' runs replicas on the CPU and on CUDA; write engine='threads'.")
        super().__init__(devices, timeout=timeout)
        self.restarts = restarts
        self._hands = Hands(devices)
        self._deaths: list[float] = []
        self._counting = ProcessLock()
        self.crossing: dict[int, str | None] = {}
        """By the index of a replica: why its tensors leave the device to cross (see `Desk.sharing`)."""
        self._passage: Passage
        """The one of the backward that runs."""
        self._ahead = Ahead()
        """The same."""
        self._fleet = Fleet(self, devices)
        self._dice = Dice()

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        home = self._devices[0]
        if home.type == "cpu":
            move_in(tensors)
            return
        beside = [index for index, device in enumerate(self._devices) if index and device == home]
        near: bool = bool(beside) and ask_now(self, beside[0], NearPart(), Passage(self._devices), True)
        if near:
            # Where there is no memory for it, it stays where it is, and workers get copies.
            with suppress(Refused):
                move_in(tensors, partial(allocate, device=home), home)

    def words(self) -> str:
        if self._on_host or not self.crossing:
            return ""
        near = [index for index, why in self.crossing.items() if why == ""]
        refused = next((why for why in self.crossing.values() if why), None)
        if refused is not None:
            return f"tensors cross by host memory, because device memory cannot be shared here ({refused})"
        ways = ["CUDA IPC"] * bool(near) + ["host memory"] * (len(near) < len(self.crossing))
        return f"tensors cross by {' or '.join(ways)}{self._fleet.words()}"

    def kinds(self) -> list[type[Replica]]:
        return [Replica, *[Shadow] * (len(self._devices) - 1)]

    def worker(self, index: int) -> tuple[Worker, Desk]:
        worker = self._hands.get(index, self.timeout)
        desk = desk_of(worker)
        desk.timeout = self.timeout
        return worker, desk

    def settle(self, index: int, desk: Desk, passage: Passage, near: bool) -> None:
        desk.settle(self._devices[index], near)
        self.crossing[index] = desk.sharing if near else None
        desk.worker.line.shore = passage.shore()

    def bury(self, index: int, worker: Worker | None, gone: Gone) -> None:
        why = str(gone) if worker is None else f"the worker of {worker.name} ended: {worker.death()}"
        self.part(worker)
        self._hands.end(index)
        with self._counting:
            now = time.monotonic()
            self._deaths = [*(then for then in self._deaths if now - then < WINDOW), now]
            too_many = len(self._deaths) > self.restarts
            if too_many:
                self._deaths = []
        if too_many:
            raise WorkerFailure(
                f"{why}\n"
                f"That was death number {self.restarts + 1} within {WINDOW:.0f} seconds, so the step is not tried "
                f"again. The module is as it was before the call."
            ) from gone

    def give_up(self, index: int) -> None:
        self.part(self._hands.last(index))
        self._hands.end(index)

    def part(self, worker: Worker | None) -> None:
        self._fleet.lose(worker)

    def room_for(self, names: Sequence[str], end: str, **options: Any) -> Gathering:
        return Gathering(names, end, timeout=self.timeout, **options)

    def forward(self, job: Job) -> list[Outcome]:
        job.passage, job.dice = Passage(self._devices), self._dice.read()
        # The first replica is in one place at a time. On accelerators a gradient that it takes on its way comes from
        # another thread, which must not wait for this one.
        with self._lock if self._on_host else self._sharing(job):
            return self._forward_here(job) if self._is_heard_here(job) else super().forward(job)

    @contextmanager
    def _sharing(self, job: Job) -> Iterator[None]:
        """Let the module's tensors come to all workers in their group, where they are one."""
        in_group = job.follow and not job.streams.in_turn and self._fleet.fits(len(job.replicas))
        home = self._fleet.ready(job.passage) if in_group else None
        if home is None:
            yield
            return
        sharing = job.passage.sharing = Sharing(home)
        try:
            yield
        except BaseException:
            sharing.abandon()
            raise

    def _is_heard_here(self, job: Job) -> bool:
        """Whether the thread that calls hears the workers, as for most: nobody in turn, and nothing in its way."""
        return (
            self._on_host
            and not job.streams.in_turn
            and not inside_replica()
            and job.ambient.lets_work(self._devices[0])
            and saves_as_usual()
        )

    def _forward_here(self, job: Job) -> list[Outcome]:
        room = job.room = self.room_for([replica.name for replica in job.replicas], FORWARD)

        meanwhile: list[Callable[[], None]] = []

        def run() -> list[Outcome]:  # workers are told of the threads that a replica has here
            return run_all(room, own, [self._part(job, index, meanwhile) for index in range(1, len(job.replicas))])

        def own() -> Outcome:
            if job.ambient.autocast:  # weights may have changed since they were cast in the caller's block
                torch.clear_autocast_cache()
            outcome = self._perform_first(job)
            _raise_interruption(outcome.error)
            room.lost = outcome.error is not None
            for do in meanwhile:
                do()
            return outcome

        outcomes = here(run, len(job.replicas), looked_after=True)
        raise_first(job.replicas, outcomes)
        return outcomes

    def perform(self, job: Job, index: int) -> Outcome:
        if not index:
            return self._perform_first(job)
        with job.passage.enter():
            return hear_out(self._part(job, index, []))

    def _perform_first(self, job: Job) -> Outcome:
        outcome = perform(job, 0)
        self._dice.note(job.dice)
        return outcome

    def _part(self, job: Job, index: int, meanwhile: list[Callable[[], None]]) -> Hearing[Outcome]:
        """Ask for one replica's part of a forward, and hear it; what is noted can come in between."""
        asked: Asked[Any] = Asked(self, index, job.passage)
        failure: BaseException | None = None
        waiting = False
        try:
            job.room.enter(index)
            part = ForwardPart(job, index)
            asked.ask(part, part.near)
            meanwhile.append(partial(asked.meanwhile, part.meanwhile))
            waiting = True
            yield TOLD
            return part.outcome(*(yield from asked.hear()))
        except BaseException as error:
            failure = unwrapped(error)
            asked.give_up()
            if job.passage.sharing is not None and not waiting:
                job.passage.sharing.fail("a worker could not be asked")
            if not asked.is_answer(failure):
                _raise_interruption(failure)
            return Outcome(error=failure)
        finally:
            job.room.leave(index, failure)
            failure = None  # its traceback holds this frame

    def reach(self, span: Span, index: int, outputs: Sequence[Tensor]) -> Reach:
        call: Call | None = span.sides[index].remote
        if call is None:
            return super().reach(span, index, outputs)
        return ask_now(self, index, ReachPart(call, outputs), self._passage, call.told.near)

    def backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> tuple[Gradients, list[Gradients]]:
        with self._lock:
            outer, self._ahead = self._ahead, Ahead()
            try:
                return super().backward(span, gradients, keep)
            finally:
                self._ahead = outer

    def _run_backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> None:
        self._passage = Passage(self._devices)
        super()._run_backward(span, gradients, keep)

    def differentiate_all(self, parts: Sequence[Part], room: Any) -> None:
        first, *others = parts
        if self._fleet.fits(len(parts)):
            with Homecoming(self, self._fleet, self._passage, len(parts)) as room.homecoming:
                super().differentiate_all(parts, room)
            return
        sides = first.span.sides
        apart = bool(first.crossings) and not all(sides[part.index].remote is not None for part in others)
        if first.span.streams.in_turn or not self._on_host or sides[0].remote is not None or apart:
            super().differentiate_all(parts, room)
            return

        def run() -> list[None]:
            return run_all(room, own, [self._part_back(part) for part in others])

        def own() -> None:
            self.differentiate(first)
            self._ahead.into = free_to_use([leaf.grad for leaf in first.span.sides[0].leaves])
            if not self._holding:
                self._ahead.work(first.span.sides)

        here(run, len(parts))

    def differentiate(self, part: Part) -> None:
        if part.span.sides[part.index].remote is None:
            super().differentiate(part)
        else:
            with self._passage.enter():
                hear_out(self._part_back(part))

    def _part_back(self, part: Part) -> Hearing[None]:
        """Ask for one replica's part of a backward, and hear it."""
        call: Call | None = part.span.sides[part.index].remote
        if call is None:  # none of its outputs needs a gradient
            yield TOLD
            super().differentiate(part)
            return
        asked: Asked[Any] = Asked(self, part.index, self._passage)
        failure: BaseException | None = None
        try:
            part.room.enter(part.index)
            back = BackwardPart(call, part, self._passage)
            homecoming: Homecoming | None = getattr(part.room, "homecoming", None)
            if homecoming is not None:
                homecoming.expect(part.index, back)
            asked.ask(back, call.told.near)
            back.expect(self._ahead)
            yield TOLD
            back.leave((yield from asked.hear()), self._ahead.late)
        except BaseException as error:
            failure = unwrapped(error)
            asked.give_up()
            raise
        finally:
            part.room.leave(part.index, failure)
            failure = None  # its traceback holds this frame

    def _sum(self, columns: Sequence[Gradients], into: Collection[int] | None = None) -> Gradients:
        """The sum over replicas, in memory of its own: the next backward writes to the workers' slots again."""
        done = self._ahead.finish(columns)
        rest = [[g for place, g in enumerate(column) if place not in done] for column in columns] if done else columns
        into = None if done else self._ahead.into
        sums = super()._sum(rest, into)
        if any(gradient is None for gradient in rest[0]):  # then another one's may be the sum
            slots = {id(gradient) for column in rest[1:] for gradient in column}
            sums = [g.clone() if g is not None and id(g) in slots else g for g in sums]
        if done:
            more = iter(sums)
            sums = [done[place] if place in done else next(more) for place in range(len(columns[0]))]
        for _, place, gradient in sorted(self._ahead.late, key=itemgetter(0)):
            sums[place] = add_up([[sums[place]], [gradient]])[0]
        return sums

    def _hold(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        own = [[None if g is None else g.clone() for g in column] for column in columns[1:]]
        for index, place, gradient in self._ahead.late:
            own[index - 1][place] = add_up([[own[index - 1][place]], [gradient]])[0]
        super()._hold(sources, [columns[0], *own])

    def close(self) -> None:
        super().close()
        self._fleet.close()
        self._hands.close()
        leave_desks()
        self._hands = Hands(self._devices)


def _raise_interruption(error: BaseException | None) -> None:
    """Nobody waits for the other replicas after an interruption."""
    if error is not None and not isinstance(error, Exception):
        raise error
