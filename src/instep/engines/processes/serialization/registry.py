"""Packs values for one connection; records the functions and classes that its peer already has."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import threading
import types
from contextvars import Context, ContextVar
from typing import Any, NamedTuple

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
from instep.engines.processes.serialization.pickler import DELETED, Pickler, Unpickler, Unsendable
from instep.errors import CannotCross, EngineError

_BUFFER_COUNT = struct.Struct("<I")


class Payload(NamedTuple):
    """A pickled value and its tensors, which the caller sends separately."""

    body: bytes
    tensors: list[Tensor]


class CodeRegistry:
    """Pickles values for one connection, and records which functions and classes its peer already has.

    Both ends of a connection have one. A function or class is sent by value once and by its id from then on.
    `unpack` unpickles, so it must only be given bytes from the process at the other end.
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
        """Closure cells in the last packed value, with snapshots of their contents."""
        self.requiring_grad: list[Tensor] = []
        """Worker only: tensors in the last unpacked value that require a gradient in the parent."""
        self.closure_values: list[Any] = []
        """Worker only: contents of the closure cells in the last unpacked value."""

    def pack(self, value: Any, label: str = "") -> Payload:
        """Pickle a value. `label` starts the path in a `CannotCross`: "argument 'batch'", "the module".

        A class may define how paths through its attributes start: ``PATHS = {"kwargs": "argument "}``.
        """
        with self._lock:
            return self._commit(self._pickle(value, label))

    def pack_fields(self, order: PositionalMessage, label: str = "") -> Payload:
        """Pickle the field values of a message."""
        with self._lock:
            packer, failure = self._try_pickle(order.fields())
            if failure is not None:
                self._pickle(order, label)  # raises with the path, or marks globals as unsendable
                packer = self._pickle(order.fields(), label)
            return self._commit(packer)

    def can_pack(self, value: Any) -> bool:
        """Whether a value can be pickled. Records nothing."""
        with self._lock:
            return self._pickling_error(value) is None

    def unpack(self, payload: Payload) -> Any:
        """Rebuild a value around the received tensors, which have the order of the sent ones."""
        with self._lock:
            (count,) = _BUFFER_COUNT.unpack_from(payload.body)
            end = len(payload.tensors) - count
            buffers: list[Any] = [tensor.numpy() for tensor in payload.tensors[end:]]
            file = io.BytesIO(payload.body)
            file.seek(_BUFFER_COUNT.size)
            unpacker = Unpickler(self, file, list(payload.tensors[:end]), buffers)
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
        """Parent only: pickle the globals and class attributes that changed since they were sent; None if none did.

        `modules_only` leaves out the script's own globals and classes.
        """
        with self._lock:
            names = [] if modules_only else self.namespaces.changed()
            classes = [] if modules_only else self._class_tracker.changed()
            module_values = self._module_globals.changes()
            if not names and not classes and module_values is None:
                return None
            snapshots = {(number, name): take_snapshot(value) for number, name, value in names}
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
            packer.sent_globals.update(snapshots)
            packer.class_attributes.update(looks)
            packer.definitions.update((number, cls) for number, cls, _ in classes)
            self._module_globals.mark_sent()
            return self._commit(packer)

    @property
    def has_new_modules(self) -> bool:
        """Whether a packed value refers to user modules whose values were not sent yet."""
        return self._module_globals.has_new_modules

    def _value_or_stand_in(self, number: int, name: str, value: Any) -> Any:
        """The value of a global; an `Unsendable` if it cannot be pickled."""
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
        """Worker only: assign the values that `pack_changed_globals` packed in the parent."""
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
        """Worker only: the script's globals that functions here assigned or changed in place."""
        with self._lock:
            return self.namespaces.modified()

    def mark_all_unsent(self) -> None:
        """Send definitions and globals again, because the peer may have failed to unpack them. Ids stay valid."""
        with self._lock:
            self._known_to_peer -= {number for number in self._known_to_peer if not self.is_from_peer(number)}
            self.namespaces.mark_all_unsent()
            self._module_globals.mark_all_unsent()

    def id_of(self, thing: Any) -> int | None:
        """The id of a function or class that was sent or received; None if it was not."""
        return self._ids.get(id(thing))

    def new_id(self) -> int:
        """An unused id."""
        return self._sign * next(self._id_counter)

    def peer_has(self, number: int) -> bool:
        """Whether the peer has the definition with this id."""
        return number in self._known_to_peer

    def is_from_peer(self, number: int) -> bool:
        """Whether the peer defined this id."""
        return number * self._sign < 0

    def has(self, number: int) -> bool:
        """Whether this end has the definition with this id."""
        return number in self._objects

    def get_object(self, number: int) -> Any:
        """The function or class with an id."""
        try:
            return self._objects[number]
        except KeyError:
            raise EngineError(f"a message refers to definition {number}, which was not received.") from None

    def _register(self, number: int, thing: Any) -> None:
        if number in self._objects and self._objects[number] is not thing:
            self._ids.pop(id(self._objects[number]), None)  # it may go now, and leave its place to another
        self._ids[id(thing)] = number
        self._objects[number] = thing

    def _commit(self, packer: Pickler) -> Payload:
        """Record what was pickled as sent."""
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

    def _pickle(self, value: Any, what: str) -> Pickler:
        """Pickle a value. Globals that cannot be pickled become `Unsendable`, which raises when it is used."""
        while True:
            packer, failure = self._try_pickle(value)
            if failure is None:
                return packer
            if isinstance(failure, MemoryError):
                raise failure
            if isinstance(failure, RecursionError):
                raise CannotCross(
                    f"{what or 'a value'} cannot be sent to another process: it is nested too deeply to be pickled.\n"
                    "Pass a flatter structure (a list instead of a linked list), or write engine='threads'."
                ) from failure
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

    def _try_pickle(self, value: Any) -> tuple[Pickler, Exception | None]:
        """Pickle a value and record nothing."""
        pickler = Pickler(self)
        return pickler, _dump(pickler, value)


def _dump(packer: Pickler, value: Any) -> Exception | None:
    try:
        packer.dump(value)
    except Exception as error:
        return error
    return None


def _encode_absent(value: Any) -> Any:
    return DELETED if value is ABSENT else value


_PROCESS_LOCAL_PACKAGES = frozenset({"IPython", "ipykernel", "numpy", "torch", "tornado", "traitlets"})
"""Packages whose context variables belong to this process."""


def sendable_context(context: Context, registry: CodeRegistry) -> list[tuple[ContextVar[Any], Any]]:
    """The context variables that code in the peer may read, with their values."""
    return [
        (variable, _sendable_value(variable, value, registry))
        for variable, value in context.items()
        if _is_readable_by_peer(variable, registry)
    ]


def _is_readable_by_peer(variable: ContextVar[Any], registry: CodeRegistry) -> bool:
    number = registry.id_of(variable)
    if number is not None:
        return registry.peer_has(number)
    place = locate_context_var(variable)
    package = "" if place is None else place[0].partition(".")[0]
    return bool(package) and package not in _PROCESS_LOCAL_PACKAGES and package not in sys.stdlib_module_names


def _sendable_value(variable: ContextVar[Any], value: Any, registry: CodeRegistry) -> Any:
    if registry.can_pack(value):
        return value
    return Unsendable(
        str(cannot_cross_error(f"the context variable {variable.name!r} (a {type(value).__name__})", None))
    )
