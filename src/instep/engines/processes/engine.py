"""One worker process for each replica but the first, which is this process's own: no GIL between them.

A thread of this process sits at each worker's desk: it asks for the worker's part of a call, carries what replicas have
to say to each other in the middle of it, and waits. So everything that holds for replicas in threads (who meets whom,
interruptions, the order in which calls of several wrappers come) holds for these.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.bridge import Gradients
from instep.engines.processes.desk import Desk, Met, calls
from instep.engines.processes.estate import move_in
from instep.engines.processes.hands import Hands, Worker
from instep.engines.processes.orders import Back, Ran, Run, Surroundings, WentBack
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.talk import ARGUMENT, SOURCE, Tag, as_sent
from instep.engines.processes.wire import Gone
from instep.engines.protocol import Job, perform
from instep.engines.side_by_side import Part, SideBySide
from instep.errors import EngineError, WorkerFailure
from instep.replicas.ambient import Ambient
from instep.replicas.contents import Contents, contents_of, put
from instep.replicas.replica import Outcome, Replica
from instep.replicas.watch import MISSING, STRUCTURE, Changes, Inside, Set

T = TypeVar("T")

RESTARTS = 3
"""Deaths of workers, within the window, after which a step is tried once more."""
WINDOW = 60.0

_desks: weakref.WeakKeyDictionary[Worker, Desk] = weakref.WeakKeyDictionary()


@dataclass
class Call:
    """A call that a worker keeps the graph of, until nobody needs it any longer."""

    number: int
    desk: Desk
    shadow: Shadow
    run: Run
    met: Met
    arguments: list[Tensor]
    outputs: dict[int, int] = field(default_factory=dict)
    """By the id of an output's tensor here: its number."""
    versions: list[int] = field(default_factory=list)
    """Of the arguments and of the module's tensors, when the forward ran."""
    inputs: list[int] = field(default_factory=list)
    """The numbers of the arguments that a gradient is wanted for."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.desk.gone.append, ("call", self.number))

    def watched(self) -> list[Tensor | None]:
        """What must not be written to before the backward."""
        return [*self.arguments, *self.shadow.counterparts()]


class ProcessesEngine(SideBySide):
    """Runs the first replica here and each other one in a worker process."""

    name = "processes"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._hands = Hands(devices)
        self._deaths: list[float] = []

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        move_in(tensors)

    def kinds(self) -> list[type[Replica]]:
        return [Replica, *[Shadow] * (len(self._devices) - 1)]

    def _with_worker(self, index: int, ask: Callable[[Desk], T]) -> T:
        """Ask a replica's worker for something; if it dies over it, its successor is asked."""
        while True:
            worker = self._hands.get(index)
            if worker not in _desks:
                _desks[worker] = Desk(worker)
            try:
                return ask(_desks[worker])
            except Gone as gone:
                self._replace(index, worker, gone)

    def _replace(self, index: int, worker: Worker, gone: Gone) -> None:
        """A new worker for one that died, unless too many did lately."""
        why, now = worker.death(), time.monotonic()
        self._deaths = [*(then for then in self._deaths if now - then < WINDOW), now]
        if len(self._deaths) > RESTARTS:
            self._deaths = []
            raise WorkerFailure(
                f"the worker of {worker.name} was {why}\n"
                f"It was the worker's death number {RESTARTS + 1} within {WINDOW:.0f} seconds, so that the step is not "
                f"tried again. The module is as it was before the call."
            ) from gone
        self._hands.replace(index)

    def perform(self, job: Job, index: int) -> Outcome:
        if not isinstance(job.replicas[index], Shadow):
            return perform(job, index)
        failure: BaseException | None = None
        try:
            job.room.enter(index)
            return self._ask(job, index)
        except BaseException as error:
            failure = error
            return Outcome(error=error)
        finally:
            job.room.leave(index, failure)
            failure = None  # its traceback holds this frame

    def _ask(self, job: Job, index: int) -> Outcome:
        shadow: Any = job.replicas[index]
        streams, (args, kwargs) = job.streams, job.arguments[index]
        held = streams.held(index)
        shadow.unwrite()
        follow, shadow.behind = job.follow or shadow.behind, False
        run = Run(
            shadow.number,
            job.method,
            args,
            kwargs,
            index,
            list(job.sizes),
            len(job.replicas),
            _surroundings(job.ambient),
            follow,
            streams.state.host.number,
            [source.get_state() for source, _ in held],
            shadow.lent,
            {},
        )
        number = next(calls)
        arguments: list[Tensor] = []
        counterparts = shadow.counterparts()

        def rebuild(tag: Tag, tensor: Tensor | None) -> Tensor:
            if tag[0] == ARGUMENT:
                return arguments[tag[1]]
            if tag[0] == SOURCE:
                made = counterparts[tag[1]]
                assert made is not None
                return made
            return as_sent(tag, tensor)

        met = Met(index, job.room)

        def ask(desk: Desk) -> tuple[Desk, Ran, list[Tensor]]:
            desk.tell(shadow)
            run.fresh = desk.fresh(shadow) if follow else {}
            sent, answer = desk.run(number, run, met)
            arguments[:] = sent
            ran, tensors = desk.talk.take(answer, rebuild)
            return desk, ran, tensors

        desk, ran, tensors = self._with_worker(index, ask)
        met.end()
        if ran.drawn:
            streams.state.host.drawn = True
            streams.state.host.seed(0)
        for i in ran.drawn_held:
            streams.state.add(held[i][0]).drawn = True
        for i, value in ran.arguments.items():
            arguments[i].data.copy_(value)
        outcome = _outcome(shadow, ran)
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if job.ambient.grad and needing:
            inputs = _numbers(job.inputs[index], arguments)
            call = Call(number, desk, shadow, run, met, arguments, needing, inputs=inputs)
            call.versions = _versions(call.watched())
            outcome.remote = call
        return outcome

    def differentiate(self, part: Part) -> None:
        call: Call | None = part.span.sides[part.index].remote
        if call is None:
            return super().differentiate(part)
        failure: BaseException | None = None
        try:
            part.room.enter(part.index)
            return self._ask_back(call, part)
        except BaseException as error:
            failure = error
            raise
        finally:
            part.room.leave(part.index, failure)
            failure = None  # its traceback holds this frame

    def _ask_back(self, call: Call, part: Part) -> None:
        side, host = part.span.sides[part.index], part.span.streams.state.host
        numbers = {id(source): n for n, source in enumerate(call.shadow.table)}
        made = {id(leaf): numbers[id(s)] for s, leaf in call.shadow.trainable if id(s) in numbers}
        wanted = [made[id(leaf)] for leaf in side.leaves if id(leaf) in made]
        moved = [now != then for now, then in zip(_versions(call.watched()), call.versions, strict=True)]
        given = len(call.arguments)
        back = Back(
            {call.outputs[id(o)]: g for o, g in zip(part.outputs, part.gradients, strict=True)},
            part.keep,
            part.crossings,
            [i for i in range(given) if moved[i]],
            [i - given for i in range(given, len(moved)) if moved[i]],
            host.number,
            wanted,
        )
        met = Met(part.index, part.room)

        def ask(desk: Desk) -> WentBack:
            if desk is not call.desk:
                self._recall(call, desk)
            return desk.run_back(call.number, back, met)

        went = self._with_worker(part.index, ask)
        if went.drawn:
            host.drawn = True
            host.seed(0)
        slots = call.desk.slots(call.shadow)
        for leaf in side.leaves:
            n = made.get(id(leaf), -1)
            leaf.grad = slots[n] if n in went.present else went.others.get(n)
        for leaf, number in zip(side.inputs, call.inputs, strict=True):
            leaf.grad = went.inputs.get(number)

    def _recall(self, call: Call, desk: Desk) -> None:
        """Run a call's forward again on a worker that does not have its graph."""
        raise WorkerFailure("not yet")

    def _sum(self, columns: Sequence[Gradients]) -> Gradients:
        """The sum over replicas, in memory of its own: the next backward writes to the workers' slots again."""
        total = super()._sum(columns)
        for index, gradient in enumerate(total):
            if gradient is not None and any(column[index] is gradient for column in columns[1:]):
                total[index] = gradient.clone()
        return total

    def _hold(self, sources: list[Tensor], columns: list[Gradients]) -> None:
        own = [[None if g is None else g.clone() for g in column] for column in columns[1:]]
        super()._hold(sources, [columns[0], *own])

    def close(self) -> None:
        super().close()
        self._hands.close()


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _numbers(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The numbers of some tensors among the arguments that were sent."""
    places = {id(tensor): number for number, tensor in enumerate(arguments)}
    if any(id(tensor) not in places for tensor in tensors):
        raise EngineError(
            "an argument that needs a gradient is no dense tensor, and its gradient cannot come back from another "
            "process.\nUse DataParallel(..., engine='threads')."
        )
    return [places[id(tensor)] for tensor in tensors]


def _surroundings(ambient: Ambient) -> Surroundings:
    return Surroundings(
        grad=ambient.grad,
        inference=ambient.inference,
        autocast=[(cast.device_type, cast.dtype) for cast in ambient.autocast],
        autocast_cache=ambient.autocast_cache,
        device=ambient.device,
        dtype=torch.get_default_dtype(),
        deterministic=torch.get_deterministic_debug_mode(),
        precision=torch.get_float32_matmul_precision(),
        threads=torch.get_num_threads(),
    )


def _outcome(shadow: Shadow, ran: Ran) -> Outcome:
    """What a worker did, on its stand-in."""
    if ran.parted:
        return Outcome(parted=ran.parted)
    if ran.structure:
        return Outcome(changes=STRUCTURE)
    modules = shadow.modules
    attributes, contents = [], []
    for index, name, value, buffer in ran.sets:
        holder = modules[index]._buffers if buffer else modules[index].__dict__
        attributes.append(Set(index, name, holder.get(name, MISSING), value, buffer))
        holder[name] = value
    made = {str(shadow.places.get(id(source))): made for source, _, made in shadow.cloner.containers}
    for place, keys, items in ran.contents:
        container = made[place]
        before = contents_of(container)
        after = Contents(keys, tuple(item if old < 0 else before.items[old] for old, item in items))
        contents.append(Inside(container, before, after))
        put(container, after)
    table = {id(source): n for n, source in enumerate(shadow.table)}
    with torch.no_grad():
        for source, held in shadow.trainable:
            if table.get(id(source)) in ran.apart:
                held.data.copy_(ran.apart[table[id(source)]])
    written = shadow.write({n: value for n, value in ran.written.items()})
    return Outcome(output=ran.output, changes=Changes(False, attributes, contents), written=written)
