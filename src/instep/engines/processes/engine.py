"""One worker process for each replica but the first, which is this process's own: no GIL between them.

On the CPU the thread that calls asks every worker for its part, runs the first replica, and then hears the workers. On
accelerators, where replicas meet in the middle of a call, and where they run in turn, a thread of this process sits at
each worker's desk instead, as each replica has one on `threads`: who meets whom, and what becomes of an interruption,
is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.bridge import Gradients, Span
from instep.engines.pool import inside_replica
from instep.engines.processes.asking import Asked, Question
from instep.engines.processes.call import Call
from instep.engines.processes.desk import Desk, desk_of
from instep.engines.processes.driver import Refused
from instep.engines.processes.estate import move_in
from instep.engines.processes.gathering import Gathering, here, run_all
from instep.engines.processes.hands import Hands, Late, Worker, flush_output
from instep.engines.processes.hold import allocate
from instep.engines.processes.parts import BackwardPart, ForwardPart
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.shore import Passage
from instep.engines.processes.waiting import Stuck
from instep.engines.processes.wire import Gone
from instep.engines.protocol import Job, perform, raise_first
from instep.engines.room import FORWARD, Room
from instep.engines.side_by_side import Part, SideBySide
from instep.errors import EngineError, WorkerFailure
from instep.meeting import Reach
from instep.private import saves_as_usual
from instep.replicas.replica import Outcome, Replica

T = TypeVar("T")

WINDOW = 60.0
"""Seconds in which deaths of workers are counted."""


class ProcessesEngine(SideBySide):
    """Runs the first replica here and each other one in a worker process."""

    name = "processes"
    far = True

    def __init__(self, devices: Sequence[torch.device], *, restarts: int = 3, timeout: float = 600.0) -> None:
        if any(device.type not in ("cpu", "cuda") for device in devices):
            raise EngineError("engine='processes' runs replicas on the CPU and on CUDA; write engine='threads'.")
        super().__init__(devices)
        self.restarts, self.timeout = restarts, timeout
        self._hands = Hands(devices)
        self._deaths: list[float] = []
        self.crossing: dict[int, str | None] = {}
        """By the index of a replica: why its tensors leave the device to cross (see `Desk.sharing`)."""
        self._passage: Passage
        """The one of the backward that runs."""

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        home = self._devices[0]
        if home.type == "cpu":
            move_in(tensors)
            return
        beside = [index for index, device in enumerate(self._devices) if index and device == home]
        if beside and self._with_worker(beside[0], Passage(self._devices), True, attrgetter("near")):
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
        return f"tensors cross by {' or '.join(ways)}"

    def kinds(self) -> list[type[Replica]]:
        return [Replica, *[Shadow] * (len(self._devices) - 1)]

    def _with_worker(self, index: int, passage: Passage, near: bool, ask: Callable[[Desk], T]) -> T:
        """Ask a replica's worker for something; if it dies over it, its successor is asked.

        `near` says whether tensors may stay on a device that both processes work on.
        """
        while True:
            worker: Worker | None = None
            try:
                worker = self._hands.get(index)
                with self.desk(worker, index, passage, near) as desk:
                    return ask(desk)
            except (Gone, Stuck, Late) as trouble:
                self.end(index, worker, trouble)
            finally:
                flush_output()

    def worker(self, index: int) -> Worker:
        return self._hands.get(index)

    @contextmanager
    def desk(self, worker: Worker, index: int, passage: Passage, near: bool) -> Iterator[Desk]:
        desk = desk_of(worker)
        desk.timeout = self.timeout
        with desk.busy:
            desk.settle(self._devices[index], near)
            self.crossing[index] = desk.sharing if near else None
            worker.line.shore = passage.shore()
            yield desk

    def end(self, index: int, worker: Worker | None, trouble: Exception) -> None:
        if isinstance(trouble, Gone):
            self._bury(index, worker, trouble)
        else:
            self._hands.end(index)
            raise trouble

    def _bury(self, index: int, worker: Worker | None, gone: Gone) -> None:
        """Count a worker that died, in a call or as it came up, so that there may be a new one."""
        why = str(gone) if worker is None else f"the worker of {worker.name} ended: {worker.death()}"
        self._hands.end(index)
        now = time.monotonic()
        self._deaths = [*(then for then in self._deaths if now - then < WINDOW), now]
        if len(self._deaths) > self.restarts:
            self._deaths = []
            raise WorkerFailure(
                f"{why}\n"
                f"That was death number {self.restarts + 1} within {WINDOW:.0f} seconds, so the step is not tried "
                f"again. The module is as it was before the call."
            ) from gone

    def room_for(self, names: Sequence[str], end: str, **options: Any) -> Gathering:
        return Gathering(names, end, **options)

    def forward(self, job: Job) -> list[Outcome]:
        job.passage = Passage(self._devices)
        with self._lock:  # the first replica is in one place at a time
            outcomes = self._forward_here(job) if self._is_plain(job) else super().forward(job)
        if job.room.met:
            for replica in job.replicas:
                if isinstance(replica, Shadow):
                    replica.meets.add(job.method)
        return outcomes

    def _is_plain(self, job: Job) -> bool:
        """Whether a call is as most are: no meetings that are known of, nothing around it, nobody in turn."""
        if not self._on_host or job.streams.in_turn or inside_replica() or not saves_as_usual():
            return False
        meets = any(isinstance(replica, Shadow) and job.method in replica.meets for replica in job.replicas)
        return not meets and job.ambient.is_plain(self._devices[0])

    def _forward_here(self, job: Job) -> list[Outcome]:
        room = job.room = self.room_for([replica.name for replica in job.replicas], FORWARD)

        def run() -> list[Outcome]:
            ends = [self._begin(job, index) for index in range(1, len(job.replicas))]
            return run_all(room, lambda: self.lease, partial(perform, job, 0), ends)

        outcomes = here(run, len(job.replicas))
        raise_first(job.replicas, outcomes)
        return outcomes

    def _begin(self, job: Job, index: int) -> Callable[[], Outcome]:
        """Ask for one replica's part of a forward; what this returns waits for it."""
        try:
            job.room.enter(index)
            part = ForwardPart(job, index)
            asked = Asked(self, index, job.passage, part)
        except BaseException as error:
            job.room.leave(index, error)
            if not isinstance(error, Exception):
                raise
            return partial(Outcome, error=error)
        return partial(self._end, job.room, index, lambda: part.outcome(*asked.hear()))

    def _end(self, room: Room, index: int, outcome: Callable[[], Outcome]) -> Outcome:
        failure: BaseException | None = None
        try:
            return outcome()
        except BaseException as error:
            failure = error
            return Outcome(error=error)
        finally:
            room.leave(index, failure)
            failure = None  # its traceback holds this frame

    def perform(self, job: Job, index: int) -> Outcome:
        if not isinstance(job.replicas[index], Shadow):
            return perform(job, index)

        def ask() -> Outcome:
            job.room.enter(index)
            with job.passage.enter():
                part = ForwardPart(job, index)
                return part.outcome(*self._with_worker(index, job.passage, part.near, partial(_whole, part)))

        return self._end(job.room, index, ask)

    def reach(self, span: Span, index: int, outputs: Sequence[Tensor]) -> Reach:
        call: Call | None = span.sides[index].remote
        if call is None:
            return super().reach(span, index, outputs)
        numbers = [call.outputs[id(output)] for output in outputs]

        def ask(desk: Desk) -> Reach:
            return desk.reach(call.number, numbers, call.at(desk), call.met)

        return self._with_worker(index, self._passage, call.told.near, ask)

    def differentiate_all(self, parts: Sequence[Part], room: Any) -> None:
        first, *others = parts
        if not self._on_host or first.crossings or first.span.streams.in_turn:
            super().differentiate_all(parts, room)
            return

        def run() -> list[None]:
            ends = [self._begin_back(part) for part in others]
            return run_all(room, lambda: self.lease, partial(super(ProcessesEngine, self).differentiate, first), ends)

        here(run, len(parts))

    def _begin_back(self, part: Part) -> Callable[[], None]:
        """Ask for one replica's part of a backward; what this returns waits for it."""
        call: Call | None = part.span.sides[part.index].remote
        if call is None:  # none of its outputs needs a gradient
            return partial(super().differentiate, part)
        try:
            part.room.enter(part.index)
            back = BackwardPart(call, part, self._passage)
            asked = Asked(self, part.index, self._passage, back)
        except BaseException as error:
            part.room.leave(part.index, error)
            if not isinstance(error, Exception):
                raise
            return partial(_raise, error)
        return partial(self._end_back, part, lambda: back.leave(asked.hear()))

    def _end_back(self, part: Part, leave: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            leave()
        except BaseException as error:
            failure = error
            raise
        finally:
            part.room.leave(part.index, failure)
            failure = None  # its traceback holds this frame

    def differentiate(self, part: Part) -> None:
        call: Call | None = part.span.sides[part.index].remote
        if call is None:
            super().differentiate(part)
            return

        def ask() -> None:
            part.room.enter(part.index)
            with self._passage.enter():
                back = BackwardPart(call, part, self._passage)
                back.leave(self._with_worker(part.index, self._passage, back.near, partial(_whole, back)))

        self._end_back(part, ask)

    def _run_backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> None:
        self._passage = Passage(self._devices)
        super()._run_backward(span, gradients, keep)

    def _sum(self, columns: Sequence[Gradients]) -> Gradients:
        """The sum over replicas, in memory of its own: the next backward writes to the workers' slots again."""
        total = super()._sum(columns)
        slots = {id(gradient) for column in columns[1:] for gradient in column}
        return [gradient if gradient is None or id(gradient) not in slots else gradient.clone() for gradient in total]

    def _hold(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        own = [[None if g is None else g.clone() for g in column] for column in columns[1:]]
        super()._hold(sources, [columns[0], *own])

    def close(self) -> None:
        super().close()
        self._hands.close()
        self._hands = Hands(self._devices)


def _whole(question: Question[T], desk: Desk) -> T:
    """Ask, and hear the answer."""
    question.ask(desk)
    return question.hear(desk)


def _raise(error: Exception) -> None:
    raise error
