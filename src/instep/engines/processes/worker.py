"""A worker: one replica of each module that it was told of, run when it is asked to be."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instep.bridge import Side, enter, take
from instep.devices import move
from instep.engines.processes import orders
from instep.engines.processes.berth import take_device, try_to_open
from instep.engines.processes.boot import take_place
from instep.engines.processes.cores import Elsewhere, watch_for
from instep.engines.processes.draws import Draws
from instep.engines.processes.freight import pack_error
from instep.engines.processes.hall import Hall, Mail
from instep.engines.processes.hold import Hold
from instep.engines.processes.made import outputs_of, refuse_graphs, used_by
from instep.engines.processes.member import Member
from instep.engines.processes.mirror import Mirror
from instep.engines.processes.orders import Back, Ran, Run, WentBack
from instep.engines.processes.reducers import has_plain_memory
from instep.engines.processes.scenery import Scenery, set_anomaly_mode
from instep.engines.processes.shore import Shore, wait_for
from instep.engines.processes.strangers import Strangers
from instep.engines.processes.talk import ARGUMENT, SOURCE, Tag, Talk, as_sent, by_value
from instep.engines.processes.troubles import Troubles
from instep.engines.processes.wire import Line, Message
from instep.engines.protocol import Job, perform
from instep.engines.side_by_side import in_room
from instep.engines.tasks import as_replica
from instep.pieces import is_jagged, refuse_lost
from instep.random import Streams, threads_can_draw
from instep.reaching import reach
from instep.replicas.ambient import Casts
from instep.replicas.handed import Noted
from instep.replicas.replica import Outcome
from instep.replicas.tensors import refuse_strays
from instep.structure.tree import tensors_in

DROPPED = 8
"""Modules that are forgotten before what is left of them is looked for."""


def main(line: Line) -> None:
    """Do what the process that started this one asks for, until it says stop."""
    mail = Mail(line)
    worker = Worker(Talk(line, home=False), mail)
    line.elsewhere = Elsewhere()
    threads_can_draw()
    gc.freeze()  # what was imported stays: no collection need walk through it
    with as_replica():
        while (message := mail.next()) is not None and message.kind != orders.STOP:
            worker.answer(message)
            worker.look_ahead()


@dataclass
class Held:
    """A call whose graph is kept until it is released."""

    mirror: Mirror
    side: Side
    inputs: list[int]
    """The numbers of the arguments that a gradient is wanted for."""
    outputs: dict[int, Tensor]
    """By their numbers: tensors of the output that need a gradient."""
    arguments: list[Tensor]
    counterparts: list[Tensor]
    """What the replica had for each tensor of the module."""
    streams: Streams
    index: int


class Worker:
    """Everything that a worker has: modules, and calls whose graphs are still needed."""

    def __init__(self, talk: Talk, mail: Mail) -> None:
        self._talk, self._mail = talk, mail
        self._mirrors: dict[int, Mirror] = {}
        self._tables: dict[int, Mirror] = {}
        self._calls: dict[int, Held] = {}
        self._dropped = 0
        self._scenery = Scenery()
        self._troubles, self._strangers = Troubles(), Strangers()
        self._last: Mirror | None = None
        """The module of the last message, if that was a call: what the next one begins with was done for it already."""
        self._member = Member(talk, self._mirrors)
        self._answers: dict[str, Callable[[Message], None]] = {
            orders.DEVICE: self._take_device,
            orders.PLACE: self._take_place,
            orders.TABLE: self._take_table,
            orders.MODULE: self._take_module,
            orders.SET: self._take_sets,
            orders.GLOBALS: self._take_globals,
            orders.FORWARD: self._forward,
            orders.BACKWARD: self._backward,
            orders.REACH: self._reach,
            orders.MET: lambda _: None,  # in a call that was given up, and has ended since
            **self._member.answers,
        }

    def answer(self, message: Message) -> None:
        """Do what one message asks for; whatever fails is the answer to it."""
        if message.kind != orders.FORWARD:
            self._look_again()
        try:
            self._answers[message.kind](message)
        except BaseException as error:
            self._look_again()
            if message.kind in orders.ANSWERED:
                self._fail(message.call, error)
            else:  # nobody waits for an answer to these: the next call gets it
                self._troubles.note(message.call, error)

    def _fail(self, call: int, error: BaseException) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # others may share the device
        parcel = pack_error(error, self._talk.depot)
        self._talk.line.send(orders.FAILED, call, parcel.body, [t.detach().cpu() for t in parcel.tensors])

    def _take_device(self, message: Message) -> None:
        order, _ = self._talk.take(message)
        take_device(order)
        self._talk.line.shore = Shore(order.device)
        refusal = None if order.handle is None else try_to_open(order)
        if order.handle is not None and refusal is None:
            self._talk.hold = Hold(order.device, home=False)
        self._talk.say(orders.DONE, message.call, refusal)

    def _take_place(self, message: Message) -> None:
        place, _ = self._talk.take(message)
        take_place(*place)

    def _take_table(self, message: Message) -> None:
        self._troubles.forget([message.call])
        table, _ = self._talk.take(message)
        self._tables[table.number] = Mirror(table, message.fds)

    def _take_module(self, message: Message) -> None:
        number = message.call
        mirror = self._tables.pop(number)
        order, _ = self._talk.take(message, mirror.known)
        mirror.settle(order)
        self._note_strangers(mirror.tensors)
        before, self._mirrors[number] = self._mirrors.get(number), mirror
        closed = before is not None and not before.opened <= mirror.opened
        modules, before = int(before is not None), None
        self._clear_away(modules, closed)

    def _take_sets(self, message: Message) -> None:
        sets, _ = self._talk.take(message)
        self._mirrors[message.call].set(sets)
        self._note_strangers(self._mirrors[message.call].tensors)

    def _take_globals(self, message: Message) -> None:
        self._talk.depot.take_globals(message.body, message.tensors)
        self._note_strangers(())

    def _note_strangers(self, own: Sequence[Tensor]) -> None:
        depot = self._talk.depot
        if depot.needing:
            self._strangers.meet(depot.needing, own, [*(held for _, held in depot.spaces.received()), *depot.enclosed])
        depot.needing, depot.enclosed = [], []

    def _release(self, calls: Sequence[int], numbers: Sequence[int]) -> None:
        for call in calls:
            self._calls.pop(call, None)
        self._member.forget(calls)
        if not numbers:
            return
        self._troubles.forget(numbers)
        gone = [self._mirrors.pop(number) for number in numbers if number in self._mirrors]
        opened = any(mirror.opened for mirror in gone)
        del gone
        self._clear_away(len(numbers), opened)

    def _clear_away(self, modules: int, closed: bool) -> None:
        """Modules lead in circles to themselves, and to memory and descriptors with them: nobody else lets these go.

        The owner of device memory frees it when it has been closed here: that is not put off.
        """
        self._dropped += modules
        if closed or self._dropped >= DROPPED:
            self._dropped = 0
            gc.collect()

    def look_ahead(self) -> None:
        """After a call, whose answer is on its way: what the next one begins with, so that nobody waits for that."""
        if self._last is None:
            return
        try:
            self._last.crew.look_ahead()
        except Exception:  # then the next call says so
            self._look_again()

    def _look_again(self) -> None:
        if self._last is not None:
            self._last.crew.look_again()
            self._last = None

    def _forward(self, message: Message) -> None:
        try:
            run, arguments, leaves = self._take_run(message)
        except Exception as error:
            raise self._troubles.first() or error from None
        trouble = self._troubles.of(run.number)
        if trouble is not None:
            raise trouble
        mirror = self._mirrors[run.number]
        if mirror is not self._last:
            self._look_again()
        watch_for(run.count)
        if run.fetch:
            with torch.enable_grad():
                run.args = [move(value, mirror.device) for value in run.args]
                run.kwargs = {name: move(value, mirror.device) for name, value in run.kwargs.items()}
        self._release(*run.gone)
        ambient = self._scenery.set_up(run.around)
        replica = mirror.ready(run)
        draws = Draws(run, mirror)
        written = mirror.note_arguments(run.method, arguments)
        noted = Noted([*run.args, *run.kwargs.values()], run.given) if run.given else None
        job = Job(
            [replica] * run.count,
            [(run.args, run.kwargs)] * run.count,
            run.method,
            ambient,
            run.follow,
            draws.streams,
            run.sizes,
            room=Hall(self._talk, self._mail, message.call),
        )
        outcome = perform(job, run.index)
        if outcome.error is not None:
            mirror.crew.restore()
            raise outcome.error
        ran = self._report(mirror, outcome)
        ran.arguments = written()
        if noted is not None:
            ran.given = list(noted.changes())
            refuse_graphs(ran)
        if ran.arguments:
            # A view: the argument itself would be sent as a word for what the other process has already.
            ran.made = {i: arguments[i].view_as(arguments[i]) for i in ran.arguments if arguments[i].requires_grad}
        if ambient.grad and self._strangers:
            self._strangers.refuse(outputs_of(ran, outcome), self._talk.depot.spaces)
        if ambient.grad and leaves:
            ran.used = used_by(ran, leaves, outcome)
        draws.note(ran)
        outputs = self._say(message.call, run, ran, mirror, arguments, grad=ambient.grad)
        if outputs and ambient.grad:
            side = Side([], list(leaves.values()), [], replica.tensors.guard, replica.name, outcome.seat)
            self._calls[message.call] = Held(
                mirror, side, list(leaves), outputs, arguments, mirror.counterparts(), draws.streams, run.index
            )
        # After a backward, if there will be one: it may change the module.
        self._last = None if message.call in self._calls else mirror

    def _take_run(self, message: Message) -> tuple[Run, list[Tensor], dict[int, Tensor]]:
        """What a forward is asked for with: the order, the tensors of its arguments, and leaves for some of those."""
        leaves: dict[int, Tensor] = {}
        place = itertools.count()

        def let_in(tag: Tag, tensor: Tensor | None) -> Tensor:
            made, number = as_sent(tag, tensor), next(place)
            if made.requires_grad:
                leaves[number] = made
                with torch.enable_grad():
                    (made,) = enter(made)
            return made

        fields, arguments = self._talk.take(message, let_in)
        self._note_strangers(())
        return Run(*fields), arguments, leaves

    def _say(
        self, call: int, run: Run, ran: Ran, mirror: Mirror, arguments: Sequence[Tensor], *, grad: bool
    ) -> dict[int, Tensor]:
        """Answer what a forward came to; the tensors of the answer that need a gradient, by their numbers."""
        numbers = {id(tensor): i for i, tensor in enumerate(arguments)}
        if run.lent:  # state, which forward may write
            for tensor in tensors_in([part for _, _, part in run.lent]):
                numbers.pop(id(tensor), None)
        known = mirror.numbers()
        kept = [ran.sets, ran.contents]
        plain = type(ran.output) is Tensor and has_plain_memory(ran.output)  # as most are
        if grad and (any(kept) or not plain):
            refuse_lost(ran.output, kept, lambda t: has_plain_memory(t) or is_jagged(t) or id(t) in known)

        def describe(tensor: Tensor) -> Tag:
            if id(tensor) in numbers:
                return ARGUMENT, numbers[id(tensor)]
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else by_value(tensor)

        wait_for(mirror.device)
        sent = self._talk.say(orders.DONE, call, ran, describe, what="the output of forward")
        return {i: t for i, t in enumerate(sent) if t.requires_grad and id(t) not in known}

    def _report(self, mirror: Mirror, outcome: Outcome) -> Ran:
        """What a forward did, in terms that the other process knows."""
        crew = mirror.crew
        changed = crew.restore()
        if changed:
            crew.discard()
            return Ran(parted=[str(crew.shelf.places[id(container)]) for container in changed])
        if outcome.changes.structure:
            crew.discard()
            return Ran(structure=True)
        written = crew.written()
        ran = mirror.report(outcome)
        if written:  # on pages of its own, which no longer follow the module's
            numbers = mirror.numbers()
            ran.refused = [numbers[id(tensor)] for tensor in written]
            crew.discard()
        ran.output, ran.wrote = outcome.output, self._talk.depot.written_globals()
        crew.done()
        return ran

    def _backward(self, message: Message) -> None:
        fields, _ = self._talk.take(message)
        back = Back(*fields)
        held = self._calls[back.call]
        mirror, side = held.mirror, held.side
        for number in back.arguments:
            torch.autograd.graph.increment_version(held.arguments[number])
        counterparts = held.counterparts
        for number in back.sources:
            torch.autograd.graph.increment_version(counterparts[number])
        leaves = [counterparts[number] for number in back.wanted]
        outputs = [held.outputs[number] for number in back.gradients]
        grads = [gradient.to(held.outputs[number].device) for number, gradient in back.gradients.items()]
        for spent in back.spent:
            _spend(side, spent)
        tokens = [] if side.seat is None else side.seat.tokens
        outputs += [tokens[number] for number in back.tokens]
        grads += [torch.zeros_like(tokens[number]) for number in back.tokens]
        if not held.streams.state.host.drawn:
            held.streams.state.host.fix(back.seed)
        hall = Hall(self._talk, self._mail, message.call)
        streams, index = held.streams, held.index
        around = streams.backward(index) if mirror.device.type == "cpu" else streams.joint_backward(index)
        refuse_strays(leaves)
        mirror.take_in(() if back.hold else back.wanted)
        set_anomaly_mode(back.anomaly)
        try:
            with Casts(*back.casts).enter():
                in_room(hall, index, side, outputs, grads, back.keep, around)
        except BaseException:
            mirror.take_in(())
            take([*leaves, *side.inputs])
            raise
        held.streams.settle()
        gradients = dict(zip(back.wanted, take(leaves), strict=True))
        kept = self._member.keep(message.call, mirror, gradients) if back.hold else []
        present, others = mirror.hand_in(gradients)
        inputs = {n: g for n, g in zip(held.inputs, take(side.inputs), strict=True) if g is not None}
        went = WentBack(present, inputs, others, held.streams.state.host.drawn, kept)
        wait_for(mirror.device)
        self._talk.say(orders.DONE, message.call, went)
        if not back.keep:
            for number in back.gradients:
                del held.outputs[number]
            _spend(side, back.tokens)
        self._last = mirror

    def _reach(self, message: Message) -> None:
        """Where a backward from some outputs would meet the other replicas."""
        (call, numbers, spent), _ = self._talk.take(message)
        held = self._calls[call]
        for tokens in spent:
            _spend(held.side, tokens)
        tokens = [] if held.side.seat is None else held.side.seat.tokens
        self._talk.say(orders.DONE, message.call, reach(tokens, [held.outputs[number] for number in numbers]))


def _spend(side: Side, numbers: Sequence[int]) -> None:
    """A backward has used these tokens up."""
    if side.seat is not None:
        side.seat.tokens = [token for number, token in enumerate(side.seat.tokens) if number not in numbers]
