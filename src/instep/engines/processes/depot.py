"""What crosses between this process and a worker: values as a pickle without their tensors, and the tensors.

Each side of a line has a `Depot`, which knows the functions and classes that have crossed by value. They cross once
and go by number from then on, so what comes back home is an instance of the script's own classes.
"""

from __future__ import annotations

import io
import itertools
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from instep.engines.processes.cannot import CannotCross, Culprit, find, refusal
from instep.engines.processes.closures import Classes, is_variable, set_variable
from instep.engines.processes.orders import Order
from instep.engines.processes.pickling import DELETED, DeepPacker, LeftOut, Packer, Unpacker
from instep.engines.processes.spaces import ABSENT, Seen, Spaces, attributes_of, seen
from instep.errors import EngineError

__all__ = ["CannotCross", "Depot", "Parcel"]

_COUNT = struct.Struct("<I")
_DEEP_STACK = 256 * 2**20
_DEEPER = 50_000
_Result = TypeVar("_Result")


class Parcel(NamedTuple):
    """A value on its way. The tensors are the sender's own objects: whoever sends them decides how."""

    body: bytes
    tensors: list[Tensor]


class Depot:
    """What one side of a line knows of the classes and functions that have crossed it. One per line and side.

    `unpack` runs what the pickle says, as every unpickling does: it is for bytes from our own parent or worker, over
    the line that both inherited, and for no others.
    """

    def __init__(self, home: bool) -> None:
        self.home = home
        self._sign = 1 if home else -1
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}
        self._things: dict[int, Any] = {}
        self._crossed: set[int] = set()
        self._count = itertools.count(1)
        self._classes = Classes()
        self.spaces = Spaces(self._sign)
        self.left_out: dict[tuple[int, str], str] = {}
        self.variables: list[tuple[types.CellType, Seen]] = []
        """The variables of closures that went with what was packed last, as they were."""
        self.needing: list[Tensor] = []
        """Worker only: the tensors of what was unpacked last that need a gradient at home."""
        self.enclosed: list[Any] = []
        """Worker only: what the closures in it hold."""

    def pack(self, value: Any, what: str = "") -> Parcel:
        """A value as bytes and tensors. `what` begins the path in a `CannotCross`: "argument 'batch'", "the module".

        A class can say how paths through its attributes begin: `PATHS = {"kwargs": "argument "}`.
        """
        with self._lock:
            return self._commit(self._packed(value, what))

    def pack_fields(self, order: Order, what: str = "") -> Parcel:
        """The bare values of an order's fields."""
        with self._lock:
            packer, failure = self._try(order.fields())
            if failure is not None:
                self._packed(order, what)  # raises, with the path; or finds what can be left out
                packer = self._packed(order.fields(), what)
            return self._commit(packer)

    def can_pack(self, value: Any) -> bool:
        """Whether a value could be packed; nothing is sent or settled by asking."""
        with self._lock:
            return self._failure(value) is None

    def unpack(self, parcel: Parcel) -> Any:
        """The value of a parcel, with the receiver's tensors in the place of the sender's, in the same order."""
        with self._lock:
            (count,) = _COUNT.unpack_from(parcel.body)
            end = len(parcel.tensors) - count
            buffers: list[Any] = [tensor.numpy() for tensor in parcel.tensors[end:]]
            file = io.BytesIO(parcel.body)
            file.seek(_COUNT.size)
            unpacker = Unpacker(self, file, list(parcel.tensors[:end]), buffers)
            try:
                value = unpacker.load()
            except (EngineError, MemoryError):
                raise
            except Exception as error:
                raise CannotCross(
                    f"what another process sent could not be rebuilt: {type(error).__name__}: {error}. "
                    "Write engine='threads'."
                ) from error
            self.needing, self.enclosed = unpacker.needing, unpacker.enclosed
            unpacker.memo = {}  # it holds methods of the unpacker, and the unpacker the tensors
            for number, thing in unpacker.defined.items():
                self._keep(number, thing)
                self._crossed.add(number)
            for space, names_received in unpacker.received:
                self.spaces.watch_received(space, names_received)
            return value

    def stale_globals(self) -> Parcel | None:
        """Home only: what has changed of the globals and classes that functions on the other side read, if anything.

        Globals that were bound anew or deleted, containers, objects, arrays and tensors that were changed in place,
        and attributes of classes that were set.
        """
        with self._lock:
            names = self.spaces.changed()
            classes = self._classes.changed()
            if not names and not classes:
                return None
            told = {(number, name): seen(value) for number, name, value in names}
            looks = {number: attributes_of(cls) for number, cls, _ in classes}
            news = [(cls, {name: _sendable(value) for name, value in changed.items()}) for _, cls, changed in classes]
            for number, name, _ in names:
                self.left_out.pop((number, name), None)
            values = [(number, name, _sendable(value)) for number, name, value in names]
            packer, failure = self._try((values, news))
            if failure is not None:
                values = [(number, name, self._or_left_out(number, name, value)) for number, name, value in values]
                packer = self._packed((values, news), "what changed in the script")
            packer.told.update(told)
            packer.attributes.update(looks)
            packer.defined.update((number, cls) for number, cls, _ in classes)
            return self._commit(packer)

    def _or_left_out(self, number: int, name: str, value: Any) -> Any:
        """The value of a global, or what stands for it in a worker if it cannot be sent."""
        failure = self._try(value)[1]
        if failure is None:
            return value
        culprit = find(value, self._failure)
        if culprit is not None and culprit.through is not None:
            return value  # what it needs in its turn is left out
        described = culprit.describe(f"global {name!r}") if culprit is not None else f"global {name!r}"
        itself = culprit is None or not culprit.path
        reason = self.left_out[number, name] = str(refusal(described, failure, is_global=itself))
        return LeftOut(reason)

    def take_globals(self, body: bytes, tensors: list[Tensor]) -> None:
        """Worker only: take over what has changed at home; the parcel that `stale_globals` gave there."""
        names, classes = self.unpack(Parcel(body, tensors))
        for number, name, value in names:
            self.spaces.get(number, {})
            self.spaces.receive(number, {name: ABSENT if value is DELETED else value})
            self.spaces.watch_received(number, [name])
        for cls, news in classes:
            for name, value in news.items():
                if is_variable(name):
                    set_variable(cls, name, ABSENT if value is DELETED else value)
                elif value is not DELETED:
                    setattr(cls, name, value)
                elif name in vars(cls):
                    delattr(cls, name)

    def written_globals(self) -> list[str]:
        """Worker only: the script's globals that functions here have bound anew or changed in place.

        Home knows nothing of it. `forget` there has it send them all again.
        """
        with self._lock:
            return self.spaces.written()

    def forget(self) -> None:
        """The other side may not have what was sent (it failed to unpack): send definitions and globals again.

        The numbers stay, and a side that has a class already keeps it.
        """
        with self._lock:
            self._crossed -= {number for number in self._crossed if not self.theirs(number)}
            self.spaces.forget()

    def number(self, thing: Any) -> int | None:
        """The number of a function or class that has crossed."""
        return self._numbers.get(id(thing))

    def next_number(self) -> int:
        """A number that no side has used."""
        return self._sign * next(self._count)

    def crossed(self, number: int) -> bool:
        """Whether the other side knows this number."""
        return number in self._crossed

    def theirs(self, number: int) -> bool:
        """Whether this was first sent by the other side."""
        return number * self._sign < 0

    def has(self, number: int) -> bool:
        """Whether this side knows this number."""
        return number in self._things

    def thing(self, number: int) -> Any:
        """The function or class with a number."""
        try:
            return self._things[number]
        except KeyError:
            raise EngineError(f"a message speaks of definition {number}, which never came") from None

    def _keep(self, number: int, thing: Any) -> None:
        if number in self._things and self._things[number] is not thing:
            self._numbers.pop(id(self._things[number]), None)  # it may go now, and leave its place to another
        self._numbers[id(thing)] = number
        self._things[number] = thing

    def _commit(self, packer: Packer | DeepPacker) -> Parcel:
        """What was pickled goes on its way, and by number from now on."""
        for number, thing in packer.defined.items():
            self._keep(number, thing)
            self._crossed.add(number)
            if self.home and number in packer.attributes:
                self._classes.tell(number, thing, packer.attributes[number])
        if self.home:
            self.spaces.tell(packer.told)
        self.variables = packer.variables
        body = _COUNT.pack(len(packer.buffers)) + packer.file.getvalue()
        return Parcel(body, [*packer.tensors, *packer.buffers])

    def _packed(self, value: Any, what: str) -> Packer | DeepPacker:
        """Pickle a value, leaving out globals that cannot cross: maybe nobody needs them."""
        while True:
            packer, failure = self._try(value)
            if failure is None:
                return packer
            if isinstance(failure, MemoryError):
                raise failure
            culprit = find(value, self._failure)
            if culprit is None or not self._leave_out(culprit):
                described = culprit.describe(what) if culprit else what or "a value"
                itself = culprit is not None and culprit.is_global
                raise refusal(described, failure, is_global=itself) from failure

    def _leave_out(self, culprit: Culprit) -> bool:
        step = culprit.through
        if step is None or step.space is None:
            return False
        key = (self.spaces.number(step.space), step.name)
        if key in self.left_out:
            return False
        self.left_out[key] = str(refusal(culprit.describe(""), None, is_global=culprit.is_global))
        return True

    def _failure(self, value: Any) -> Exception | None:
        return self._try(value)[1]

    def _try(self, value: Any) -> tuple[Packer | DeepPacker, Exception | None]:
        """Pickle a value; nothing is settled by it."""
        packer: Packer | DeepPacker = Packer(self)
        error = _dump(packer, value)
        if isinstance(error, RecursionError):
            packer = DeepPacker(self)
            error = _with_deep_stack(lambda: _dump(packer, value))
        return packer, error


def _dump(packer: Packer | DeepPacker, value: Any) -> Exception | None:
    try:
        packer.dump(value)
    except Exception as error:
        return error
    return None


def _sendable(value: Any) -> Any:
    return DELETED if value is ABSENT else value


def _with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Do something that goes deep (a long chain of objects or functions) in a thread with room for it."""
    done: list[_Result] = []
    limit, size = sys.getrecursionlimit(), threading.stack_size(_DEEP_STACK)
    try:
        thread = threading.Thread(target=lambda: done.append(work()), name="instep packing", daemon=True)
        sys.setrecursionlimit(max(limit, _DEEPER))
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return done[0]
