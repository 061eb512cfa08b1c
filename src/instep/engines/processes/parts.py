"""One replica's part of a forward and of a backward: what its worker is asked, and what is made of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from instep.engines.processes.call import Call, remember_values
from instep.engines.processes.desk import Box, Desk, Met, Told
from instep.engines.processes.freight import CannotCross
from instep.engines.processes.orders import Back, Ran, Run, Surroundings, WentBack
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.talk import ARGUMENT, SOURCE, Rebuild, Tag, as_sent
from instep.engines.processes.wire import Message
from instep.engines.protocol import Job
from instep.engines.side_by_side import Part
from instep.errors import EngineError
from instep.replicas.ambient import Ambient
from instep.replicas.contents import Contents, contents_of, put
from instep.replicas.replica import Outcome
from instep.replicas.watch import MISSING, STRUCTURE, Changes, Inside, Set


class ForwardPart:
    """One replica's part of a forward."""

    def __init__(self, job: Job, index: int) -> None:
        shadow: Any = job.replicas[index]
        self._job, self._index = job, index
        self._shadow: Shadow = shadow
        self._held = job.streams.held[index]
        shadow.unwrite()
        follow, shadow.behind = job.follow or shadow.behind, False
        lent, shadow.lent = shadow.lent, []
        args, kwargs = job.arguments[index]
        self._run = Run(
            shadow.number,
            job.method,
            args,
            kwargs,
            index,
            list(job.sizes),
            len(job.replicas),
            _surroundings(job.ambient),
            follow,
            job.streams.state.host.number,
            [source.get_state() for source, _ in self._held],
            lent,
            {},
        )
        self._met = Met(job.room)
        self._told: Told
        self._box: Box
        self._arguments: list[Tensor]

    def ask(self, desk: Desk) -> None:
        run = self._run
        self._told = desk.tell(self._shadow)
        run.fresh = self._told.fresh() if run.follow else {}
        self._box, self._arguments = desk.ask_forward(run)

    def hear(self, desk: Desk) -> tuple[Desk, Message]:
        return desk, desk.answer(self._box, self._met)

    def outcome(self, desk: Desk, answer: Message) -> Outcome:
        """What the worker did, on its stand-in."""
        job, shadow, told, arguments = self._job, self._shadow, self._told, self._arguments
        host, held = job.streams.state.host, self._held
        self._met.end()
        shadow.stale = shadow.stale or bool(self._run.lent)  # the worker has a part, not the whole
        fields, tensors = desk.talk.take(answer, _rebuild(arguments, told.counterparts))
        ran = Ran(*fields)
        if ran.wrote:
            desk.talk.depot.forget()
            raise CannotCross(
                f"forward changed the global {ran.wrote[0]!r} in a worker process, where the script does not see it.\n"
                f"Return what it is for, set it on the module, or write engine='threads'."
            )
        if ran.drawn:
            host.drawn = True
            host.seed(0)
        for i in ran.drawn_held:
            job.streams.state.add(held[i][0]).drawn = True
        for i, value in ran.arguments.items():
            arguments[i].data.copy_(value)
        outcome = _outcome(shadow, told, ran)
        needing = {id(t): i for i, t in enumerate(tensors) if t.requires_grad}
        if job.ambient.grad and needing:
            inputs = _numbers(job.inputs[self._index], arguments)
            made_by = shadow.name, shadow.recipe, shadow.source_modules, shadow.look
            outcome.remote = Call(
                self._box.number, desk, told, *made_by, self._run, self._met, arguments, needing, inputs
            )
        remember_values(shadow.source_modules[0], [told.table[number] for number in ran.written])
        return outcome


class BackwardPart:
    """One replica's part of a backward."""

    def __init__(self, call: Call, part: Part) -> None:
        self._call, self._part = call, part
        self._side, self._host = part.span.sides[part.index], part.span.streams.state.host
        given, sources = call.written()
        self._back = Back(
            call.number,
            {call.outputs[id(o)]: g for o, g in zip(part.outputs, part.gradients, strict=True)},
            part.keep,
            part.crossings,
            given,
            sources,
            self._host.number,
            [],
        )
        self._met = Met(part.room)
        self._box: Box

    def ask(self, desk: Desk) -> None:
        call, back = self._call, self._back
        if desk is not call.desk:
            call.again(desk)
        back.wanted = [number for number in map(call.number_of, self._side.leaves) if number is not None]
        back.call = call.number
        self._box = desk.ask_backward(back)

    def hear(self, desk: Desk) -> WentBack:
        fields, _ = desk.talk.take(desk.answer(self._box, self._met))
        return WentBack(*fields)

    def leave(self, went: WentBack) -> None:
        """Leave the gradients on the stand-in's leaves and inputs."""
        call, side, host = self._call, self._side, self._host
        if went.drawn:
            host.drawn = True
            host.seed(0)
        slots = call.told.slots
        for leaf in side.leaves:
            number = call.number_of(leaf)
            leaf.grad = slots[number] if number in went.present else went.others.get(-1 if number is None else number)
        for leaf, number in zip(side.inputs, call.inputs, strict=True):
            leaf.grad = went.inputs.get(number)


def _numbers(tensors: Sequence[Tensor], arguments: Sequence[Tensor]) -> list[int]:
    """The numbers of some tensors among the arguments that were sent."""
    places = {id(tensor): number for number, tensor in enumerate(arguments)}
    if any(id(tensor) not in places for tensor in tensors):
        raise EngineError(
            "an argument that needs a gradient is no dense tensor, and its gradient cannot come back from another "
            "process.\nUse DataParallel(..., engine='threads')."
        )
    return [places[id(tensor)] for tensor in tensors]


ATOMS = (str, bytes, int, float, bool, type(None))


def _own(item: Any, own: Mapping[Any, Any]) -> Any:
    """The very object that is here already, for one of those that nobody tells apart but by identity."""
    return own.get((type(item), item), item) if isinstance(item, ATOMS) else item


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
        threads=torch.get_num_threads(),
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
        own = {(type(item), item): item for item in before.items if isinstance(item, ATOMS)}
        after = Contents(keys, tuple(before.items[old] if old >= 0 else _own(item, own) for old, item in items))
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
