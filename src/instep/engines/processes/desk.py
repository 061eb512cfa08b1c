"""This process's side of one worker: what it has been told, and how it is asked."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from instep.engines.processes import orders
from instep.engines.processes.arena import SharedMemory
from instep.engines.processes.estate import layout, locate
from instep.engines.processes.freight import Parcel, unpack_error
from instep.engines.processes.hands import Worker
from instep.engines.processes.mirror import slot_of
from instep.engines.processes.orders import Back, Entry, NewModule, Run, Spot, Surroundings, Table
from instep.engines.processes.shadow import Shadow
from instep.engines.processes.talk import SOURCE, Tag, Talk, by_value
from instep.engines.processes.wire import Gone, Message
from instep.errors import EngineError, WorkerFailure
from instep.meeting import Meeting, PeerFailed

calls = itertools.count(1)

GLANCE = 0.5
"""Seconds after which whoever waits for a worker looks whether it still lives."""
_PASSED_ON = 0.01
"""Seconds that a thread waits for another one to hear its answer, before it listens itself."""
PATIENCE = 60.0
"""Seconds after which it is said where a worker stands that has not answered."""


@dataclass
class Told:
    """What a worker was told of a module."""

    table: list[Tensor]
    """Its tensors, in the order of their numbers; for one that an earlier call left there, what stands for it here."""
    counterparts: list[Tensor]
    """What stands here for each of them."""
    slots: dict[int, Tensor]
    """By number: where the worker leaves the tensor's gradient."""
    loose: list[int]
    """The numbers of tensors that lie in no common memory."""

    def __post_init__(self) -> None:
        self.numbers = {id(tensor): number for number, tensor in enumerate(self.table)}
        self.sources = {id(made): id(source) for source, made in zip(self.table, self.counterparts, strict=True)}
        """By the id of what stands for it here: the id of each tensor."""
        self._marks = _marks(self.table)
        self._dense = [t for t in self.table if t.layout is torch.strided and not t.is_nested]
        self._pointers = list(map(_pointer, self._dense))

    def moved(self) -> bool:
        """Whether a tensor was given other memory since, or something was set on one."""
        if list(map(_pointer, self._dense)) != self._pointers:
            return True
        return any(tensor.__dict__ for tensor in self.table) and self._marks != _marks(self.table)

    def fresh(self) -> dict[int, Tensor]:
        """The values of the tensors that lie in no common memory."""
        return {number: self.table[number].detach() for number in self.loose}


_pointer = torch._C.TensorBase.data_ptr


def _marks(tensors: Sequence[Tensor]) -> list[dict[str, int]]:
    """What is set on each tensor, by identity."""
    return [{name: id(value) for name, value in tensor.__dict__.items()} for tensor in tensors]


class Met:
    """What one replica met the others for in a call, and what came of it: a worker that begins again is told that."""

    def __init__(self, room: Meeting) -> None:
        self._room: Meeting | None = room
        self._answers: list[Any] = []
        self._told = 0

    def begin(self) -> None:
        """The call begins, or begins again."""
        self._told = 0

    def end(self) -> None:
        """Nobody is met any longer: the answers are all that there is."""
        self._room = None

    def exchange(self, index: int, label: str, payload: Any) -> Any:
        """What the replicas brought, or why they did not come."""
        if self._told < len(self._answers):
            answer = self._answers[self._told]
        elif self._room is None:
            answer = None, EngineError(f"a forward that was run again came to {label}, where it had not been before.")
        else:
            try:
                answer = self._room.exchange(index, label, payload), None
            except Exception as error:
                answer = None, error
            self._answers.append(answer)
        self._told += 1
        return answer


class Wait:
    """The time that a worker has not been heard of."""

    def __init__(self, worker: Worker, timeout: float) -> None:
        self._worker = worker
        self._timeout = timeout
        self._since = time.monotonic()
        self._said = False

    def look(self) -> None:
        """Say where a worker stands that takes long; `Stuck` when it takes too long, but never under a debugger."""
        waited = time.monotonic() - self._since
        if not self._worker.alive():
            raise Gone(f"{self._worker.name} is gone")
        if waited < min(PATIENCE, self._timeout / 2) or sys.gettrace() is not None:
            return
        if not self._said:
            self._said = True
            warnings.warn(
                f"{self._worker.name} has not answered for {waited:.0f} s; it stands at:\n{self._worker.stack()}",
                stacklevel=2,
            )
        if waited > self._timeout:
            raise Stuck(
                f"{self._worker.name} has not answered for {waited:.0f} s and was ended; it stood at:\n"
                f"{self._worker.stack()}\nIf it only takes long: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )


class Stuck(WorkerFailure):
    """A worker did not answer in time."""


class Box:
    """Where messages about one question are put. They are dropped when nobody holds it any longer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._messages: SimpleQueue[Message] = SimpleQueue()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def wait(self, seconds: float) -> Message | None:
        """The next message; None where none comes within that time."""
        try:
            return self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
        except Empty:
            return None


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
        self.timeout = math.inf
        """Seconds without a word from the worker, after which it is given up."""
        self._around: Surroundings | None = None
        """Those of the last forward."""
        self.gone: deque[tuple[str, int]] = deque()
        """Calls and stand-ins that nobody needs any longer; finalizers only put them here."""

    def tell(self, shadow: Shadow) -> Told:
        """Tell the worker what it does not know yet of a module."""
        update = self.talk.depot.stale_globals()
        if update is not None:
            self.worker.line.send(orders.GLOBALS, 0, update.body, [tensor.detach() for tensor in update.tensors])
        told: Told | None = shadow.told.get(self)
        if told is None:
            weakref.finalize(shadow, self.gone.append, ("module", shadow.number))
        if told is None or shadow.stale or told.moved():
            told = shadow.told[self] = self._tell_module(shadow)
        elif shadow.sets:
            sets = [(change.module, change.name, change.new) for change in shadow.sets]
            self.talk.say(orders.SET, shadow.number, sets, what="attributes")
        shadow.stale, shadow.sets = False, []
        return told

    def _gone(self) -> tuple[list[int], list[int]]:
        """Calls and modules that the worker may forget."""
        ended: list[int] = []
        modules: list[int] = []
        while self.gone:
            kind, number = self.gone.popleft()
            (ended if kind == "call" else modules).append(number)
        return ended, modules

    def _tell_module(self, shadow: Shadow) -> Told:
        pairs = [*shadow.tensors.trainable, *shadow.tensors.state]
        tensors = [source for source, _ in pairs]
        listed = _Entries(tensors)
        blocks = listed.blocks
        wanted = [number for number, tensor in enumerate(tensors) if tensor.requires_grad and tensor.numel()]
        offsets, total = layout([tensors[n].numel() * tensors[n].element_size() for n in wanted])
        if shadow.slots is None or shadow.slots.nbytes != total:
            shadow.slots = SharedMemory.create(total, "the memory for the gradients of a replica")
        places = list(zip(wanted, offsets, strict=True))
        known_blocks = [(number, memory.nbytes) for number, memory in blocks.items()]
        order: Any = Table(shadow.number, listed.entries, listed.sent, known_blocks, (total, places))
        fds = [*(memory.fd for memory in blocks.values()), shadow.slots.fd]
        self.talk.say(orders.TABLE, shadow.number, order, fds=fds)
        known = {id(tensor): number for number, tensor in enumerate(tensors)}

        def describe(tensor: Tensor) -> Tag:
            return (SOURCE, known[id(tensor)]) if id(tensor) in known else by_value(tensor.detach())

        source, _ = shadow.cloner.modules[0]
        order = NewModule(shadow.number, source, shadow.device, shadow.synchronised, shadow.owned)
        self.talk.say(orders.MODULE, shadow.number, order, describe, what="the module")
        slots = {number: slot_of(shadow.slots, offset, tensors[number]) for number, offset in places}
        table = [source if source.is_leaf else made for source, made in pairs]  # graphs lead to earlier calls
        return Told(table, [made for _, made in pairs], slots, listed.loose)

    def ask_forward(self, run: Run) -> tuple[Box, list[Tensor]]:
        """Ask for one replica's part of a forward; returns the tensors of its arguments too, as they are numbered."""
        box, around = self._box(), run.around
        run.gone = self._gone()
        if around == self._around:
            run.around = None
        try:
            tensors = self.talk.say(orders.FORWARD, box.number, run, what="arguments")
        except BaseException:
            self.gone.extend([*(("call", n) for n in run.gone[0]), *(("module", n) for n in run.gone[1])])
            raise
        finally:
            run.around = around
        self._around = around
        return box, tensors

    def ask_backward(self, back: Back) -> Box:
        """Ask for one replica's part of a backward."""
        box = self._box()
        self.talk.say(orders.BACKWARD, box.number, back)
        return box

    def _box(self) -> Box:
        box = Box(next(calls))
        self._boxes[box.number] = box
        return box

    def _listen(self, box: Box) -> Message | None:
        """The next message for a box, if one comes soon; what comes for others is put into theirs."""
        if not self.busy.acquire(blocking=False):  # another thread listens, or asks
            return box.wait(_PASSED_ON)
        try:
            message = box.wait(0)
            if message is None:
                message = self.worker.line.receive(GLANCE)
            if message is None or message.call == box.number:
                return message
            other = self._boxes.get(message.call)
            if other is not None:
                other.put(message)
            elif message.kind == orders.MEET:  # of a call that was given up
                self.talk.say(orders.MET, message.call, (None, PeerFailed("the call was interrupted.")))
            return None
        finally:
            self.busy.release()

    def answer(self, box: Box, met: Met) -> Message:
        """What a worker answers; until it does, it may ask to meet the other replicas."""
        met.begin()
        wait = Wait(self.worker, self.timeout)
        while True:
            message = self._listen(box)
            if message is None:
                wait.look()
                continue
            wait = Wait(self.worker, self.timeout)
            if message.kind == orders.MEET:
                asked, _ = self.talk.take(message)
                self.talk.say(orders.MET, message.call, met.exchange(*asked))
            elif message.kind == orders.FAILED:
                self._around = None  # it may not have come to that
                raise unpack_error(Parcel(message.body, message.tensors), self.talk.depot)
            elif message.kind == orders.DONE:
                return message
            else:
                raise EngineError(f"{self.worker.name} answered {message.kind!r} to a call.")


_desks: weakref.WeakKeyDictionary[Worker, Desk] = weakref.WeakKeyDictionary()


def desk_of(worker: Worker) -> Desk:
    """The desk of a worker, which all engines share."""
    if worker not in _desks:
        _desks[worker] = Desk(worker)
    return _desks[worker]


class _Entries:
    """The entries of a table, the memory that they lie in, and what lies in none."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.blocks: dict[int, SharedMemory] = {}
        self.sent: list[Tensor] = []
        self.loose: list[int] = []
        self._storages: dict[int, int] = {}
        self.entries = [self._entry(number, tensor) for number, tensor in enumerate(tensors)]

    def _entry(self, number: int, tensor: Tensor) -> Entry:
        dense = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested
        spot = self._spot(tensor) if dense else None
        if spot is None or not spot.block:
            self.loose.append(number)
        value = tensor.detach() if spot is None else None
        return Entry(type(tensor), tensor.requires_grad, dict(tensor.__dict__), spot, value)

    def _spot(self, tensor: Tensor) -> Spot:
        place, storage = locate(tensor), tensor.untyped_storage()
        if place is None:
            if storage.data_ptr() not in self._storages or not storage.nbytes():
                self._storages[storage.data_ptr()] = len(self.sent)
                self.sent.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            block, offset = 0, self._storages[storage.data_ptr()]
        else:
            self.blocks[place.block.number] = place.block.memory
            block, offset = place.block.number, place.offset
        start, size = int(tensor.storage_offset()), tuple(tensor.size())
        return Spot(block, offset, storage.nbytes(), start, size, tensor.stride(), tensor.dtype)
