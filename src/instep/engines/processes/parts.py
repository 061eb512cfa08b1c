"""One replica's part of a forward and of a backward: what its worker is asked, and what is made of the answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from instep.engines.processes.ahead import Ahead, Late
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.berth import backends
from instep.engines.processes.call import Call, remember_values
from instep.engines.processes.cannot import refuse_shared
from instep.engines.processes.context import carried
from instep.engines.processes.desk import Desk
from instep.engines.processes.filters import IN_PIECES, warning_filters
from instep.engines.processes.freight import CannotCross
from instep.engines.processes.hearing import Hearing
from instep.engines.processes.met import Met
from instep.engines.processes.orders import Back, Output, Ran, Run, Surroundings, WentBack
from instep.engines.processes.scenery import anomaly_mode
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.shore import Passage
from instep.engines.processes.strangers import held, lost
from instep.engines.processes.talk import of_answer
from instep.engines.processes.told import Told
from instep.engines.processes.waiting import Box
from instep.engines.protocol import Job
from instep.engines.side_by_side import Part
from instep.errors import EngineError
from instep.random import Held, generators_in
from instep.replicas.ambient import Ambient
from instep.replicas.contents import contents_of, put
from instep.replicas.handed import Change, from_places, handed_to
from instep.replicas.memory import once_each
from instep.replicas.replica import Outcome
from instep.replicas.watch import MISSING, STRUCTURE, Changes, Inside, Set


class ForwardPart:
    """One replica's part of a forward."""

    def __init__(self, job: Job, index: int) -> None:
        shadow: Any = job.replicas[index]
        self._job, self._index = job, index
        self._shadow: Shadow = shadow
        shadow.unwrite()
        follow, shadow.behind = job.follow or shadow.behind, False
        lent, shadow.lent = shadow.lent, []
        args, kwargs = once_each(*job.arguments[index])
        random = job.streams.state
        method = str.__str__(job.method)  # an enum may be a text too, but goes no short way
        self._run = Run(
            *(shadow.number, method, args, index, list(job.sizes), len(job.replicas), follow),
            *(random.host.number, random.home.number),
            kwargs=kwargs,
            around=_surroundings(job.ambient, shadow),
            fetch=shadow.fetched,
            lent=lent,
            dice=job.dice,
        )
        self._mine = handed_to(args, kwargs, job.theirs)
        self._run.given = [one.steps for one in self._mine]
        self._were = [one.contents() for one in self._mine]
        self._run.in_turn = job.streams.in_turn
        self._generators = _generators(self._run, shadow, job.streams.held[index])
        self._met = Met(job.room, job.passage)
        self._told: Told
        self._box: Box
        self._arguments: list[Tensor]
        self._call: Call | None = None

    @property
    def near(self) -> bool:
        """Whether tensors may stay on a device that both processes work on."""
        return self._shadow.near

    def ask(self, desk: Desk) -> Box:
        job, run = self._job, self._run
        job.room.stacks[self._index] = desk.worker.stack
        told = self._told = desk.tell(self._shadow, run.method)
        sharing = job.passage.sharing
        run.ticket = 0 if sharing is None else sharing.ticket_for(desk, self._shadow.number, told)
        if not run.ticket:
            run.follow = run.follow or (told.new and told.image is not None)  # it may have looked there before
            told.renew(job.passage, run.follow)
        run.fresh = told.fresh() if run.follow else {}
        assert run.around is not None
        run.around.context = carried(job.ambient.context, desk.talk.depot)
        run.generators = {number: source.get_state() for number, source in enumerate(told.generators)}
        box, self._arguments = desk.ask_forward(run)
        self._box, self._call = box, None
        self._met.watch(partial(desk.has_failed, box))
        return box

    def meanwhile(self, desk: Desk) -> None:
        """After the first replica has run, and before anybody hears the answer: do what does not depend on that."""
        if self._job.ambient.grad:
            self._call = self._new_call(desk)

    def _new_call(self, desk: Desk) -> Call:
        shadow = self._shadow
        made_by = shadow.name, shadow.recipe, shadow.owned, shadow.source_modules, shadow.look
        return Call(self._box.number, desk, self._told, *made_by, self._run, self._met, self._arguments)

    def hear(self, desk: Desk) -> Hearing[tuple[Desk, Ran | Output, list[Tensor]]]:
        try:
            answer = yield from desk.hear(self._box, self._met)
        except Exception:
            desk.say_again(self._run)
            self._call = None  # the traceback leads here
            raise
        fields, tensors = desk.talk.take(answer, of_answer(self._arguments, self._told.counterparts))
        return desk, Ran(*fields) if len(fields) > 1 else Output(*fields), tensors

    def outcome(self, desk: Desk, ran: Ran | Output, tensors: list[Tensor]) -> Outcome:
        """What the worker did, on its stand-in."""
        job, shadow, told, run, arguments = self._job, self._shadow, self._told, self._run, self._arguments
        self._met.end()
        shadow.stale = shadow.stale or bool(run.lent)  # the worker's replica holds a part, not what the module has
        outcome = self._apply(desk, ran) if isinstance(ran, Ran) else Outcome(output=ran.output)
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if job.ambient.grad and needing:
            call = outcome.remote = self._call or self._new_call(desk)
            call.outputs, call.inputs = needing, _numbers(job.inputs[self._index], arguments)
            call.looked = {number: tensors[number]._version for number in needing.values()}
            if isinstance(ran, Ran):
                call.note()  # what was written just now is the call's own
                call.spoilt = bool(ran.arguments or ran.given or ran.moved)
        if isinstance(ran, Ran):
            remember_values(shadow.source_modules[0], [told.table[number] for number in ran.written])
        return outcome

    def _apply(self, desk: Desk, ran: Ran) -> Outcome:
        """Do here what the worker's replica did there, besides its output."""
        arguments = self._arguments
        if ran.wrote:
            desk.talk.depot.forget()
            raise CannotCross(
                f"forward changed the global {ran.wrote[0]!r} in a worker process, where the script does not see it.\n"
                f"Return what it is for, set it on the module, or write engine='threads'."
            )
        used = {id(arguments[i]) for i in ran.used}
        self._refuse_strangers(used)
        self._note_draws(ran)
        for i, value in ran.arguments.items():
            refuse_shared(arguments, i)
            arguments[i].data.copy_(value)
        outcome = _outcome(self._shadow, self._told, ran)
        outcome.made = {id(arguments[i]): tensor for i, tensor in ran.made.items()}
        outcome.used = used
        outcome.given = [
            Change(self._mine[n], self._were[n], from_places(self._were[n], *news)) for n, *news in ran.given
        ]
        return outcome

    def _refuse_strangers(self, used: Collection[int]) -> None:
        """Gradients are brought back for the caller's own arguments, and not for what these hold otherwise."""
        inputs = set(map(id, self._job.inputs[self._index])) if used else used
        for tensor in self._arguments:
            if id(tensor) in used and id(tensor) not in inputs:
                raise lost(held(tensor))

    def _note_draws(self, ran: Ran) -> None:
        """What was drawn from in the worker moves here."""
        random = self._job.streams.state
        if ran.drawn:
            random.host.drawn = True
            random.host.seed(0)
        if ran.drawn_home:
            random.home.drawn = True
            random.home.seed(0)
        random.host.elsewhere = random.host.elsewhere or ran.by_name
        held = [self._told.generators[i] for i in ran.drawn_held]
        for source in (*held, *(self._generators[i] for i in ran.drawn_own)):
            random.add(source).drawn = True
        for i, state in ran.moved.items():
            self._run.lone[i].set_state(state)


class BackwardPart:
    """One replica's part of a backward."""

    def __init__(self, call: Call, part: Part, passage: Passage) -> None:
        self._call, self._part, self._passage = call, part, passage
        self._side, self._host = part.span.sides[part.index], part.span.streams.state.host
        given, sources = call.written()
        self._back = Back(
            call.number,
            {call.outputs[id(o)]: g for o, g in zip(part.outputs, part.gradients, strict=True)},
            self._host.number,
            keep=part.keep,
            tokens=part.crossings,
            arguments=given,
            sources=sources,
            casts=part.casts if part.casts.enabled else (),
            anomaly=anomaly_mode(),
        )
        room: Any = part.room
        self._met = Met(room, passage)
        self._box: Box | None = None
        self._numbers: list[int | None] = []
        """What the worker knows the leaves by."""
        self.held: list[int] = []
        """The numbers of tensors whose gradients the worker has kept."""

    def ask(self, desk: Desk) -> Box:
        self.desk = desk
        call, back, part = self._call, self._back, self._part
        part.room.stacks[part.index] = desk.worker.stack
        back.spent = call.at(desk, part.outputs)
        self._numbers = call.numbers_of(self._side.leaves)
        back.wanted = [number for number in self._numbers if number is not None]
        back.call = call.number
        self._box = desk.ask_backward(back, call.told.bell)
        self._met.watch(partial(desk.has_failed, self._box))
        return self._box

    def expect(self, ahead: Ahead) -> None:
        """Let gradients be added that lie in slots before the worker answers, if it could be asked."""
        if self._box is not None:
            ahead.expect(self._part.index, self._call, self._box.number, self._box.has_any)

    def hear(self, desk: Desk) -> Hearing[WentBack]:
        assert self._box is not None
        fields, _ = desk.talk.take((yield from desk.hear(self._box, self._met)))
        if self._call.told.bell is not None:
            self._call.told.bell.end()
        return WentBack(*fields)

    @property
    def number(self) -> int:
        """What the worker knows this backward by."""
        assert self._box is not None
        return self._box.number

    def keep(self, hold: bool) -> None:
        """Say whether the worker is to keep the gradients, until they are asked for."""
        self._back.hold = hold

    def take_back(self) -> None:
        """What the worker did is lost, and is to be done again."""
        if not self._part.keep:
            self._call.spent.pop()

    def leaf(self, place: int) -> Tensor:
        """What stands here for a tensor that gradients are wanted of."""
        return self._side.leaves[place]

    def bring(self, place: int, gradient: Tensor | None) -> None:
        """Leave the gradient of one that the worker had kept."""
        assert self._side.brought is not None
        self._side.brought[place] = gradient

    @property
    def near(self) -> bool:
        """Whether tensors may stay on a device that both processes work on."""
        return self._call.told.near

    def forget(self) -> None:
        """Nobody will ask the worker for what it has kept."""
        if self._back.hold and self._box is not None:
            self.desk.gone.append(("call", self.number))

    def kept(self) -> dict[int, int]:
        """By the place of a leaf: the number of its gradient, where the worker has kept that."""
        numbers = enumerate(self._numbers)
        held = set(self.held)
        return {place: number for place, number in numbers if number is not None and number in held}

    def add(self, went: WentBack) -> None:
        """Leave gradients that were kept before."""
        slots = self._slots(went.present)
        for place, number in self.kept().items():
            more = _near(self.leaf(place), went.others.get(number))
            self.bring(place, slots.get(number, more))

    def _slots(self, present: Sequence[int]) -> dict[int, Tensor]:
        """What the worker has left in its slots, by the numbers of tensors."""
        told = self._call.told
        slots = told.gradients(present)
        if isinstance(told.memory, SharedMemory):  # else they stay where they lie
            self._passage.hand_over(slots.values())
        return slots

    def leave(self, went: WentBack, late: list[Late]) -> None:
        """Leave the gradients at the stand-in's side of the bridge; what came late goes to a list."""
        self.held = went.held
        call, side, host = self._call, self._side, self._host
        if not self._part.keep:
            call.spent.append(self._part.crossings)
        if went.drawn:
            host.drawn = True
            host.seed(0)
        slots = self._slots(went.present)
        brought = [None if number is None else slots.get(number) for number in self._numbers]
        for place, number in enumerate(self._numbers if went.others else ()):
            more = None if number is None else went.others.get(number)
            if brought[place] is None:
                brought[place] = _near(side.leaves[place], more)
            elif more is not None:
                late.append(Late(self._part.index, place, more))
        side.brought = brought
        for leaf, number in zip(side.inputs, call.inputs, strict=True):
            leaf.grad = _near(leaf, went.inputs.get(number))


def _generators(run: Run, shadow: Shadow, held: Held) -> list[torch.Generator]:
    """Note in an order the generators among its arguments; those of the caller that some of them stand for."""
    if not held and all(type(value) is Tensor for value in (*run.args, *run.kwargs.values())):
        return []
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


def _near(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient on the device of its leaf."""
    return None if gradient is None else gradient.to(leaf.device)


def _surroundings(ambient: Ambient, shadow: Shadow) -> Surroundings:
    return Surroundings(
        grad=ambient.grad,
        inference=ambient.inference,
        autocast=[(cast.device_type, cast.dtype) for cast in ambient.autocast],
        autocast_cache=ambient.autocast_cache,
        device=shadow.place if ambient.device == shadow.home else ambient.device,
        dtype=torch.get_default_dtype(),
        deterministic=torch.get_deterministic_debug_mode(),
        precision=torch.get_float32_matmul_precision(),
        cudnn=(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        threads=torch.get_num_threads(),
        saved_hooks=ambient.saved_hooks,
        backends={} if shadow.place.type == "cpu" else backends(),
        anomaly=anomaly_mode(),
        filters=(IN_PIECES, *warning_filters()) if shadow.home.type != shadow.place.type else warning_filters(),
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
        if isinstance(value, torch.device) and value == shadow.place:
            value = shadow.device
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
        for source, held in shadow.trainable if ran.apart else ():
            if told.numbers.get(id(source)) in ran.apart:
                held.data.copy_(ran.apart[told.numbers[id(source)]])
    written = shadow.write({id(told.table[number]): value for number, value in ran.written.items()})
    refused = [told.table[number] for number in ran.refused]
    shadow.stale = shadow.stale or bool(refused)
    return Outcome(output=ran.output, changes=Changes(False, attributes, contents), written=written, refused=refused)
