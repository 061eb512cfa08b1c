"""One worker process for each replica but the first, which is this process's own: no GIL between them.

A thread of this process sits at each worker's desk: it asks for the worker's part of a call, carries what replicas have
to say to each other in the middle of it, and waits. So everything that holds for replicas in threads (who meets whom,
interruptions, the order in which calls of several wrappers come) holds for these.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.bridge import Gradients, Span
from instep.engines.processes.call import Call, remember_values
from instep.engines.processes.context import carried
from instep.engines.processes.desk import Desk, Met, Stuck, Told, calls
from instep.engines.processes.estate import move_in
from instep.engines.processes.freight import CannotCross
from instep.engines.processes.hands import Hands, Late, Worker, flush_output
from instep.engines.processes.orders import Back, Ran, Run, Surroundings, WentBack
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.talk import ARGUMENT, SOURCE, Rebuild, Tag, as_sent
from instep.engines.processes.wire import Gone, Message
from instep.engines.protocol import Job, perform
from instep.engines.side_by_side import Part, SideBySide
from instep.errors import EngineError, WorkerFailure
from instep.meeting import Reach
from instep.random import Held, generators_in
from instep.replicas.ambient import Ambient
from instep.replicas.contents import contents_of, put
from instep.replicas.handed import from_places, handed_to
from instep.replicas.replica import Outcome, Replica
from instep.replicas.watch import MISSING, STRUCTURE, Changes, Inside, Set

T = TypeVar("T")

WINDOW = 60.0
"""Seconds in which deaths of workers are counted."""

_desks: weakref.WeakKeyDictionary[Worker, Desk] = weakref.WeakKeyDictionary()


class ProcessesEngine(SideBySide):
    """Runs the first replica here and each other one in a worker process."""

    name = "processes"
    far = True

    def __init__(self, devices: Sequence[torch.device], *, restarts: int = 3, timeout: float = 600.0) -> None:
        if any(device.type != "cpu" for device in devices):
            raise EngineError(
                "engine='processes' runs replicas on the CPU so far; on accelerators write engine='threads'."
            )
        super().__init__(devices)
        self.restarts, self.timeout = restarts, timeout
        self._hands = Hands(devices)
        self._deaths: list[float] = []

    def settle_in(self, tensors: Iterable[Tensor]) -> None:
        move_in(tensors)

    def kinds(self) -> list[type[Replica]]:
        return [Replica, *[Shadow] * (len(self._devices) - 1)]

    def _with_worker(self, index: int, ask: Callable[[Desk], T]) -> T:
        """Ask a replica's worker for something; if it dies over it, its successor is asked."""
        while True:
            worker: Worker | None = None
            try:
                worker = self._hands.get(index)
                desk = _desk(worker)
                desk.timeout = self.timeout
                with desk.busy:  # a call that the caller gave up is still answered, and then comes the next
                    return ask(desk)
            except Gone as gone:
                self._bury(index, worker, gone)
            except (Stuck, Late):
                self._hands.end(index)
                raise
            finally:
                flush_output()

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
        held = streams.held[index]
        shadow.unwrite()
        follow, shadow.behind = job.follow or shadow.behind, False
        lent, shadow.lent = shadow.lent, []
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
            {},
            lent,
            {},
        )
        mine = handed_to(args, kwargs, job.theirs)
        run.given, were = [one.steps for one in mine], [one.contents() for one in mine]
        run.in_turn = streams.in_turn
        sources = _generators(run, shadow, held)
        number, met = next(calls), Met(job.room)

        def ask(desk: Desk) -> tuple[Desk, Told, list[Tensor], Message]:
            job.room.stacks[index] = desk.worker.stack
            told = desk.tell(shadow)
            run.fresh = told.fresh() if follow else {}
            run.around.context = carried(job.ambient.context, desk.talk.depot)
            run.generators = {number: source.get_state() for number, source in enumerate(told.generators)}
            return desk, told, *desk.run(number, run, met)

        desk, told, arguments, answer = self._with_worker(index, ask)
        met.end()
        shadow.stale = shadow.stale or bool(run.lent)  # the worker's replica holds a part, not what the module has
        ran, tensors = desk.talk.take(answer, _rebuild(arguments, told.counterparts))
        if ran.wrote:
            desk.talk.depot.forget()
            raise CannotCross(
                f"forward changed the global {ran.wrote[0]!r} in a worker process, where the script does not see it.\n"
                f"Return what it is for, set it on the module, or write engine='threads'."
            )
        if ran.drawn:
            streams.state.host.drawn = True
            streams.state.host.seed(0)
        streams.state.host.elsewhere = streams.state.host.elsewhere or ran.by_name
        for source in (*(told.generators[i] for i in ran.drawn_held), *(sources[i] for i in ran.drawn_own)):
            streams.state.add(source).drawn = True
        for i, state in ran.moved.items():
            run.lone[i].set_state(state)
        for i, value in ran.arguments.items():
            arguments[i].data.copy_(value)
        outcome = _outcome(shadow, told, ran)
        outcome.given = [(mine[n], from_places(were[n], *news)) for n, *news in ran.given]
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if job.ambient.grad and needing:
            inputs = _numbers(job.inputs[index], arguments)
            made_by = shadow.name, shadow.recipe, shadow.source_modules, shadow.look
            outcome.remote = Call(number, desk, told, *made_by, run, met, arguments, needing, inputs)
            outcome.remote.spoilt = bool(ran.arguments or ran.given or ran.moved)
        remember_values(shadow.source_modules[0], [told.table[number] for number in ran.written])
        return outcome

    def reach(self, span: Span, index: int, outputs: Sequence[Tensor]) -> Reach:
        call: Call | None = span.sides[index].remote
        if call is None:
            return super().reach(span, index, outputs)
        numbers = [call.outputs[id(output)] for output in outputs]
        return self._with_worker(index, lambda desk: desk.reach(call.number, numbers, call.at(desk), call.met))

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
        given, sources = call.written()
        back = Back(
            {call.outputs[id(o)]: g for o, g in zip(part.outputs, part.gradients, strict=True)},
            part.keep,
            part.crossings,
            given,
            sources,
            host.number,
            [],
        )
        met = Met(part.room)

        def ask(desk: Desk) -> WentBack:
            part.room.stacks[part.index] = desk.worker.stack
            back.spent = call.at(desk)
            back.wanted = [number for number in map(call.number_of, side.leaves) if number is not None]
            return desk.run_back(call.number, back, met)

        went = self._with_worker(part.index, ask)
        if not part.keep:
            call.spent.append(part.crossings)
        if went.drawn:
            host.drawn = True
            host.seed(0)
        slots = call.told.slots
        for leaf in side.leaves:
            number = call.number_of(leaf)
            leaf.grad = slots[number] if number in went.present else went.others.get(-1 if number is None else number)
        for leaf, number in zip(side.inputs, call.inputs, strict=True):
            leaf.grad = went.inputs.get(number)

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
        self._hands = Hands(self._devices)


def _desk(worker: Worker) -> Desk:
    if worker not in _desks:
        _desks[worker] = Desk(worker)
    return _desks[worker]


def _generators(run: Run, shadow: Shadow, held: Held) -> list[torch.Generator]:
    """Note in an order the generators among its arguments; those of the caller that some of them stand for."""
    of_module = {id(made) for _, made in shadow.cloner.generators}
    given = [pair for pair in held if id(pair[1]) not in of_module]
    own = {id(made) for _, made in given}
    loose = {id(g): g for g in generators_in([*run.args, *run.kwargs.values()]) if id(g) not in own}
    if any(key in of_module for key in loose):
        raise EngineError(
            "a torch.Generator that the module holds is an argument too, and would be two in a worker process.\n"
            "Pass another one, or write engine='threads'."
        )
    run.own = [(source.get_state(), made) for source, made in given]
    run.lone = list(loose.values())
    return [source for source, _ in given]


def _numbers(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The numbers of some tensors among the arguments that were sent."""
    places = {id(tensor): number for number, tensor in enumerate(arguments)}
    if any(id(tensor) not in places for tensor in tensors):
        raise EngineError(
            "an argument that needs a gradient is no dense tensor, and its gradient cannot come back from another "
            "process.\nUse DataParallel(..., engine='threads')."
        )
    return [places[id(tensor)] for tensor in tensors]


def _rebuild(arguments: Sequence[Tensor], counterparts: Sequence[Tensor]) -> Rebuild:
    """The tensors of an answer: arguments and tensors of the module as they are here, the others as they were sent."""

    def rebuild(tag: Tag, tensor: Tensor | None) -> Tensor:
        if tag[0] == ARGUMENT:
            return arguments[tag[1]]
        if tag[0] == SOURCE:
            return counterparts[tag[1]]
        return as_sent(tag, tensor)

    return rebuild


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
        cudnn=(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        threads=torch.get_num_threads(),
        saved_hooks=ambient.saved_hooks,
    )


def _outcome(shadow: Shadow, told: Told, ran: Ran) -> Outcome:
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
    containers = shadow.cloner.containers if ran.contents else ()
    made = {str(shadow.places.get(id(source))): made for source, _, made in containers}
    for place, keys, items in ran.contents:
        container = made[place]
        before = contents_of(container)
        after = from_places(before, keys, items)
        if len(after.items) != len(before.items) or not all(map(is_, after.items, before.items)) or keys != before.keys:
            contents.append(Inside(container, before, after))
            put(container, after)
    with torch.no_grad():
        for source, held in shadow.trainable:
            if told.numbers.get(id(source)) in ran.apart:
                held.data.copy_(ran.apart[told.numbers[id(source)]])
    written = shadow.write({id(told.table[number]): value for number, value in ran.written.items()})
    refused = [told.table[number] for number in ran.refused]
    shadow.stale = shadow.stale or bool(refused)
    return Outcome(output=ran.output, changes=Changes(False, attributes, contents), written=written, refused=refused)
