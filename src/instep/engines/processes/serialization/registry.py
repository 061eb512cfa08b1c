"""Packs values for one connection; records the functions and classes that its peer already has."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import threading
import types
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from instep.engines.processes.messages import PositionalMessage
from instep.engines.processes.serialization.by_reference import locate_context_var
from instep.engines.processes.serialization.diagnose import UnpicklableObject, cannot_cross_error, find_unpicklable
from instep.engines.processes.serialization.globals import (
    ABSENT,
    ClassTracker,
    Namespaces,
    ValueSnapshot,
    is_closure_name,
    set_closure_variable,
    snapshot_attributes,
    take_snapshot,
)
from instep.engines.processes.serialization.module_globals import ModuleGlobals, apply_updates
from instep.engines.processes.serialization.pickler import DELETED, Pickler, PythonPickler, Unpickler, Unsendable
from instep.errors import CannotCross, EngineError

_BUFFER_COUNT = struct.Struct("<I")
_DEEP_STACK_BYTES = 256 * 2**20
_DEEP_RECURSION_LIMIT = 50_000
_Result = TypeVar("_Result")


class Payload(NamedTuple):
    """A value on its way. The tensors are the sender's own objects: whoever sends them decides how."""

    body: bytes
    tensors: list[Tensor]


class CodeRegistry:
    """What one side of a line knows of the classes and functions that have crossed it. One per line and side.

    `unpack` runs what the pickle says, as every unpickling does: it is for bytes from our own parent or worker, over
    the line that both inherited, and for no others.
    """

    def __init__(self, is_parent: bool) -> None:
        self.is_parent = is_parent
        self._sign = 1 if is_parent else -1
        self._lock = threading.RLock()
        self._ids: dict[int, int] = {}
        self._objects: dict[int, Any] = {}
        self._known_to_peer: set[int] = set()
        self._id_counter = itertools.count(1)
        self._class_tracker = ClassTracker()
        self.namespaces = Namespaces(self._sign)
        self._module_globals = ModuleGlobals()
        self.unsendable: dict[tuple[int, str], str] = {}
        self.closure_cells: list[tuple[types.CellType, ValueSnapshot]] = []
        """The variables of closures that went with what was packed last, as they were."""
        self.requiring_grad: list[Tensor] = []
        """Worker only: the tensors of what was unpacked last that need a gradient at home."""
        self.closure_values: list[Any] = []
        """Worker only: what the closures in it hold."""

    def pack(self, value: Any, label: str = "") -> Payload:
        """A value as bytes and tensors. `what` begins the path in a `CannotCross`: "argument 'batch'", "the module".

        A class can say how paths through its attributes begin: `PATHS = {"kwargs": "argument "}`.
        """
        with self._lock:
            return self._commit(self._pickle(value, label))

    def pack_fields(self, order: PositionalMessage, label: str = "") -> Payload:
        """The bare values of an order's fields."""
        with self._lock:
            packer, failure = self._try_pickle(order.fields())
            if failure is not None:
                self._pickle(order, label)  # raises, with the path; or finds what can be left out
                packer = self._pickle(order.fields(), label)
            return self._commit(packer)

    def can_pack(self, value: Any) -> bool:
        """Whether a value could be packed; nothing is sent or settled by asking."""
        with self._lock:
            return self._pickling_error(value) is None

    def unpack(self, parcel: Payload) -> Any:
        """The value of a parcel, with the receiver's tensors in the place of the sender's, in the same order."""
        with self._lock:
            (count,) = _BUFFER_COUNT.unpack_from(parcel.body)
            end = len(parcel.tensors) - count
            buffers: list[Any] = [tensor.numpy() for tensor in parcel.tensors[end:]]
            file = io.BytesIO(parcel.body)
            file.seek(_BUFFER_COUNT.size)
            unpacker = Unpickler(self, file, list(parcel.tensors[:end]), buffers)
            try:
                value = unpacker.load()
            except (EngineError, MemoryError):
                raise
            except Exception as error:
                raise CannotCross(
                    f"what another process sent could not be rebuilt: {type(error).__name__}: {error}. "
                    "Write engine='threads'."
                ) from error
            self.requiring_grad, self.closure_values = unpacker.requiring_grad, unpacker.closure_values
            unpacker.memo = {}  # it holds methods of the unpacker, and the unpacker the tensors
            for number, thing in unpacker.definitions.items():
                self._register(number, thing)
                self._known_to_peer.add(number)
            for space, names_received in unpacker.received_globals:
                self.namespaces.watch_received(space, names_received)
            return value

    def pack_changed_globals(self, *, modules_only: bool = False) -> Payload | None:
        """Home only: what has changed of the globals and classes that functions on the other side read, if anything.

        Globals that were bound anew or deleted, containers, objects, arrays and tensors that were changed in place,
        and attributes of classes that were set.
        """
        with self._lock:
            names = [] if modules_only else self.namespaces.changed()
            classes = [] if modules_only else self._class_tracker.changed()
            module_values = self._module_globals.changes()
            if not names and not classes and module_values is None:
                return None
            told = {(number, name): take_snapshot(value) for number, name, value in names}
            looks = {number: snapshot_attributes(cls) for number, cls, _ in classes}
            news = [
                (cls, {name: _encode_absent(value) for name, value in changed.items()}) for _, cls, changed in classes
            ]
            for number, name, _ in names:
                self.unsendable.pop((number, name), None)
            values = [(number, name, _encode_absent(value)) for number, name, value in names]
            packer, failure = self._try_pickle((values, news, module_values))
            if failure is not None:
                values = [
                    (number, name, self._value_or_stand_in(number, name, value)) for number, name, value in values
                ]
                packer = self._pickle((values, news, module_values), "what changed in the script")
            packer.sent_globals.update(told)
            packer.class_attributes.update(looks)
            packer.definitions.update((number, cls) for number, cls, _ in classes)
            return self._commit(packer)

    @property
    def has_new_modules(self) -> bool:
        """Whether a packed value refers to user modules whose values were not sent yet."""
        return self._module_globals.has_new_modules

    def _value_or_stand_in(self, number: int, name: str, value: Any) -> Any:
        """The value of a global, or what stands for it in a worker if it cannot be sent."""
        failure = self._try_pickle(value)[1]
        if failure is None:
            return value
        culprit = find_unpicklable(value, self._pickling_error)
        if culprit is not None and culprit.global_step is not None:
            return value  # what it needs in its turn is left out
        described = culprit.describe(f"global {name!r}") if culprit is not None else f"global {name!r}"
        itself = culprit is None or not culprit.path
        reason = self.unsendable[number, name] = str(cannot_cross_error(described, failure, is_global=itself))
        return Unsendable(reason)

    def apply_globals(self, body: bytes, tensors: list[Tensor]) -> None:
        """Worker only: take over what has changed at home; the parcel that `stale_globals` gave there."""
        names, classes, module_values = self.unpack(Payload(body, tensors))
        for number, name, value in names:
            self.namespaces.get_or_create(number, {})
            self.namespaces.receive(number, {name: ABSENT if value is DELETED else value})
            self.namespaces.watch_received(number, [name])
        for cls, news in classes:
            for name, value in news.items():
                if is_closure_name(name):
                    set_closure_variable(cls, name, ABSENT if value is DELETED else value)
                elif value is not DELETED:
                    setattr(cls, name, value)
                elif name in vars(cls):
                    delattr(cls, name)
        if module_values is not None:
            apply_updates(*module_values)

    def modified_globals(self) -> list[str]:
        """Worker only: the script's globals that functions here have bound anew or changed in place.

        Home knows nothing of it. `forget` there has it send them all again.
        """
        with self._lock:
            return self.namespaces.modified()

    def mark_all_unsent(self) -> None:
        """The other side may not have what was sent (it failed to unpack): send definitions and globals again.

        The numbers stay, and a side that has a class already keeps it.
        """
        with self._lock:
            self._known_to_peer -= {number for number in self._known_to_peer if not self.is_from_peer(number)}
            self.namespaces.mark_all_unsent()
            self._module_globals.mark_all_unsent()

    def id_of(self, thing: Any) -> int | None:
        """The number of a function or class that has crossed."""
        return self._ids.get(id(thing))

    def new_id(self) -> int:
        """A number that no side has used."""
        return self._sign * next(self._id_counter)

    def peer_has(self, number: int) -> bool:
        """Whether the other side knows this number."""
        return number in self._known_to_peer

    def is_from_peer(self, number: int) -> bool:
        """Whether this was first sent by the other side."""
        return number * self._sign < 0

    def has(self, number: int) -> bool:
        """Whether this side knows this number."""
        return number in self._objects

    def get_object(self, number: int) -> Any:
        """The function or class with a number."""
        try:
            return self._objects[number]
        except KeyError:
            raise EngineError(f"a message speaks of definition {number}, which never came") from None

    def _register(self, number: int, thing: Any) -> None:
        if number in self._objects and self._objects[number] is not thing:
            self._ids.pop(id(self._objects[number]), None)  # it may go now, and leave its place to another
        self._ids[id(thing)] = number
        self._objects[number] = thing

    def _commit(self, packer: Pickler | PythonPickler) -> Payload:
        """What was pickled goes on its way, and by number from now on."""
        for number, thing in packer.definitions.items():
            self._register(number, thing)
            self._known_to_peer.add(number)
            if self.is_parent and number in packer.class_attributes:
                self._class_tracker.mark_sent(number, thing, packer.class_attributes[number])
        if self.is_parent:
            self.namespaces.mark_sent(packer.sent_globals)
            self._module_globals.add(packer.imported_modules, packer.attribute_names)
        self.closure_cells = packer.closure_cells
        body = _BUFFER_COUNT.pack(len(packer.buffers)) + packer.file.getvalue()
        return Payload(body, [*packer.tensors, *packer.buffers])

    def _pickle(self, value: Any, what: str) -> Pickler | PythonPickler:
        """Pickle a value, leaving out globals that cannot cross: maybe nobody needs them."""
        while True:
            packer, failure = self._try_pickle(value)
            if failure is None:
                return packer
            if isinstance(failure, MemoryError):
                raise failure
            culprit = find_unpicklable(value, self._pickling_error)
            if culprit is None or not self._mark_unsendable(culprit):
                described = culprit.describe(what) if culprit else what or "a value"
                itself = culprit is not None and culprit.is_global
                raise cannot_cross_error(described, failure, is_global=itself) from failure

    def _mark_unsendable(self, culprit: UnpicklableObject) -> bool:
        step = culprit.global_step
        if step is None or step.namespace is None:
            return False
        key = (self.namespaces.id_of(step.namespace), step.name)
        if key in self.unsendable:
            return False
        self.unsendable[key] = str(cannot_cross_error(culprit.describe(""), None, is_global=culprit.is_global))
        return True

    def _pickling_error(self, value: Any) -> Exception | None:
        return self._try_pickle(value)[1]

    def _try_pickle(self, value: Any) -> tuple[Pickler | PythonPickler, Exception | None]:
        """Pickle a value; nothing is settled by it."""
        packer: Pickler | PythonPickler = Pickler(self)
        error = _dump(packer, value)
        if isinstance(error, RecursionError):
            packer = PythonPickler(self)
            error = _run_with_deep_stack(lambda: _dump(packer, value))
        return packer, error


def _dump(packer: Pickler | PythonPickler, value: Any) -> Exception | None:
    try:
        packer.dump(value)
    except Exception as error:
        return error
    return None


def _encode_absent(value: Any) -> Any:
    return DELETED if value is ABSENT else value


def _run_with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """Do something that goes deep (a long chain of objects or functions) in a thread with room for it."""
    done: list[_Result] = []
    limit, size = sys.getrecursionlimit(), threading.stack_size(_DEEP_STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: done.append(work()), name="instep packing", daemon=True)
        sys.setrecursionlimit(max(limit, _DEEP_RECURSION_LIMIT))
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    return done[0]


_PROCESS_LOCAL_PACKAGES = frozenset({"IPython", "ipykernel", "numpy", "torch", "tornado", "traitlets"})
"""Libraries whose variables are about this process."""


def sendable_context(context: Context, depot: CodeRegistry) -> list[tuple[ContextVar[Any], Any]]:
    """The variables that the other side of a line may read, with their values; one that cannot cross says so there."""
    return [
        (variable, _sendable_value(variable, value, depot))
        for variable, value in context.items()
        if _is_readable_by_peer(variable, depot)
    ]


def _is_readable_by_peer(variable: ContextVar[Any], depot: CodeRegistry) -> bool:
    number = depot.id_of(variable)
    if number is not None:
        return depot.peer_has(number)
    place = locate_context_var(variable)
    package = "" if place is None else place[0].partition(".")[0]
    return bool(package) and package not in _PROCESS_LOCAL_PACKAGES and package not in sys.stdlib_module_names


def _sendable_value(variable: ContextVar[Any], value: Any, depot: CodeRegistry) -> Any:
    if depot.can_pack(value):
        return value
    return Unsendable(
        str(cannot_cross_error(f"the context variable {variable.name!r} (a {type(value).__name__})", None))
    )
