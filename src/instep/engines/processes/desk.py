"""This process's side of one worker: what it has been told, and how it is asked."""

from __future__ import annotations

import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from instep.engines.processes import orders
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.bell import Bell, board_bytes, new_bell, stretches
from instep.engines.processes.berth import berth
from instep.engines.processes.boot import import_path, imported_from
from instep.engines.processes.constants import Constants
from instep.engines.processes.driver import DeviceMemory, Refused
from instep.engines.processes.entries import Entries
from instep.engines.processes.estate import layout
from instep.engines.processes.freight import Parcel, unpack_error
from instep.engines.processes.hands import Worker
from instep.engines.processes.hearing import TOLD, Hearing, hear_out, wrapped
from instep.engines.processes.hold import Hold, allocate
from instep.engines.processes.met import Met, refusal
from instep.engines.processes.mirror import slot_of
from instep.engines.processes.orders import Back, Berth, NewModule, NewValues, Run, Surroundings, Table
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.talk import SOURCE, Tag, Talk, by_value
from instep.engines.processes.told import Told
from instep.engines.processes.waiting import GLANCE, PASSED_ON, Box, Wait, place_of_script
from instep.engines.processes.wire import Garbled, Gone, Message
from instep.errors import EngineError
from instep.meeting import PeerFailed
from instep.replicas.names import module_names

calls = itertools.count(1)
NOBODY = refusal("the call was given up.")
"""What comes of a meeting in a call whose answer nobody waits for."""


class Desk:
    """What one worker knows, and the conversation with it.

    Several threads may ask it at a time. One of them listens for all; each message finds its question by its number.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.talk = Talk(worker.line, home=True)
        self.busy = threading.RLock()
        """Held by whoever speaks or listens."""
        self._boxes: weakref.WeakValueDictionary[int, Box] = weakref.WeakValueDictionary()
        """Of questions that have no answer yet."""
        self._settled = False
        self.sharing: str | None = None
        """Why tensors cannot stay on the device that both sides work on; empty if they can, None before it is known."""
        self._kept: dict[int, list[DeviceMemory]] = {}
        """By the number of a stand-in: memory that the worker has opened."""
        self._leaving: list[DeviceMemory] = []
        """The same, of stand-ins that it was told to forget."""
        self._place: Any = None
        """The folder, the import path, the environment and the number of modules when the worker was told of them."""
        self.timeout = math.inf
        """Seconds without a word from the worker, after which it is given up."""
        self._around: Surroundings | None = None
        """Those of the last forward."""
        self.newest = 0
        """The number of the last question."""
        self._heard = 0
        """The number of what the worker was last heard to work on."""
        self.failed = 0
        """The id of the error that was heard last."""
        self.gone: deque[tuple[str, int]] = deque()
        """Calls and stand-ins that nobody needs any longer; finalizers only put them here."""

    def settle(self, device: torch.device, near: bool) -> None:
        """Have the worker take its device, the first time that it is asked for something.

        If its tensors are `near`, on the very device that the caller's are on, see whether they can cross without
        leaving it.
        """
        if device.type == "cpu":
            return
        if not self._settled:
            self._take_device(berth(device))
            self._settled = True
        near = near and not self.sharing
        if near and self.sharing is None:
            try:
                trial = allocate(1, device)
                refusal = self._take_device(berth(device, trial.handle))
            except Refused as refused:
                refusal = str(refused)
            self.sharing = refusal or ""
            self.talk.hold = None if refusal else Hold(device, home=True)
        if self.talk.hold is not None:
            self.talk.hold.near = near

    def stop_sharing(self, why: str) -> None:
        """From now on tensors leave the device to cross."""
        self.sharing = why

    def _take_device(self, order: Berth) -> str | None:
        """Why the worker cannot open memory of its device that it was given a handle of; None if it can."""
        box = self._box()
        self.talk.say(orders.DEVICE, box.number, order)
        refusal, _ = self.talk.take(self.answer(box, None))
        return None if refusal is None else str(refusal)

    @property
    def near(self) -> bool:
        """Whether tensors of the call at hand stay on the device that both sides work on."""
        return self.talk.hold is not None and self.talk.hold.near

    def tell(self, shadow: Shadow, method: str) -> Told:
        """Tell the worker what it does not know yet of a module, of which it is to run a method."""
        place = place_of_script()
        if place != self._place:
            folder, path, variables, modules = place
            self._place = folder, list(path), dict(variables), modules
            said = folder, import_path(path, folder), imported_from(path, folder), dict(os.environ)
            self.talk.say(orders.PLACE, 0, said)
        self._tell_globals()
        told: Told | None = shadow.told.get(self)
        if told is None:
            weakref.finalize(shadow, self.gone.append, ("module", shadow.number))
        if told is None or shadow.stale or told.opened != self.near or told.moved():
            told = shadow.told[self] = self._tell_module(shadow)
        elif shadow.sets:
            self._tell_sets(shadow, told)
        shadow.stale, shadow.sets = False, []
        told.constants.check(method)
        return told

    def _tell_sets(self, shadow: Shadow, told: Told) -> None:
        """Tell the worker of attributes that were set, and of nothing else."""
        known = set(map(id, told.generators))
        more = [source for source, _ in shadow.cloner.generators if id(source) not in known]
        modules = shadow.source_modules
        names = module_names(modules[0], modules)
        values: dict[str, Any] = {}
        for change in shadow.sets:
            prefix = names[change.module]
            name = f"{prefix}.{change.name}" if prefix else change.name
            values[f"{name} ({len(values)})" if name in values else name] = change.new
        news: Any = NewValues([(change.module, change.name) for change in shadow.sets], values, more)
        self.talk.say(orders.SET, shadow.number, news)
        told.generators += more

    def _tell_globals(self) -> None:
        """Tell the worker what changed of the script's globals that it reads."""
        update = self.talk.depot.stale_globals()
        if update is not None:
            try:
                self.worker.line.send(orders.GLOBALS, 0, update.body, [tensor.detach() for tensor in update.tensors])
            except BaseException:
                self.talk.depot.forget()  # nobody has what was packed
                raise

    def _gone(self) -> tuple[list[int], list[int]]:
        """Calls and modules that the worker may forget."""
        ended: list[int] = []
        modules: list[int] = []
        while self.gone:
            kind, number = self.gone.popleft()
            (ended if kind == "call" else modules).append(number)
        self._leaving += [memory for number in modules for memory in self._kept.pop(number, [])]
        return ended, modules

    def _tell_module(self, shadow: Shadow) -> Told:
        pairs = [*shadow.tensors.trainable, *shadow.tensors.state]
        tensors = [source for source, _ in pairs]
        listed = Entries(tensors, shadow, self.near)
        blocks = listed.blocks
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.numel()]
        offsets, total = layout([tensors[n].numel() * tensors[n].element_size() for n in wanted])
        cut = stretches((n, tensors[n]) for n in wanted) if shadow.home.type == shadow.place.type == "cpu" else []
        total += board_bytes(cut)
        if shadow.slots is None or shadow.slots.nbytes != total or isinstance(shadow.slots, DeviceMemory) != self.near:
            shadow.slots = self._new_slots(total, shadow.place)
        places = list(zip(wanted, offsets, strict=True))
        known_blocks = [(number, memory.nbytes) for number, memory in blocks.items()]
        order: Any = Table(shadow.number, shadow.place, listed.entries, listed.sent, known_blocks, (total, places))
        order.handles = [(number, memory.nbytes, memory.handle) for number, memory in listed.opened.items()]
        self._leaving += self._kept.get(shadow.number, [])
        self._kept[shadow.number] = list(listed.opened.values())
        fds = [memory.fd for memory in blocks.values()]
        bell = None
        if isinstance(shadow.slots, SharedMemory):
            if cut:
                bell, order.bell = new_bell(shadow.slots, cut), True
                fds.append(bell.fd)
            fds.append(shadow.slots.fd)
        else:
            order.slots_handle = shadow.slots.handle
            self._kept[shadow.number].append(shadow.slots)
        self.talk.say(orders.TABLE, shadow.number, order, fds=fds)
        known = {id(tensor): number for number, tensor in enumerate(tensors)}

        def describe(tensor: Tensor) -> Tag:
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else by_value(tensor.detach())

        source, _ = shadow.cloner.modules[0]
        generators = [held for held, _ in shadow.cloner.generators]
        order = NewModule(shadow.number, source, shadow.home, shadow.synchronised, shadow.owned, generators)
        self.talk.say(orders.MODULE, shadow.number, order, describe, what="the module")
        variables = self.talk.depot.variables
        slots = {number: slot_of(shadow.slots, offset, tensors[number]) for number, offset in places}
        table = [source if source.is_leaf else made for source, made in pairs]  # graphs lead to earlier calls
        made = [made for _, made in pairs]
        memory, at, near = shadow.slots, dict(places), shadow.near
        image, loose = listed.image, listed.loose
        told = Told(table, made, slots, loose, memory, at, image, near, self.near, generators, variables, bell)
        told.pulled, told.constants = listed.pulled, Constants(shadow.source_modules)
        return told

    def _new_slots(self, nbytes: int, device: torch.device) -> SharedMemory | DeviceMemory:
        """Memory for gradients: of the device, where both sides work on it and it has some to give."""
        if self.near:
            try:
                return allocate(nbytes, device)
            except Refused:
                pass
        return SharedMemory.create(nbytes, "the memory for the gradients of a replica")

    def ask_forward(self, run: Run) -> tuple[Box, list[Tensor]]:
        """Ask for one replica's part of a forward; returns the tensors of its arguments too, as they are numbered."""
        box, around = self._box(), run.around
        run.gone = self._gone()
        if around is None or around.context or around.saved_hooks is not None:
            self._around = None  # values of the user's are sent again, and not compared
        elif around == self._around and len(self._boxes) == 1:  # another call may fail before it has set them up
            run.around = None
        try:
            tensors = self.talk.say(orders.FORWARD, box.number, run, what="arguments")
        except BaseException:
            self.say_again(run)
            raise
        finally:
            run.around = around
        self._around = around
        return box, tensors

    def say_again(self, run: Run) -> None:
        """What a worker was to forget with a forward that failed goes with the next: it may not have heard it."""
        self.gone.extend([*(("call", n) for n in run.gone[0]), *(("module", n) for n in run.gone[1])])

    def ask_backward(self, back: Back, bell: Bell | None = None) -> Box:
        """Ask for one replica's part of a backward, which sees the globals as they are by then."""
        self._tell_globals()
        box = self._box()
        if bell is not None:
            bell.listen(box.number, self._heard)
        self.talk.say(orders.BACKWARD, box.number, back)
        return box

    def ask_reach(self, call: int, outputs: list[int], spent: list[list[int]]) -> Box:
        """Ask where a backward from some outputs of a call, by their numbers, would meet the other replicas."""
        box = self._box()
        self.talk.say(orders.REACH, box.number, (call, outputs, spent))
        return box

    def ask(self, kind: str, value: Any, fds: Sequence[int] = ()) -> Box:
        """Ask for something that has no way of its own."""
        with self.busy:
            box = self._box()
            self.talk.say(kind, box.number, value, fds=fds)
        return box

    def _box(self) -> Box:
        box = Box(next(calls))
        self._boxes[box.number] = box
        self.newest = box.number
        return box

    def has_failed(self, box: Box) -> bool:
        """Whether the answer to a question is there, and says that it failed."""
        try:
            message = self._listen(box, 0) if orders.FAILED not in box.kinds else None
        except Gone:  # whoever hears it sees to that
            return False
        if message is not None:
            box.put(message)
        return orders.FAILED in box.kinds

    def _listen(self, box: Box, seconds: float = GLANCE) -> Message | None:
        """The next message for a box, if one comes soon; what comes for others is put into theirs."""
        if not self.busy.acquire(blocking=False):  # another thread listens, or asks
            return box.wait(min(seconds, PASSED_ON))
        try:
            message = box.wait(0)
            if message is None:
                message = self._receive(seconds)
            if message is not None:
                self._heard = max(self._heard, message.call)
            if message is None or message.call == box.number:
                return message
            other = self._boxes.get(message.call)
            if other is not None:
                other.put(message)
            elif message.kind == orders.MEET:
                self.talk.say_sheet(orders.MET, message.call, NOBODY)
            return None
        finally:
            self.busy.release()

    def _receive(self, seconds: float) -> Message | None:
        try:
            return self.worker.line.receive(seconds)
        except Garbled as error:  # nothing that it says can be relied on
            self.worker.kill(f"it was ended, for what it sent is none of ours: {error}")
            raise Gone(f"{self.worker.name} was ended") from error

    def give_up(self, box: Box) -> None:
        """Nobody hears the answer to a question: a worker that comes to meet the others in it finds nobody."""
        if self._boxes.pop(box.number, None) is not None:
            self._around = None  # the worker may not come to that
            with suppress(Gone):
                self.talk.say_sheet(orders.MET, box.number, NOBODY)

    def give_up_since(self, number: int) -> None:
        """The same for all questions after one."""
        for box in [box for box in self._boxes.values() if box.number > number]:
            self.give_up(box)

    def answer(self, box: Box, met: Met | None) -> Message:
        """What a worker answers, in a thread that waits for it."""
        return hear_out(self.hear(box, met))

    def hear(self, box: Box, met: Met | None) -> Hearing[Message]:
        """What a worker answers; until it does, it may ask to meet the other replicas."""
        try:
            return (yield from self._hear(box, met))
        except BaseException:
            self.give_up(box)
            raise

    def _hear(self, box: Box, met: Met | None) -> Hearing[Message]:
        if met is not None:
            met.begin()
        wait = Wait(self.worker, self.timeout)
        while True:
            message = self._listen(box)
            if message is None:
                wait.look()
                if met is not None:
                    met.look()
                on_host = self.talk.hold is None and self.worker.line.shore is None
                # That may have been this one, whose answer another thread has heard just now.
                if on_host and met is not None and met.somebody_failed() and not box.has_any():
                    raise PeerFailed("another replica failed, and this one was not waited for.")
                continue
            if message.kind == orders.MEET and met is not None:
                (index, label, bare), tensors = self.talk.take_sheet(message)
                self.talk.say_sheet(orders.MET, message.call, (yield from met.meet(index, label, bare, tensors)))
                yield TOLD
                wait = Wait(self.worker, self.timeout)
            elif message.kind == orders.FAILED:
                box.kinds.add(message.kind)
                self._boxes.pop(box.number, None)
                self._around = None  # it may not have come to that
                error = unpack_error(Parcel(message.body, message.tensors), self.talk.depot)
                self.failed = id(error)
                if isinstance(error, (EngineError, MemoryError)):
                    self.talk.depot.forget()  # it may not have what was sent with it
                raise wrapped(error)
            elif message.kind == orders.DONE:
                self._boxes.pop(box.number, None)  # graphs may hold it for long
                self._leaving.clear()  # it has read all that was said before
                return message
            else:
                raise EngineError(f"{self.worker.name} answered {message.kind!r} to a call.")
