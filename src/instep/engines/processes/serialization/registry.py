"""Packs values for one connection; records the functions and classes that its peer already has."""

from __future__ import annotations

import io
import itertools
import struct
import sys
import threading
import types
from collections.abc import Mapping
from contextvars import Context, ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from instep.engines.processes.messages import PositionalMessage
from instep.engines.processes.serialization.by_reference import locate_context_var
from instep.engines.processes.serialization.diagnose import UnpicklableObject, cannot_cross_error, find_unpicklable
from instep.engines.processes.serialization.globals import (
    ABSENT,
    CLASS,
    Namespaces,
    SentValues,
    TrackerKey,
    ValueSnapshot,
    take_snapshot,
)
from instep.engines.processes.serialization.module_globals import (
    ModuleGlobals,
    References,
    SentModuleValues,
    apply_updates,
)
from instep.engines.processes.serialization.pickler import Pickler, Unpickler, Unsendable
from instep.errors import CannotCross, EngineError

_BUFFER_COUNT = struct.Struct("<I")


class PickledValue(NamedTuple):
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
        self.namespaces = Namespaces(self._sign)
        self.sent_values = SentValues()
        self.sent_module_values = SentModuleValues()
        self._references: dict[Any, References] = {}
        """References of the value that a definition, or a global of the script, was first sent with."""
        self.references = References()
        """Modules and names that the last packed value refers to."""
        self.unsendable: dict[tuple[int, str], str] = {}
        """Why a global cannot be sent, by namespace and name."""
        self.closure_cells: list[tuple[types.CellType, ValueSnapshot]] = []
        """Closure cells in the last packed value, with snapshots of their contents."""
        self.requiring_grad: list[Tensor] = []
        """Worker only: tensors in the last unpacked value that require a gradient in the parent."""
        self.closure_values: list[Any] = []
        """Worker only: contents of the closure cells in the last unpacked value."""

    def pack(self, value: Any, label: str = "") -> PickledValue:
        """Pickle a value. `label` starts the path in a `CannotCross`: "argument 'batch'", "the module".

        A class may define how paths through its attributes start: ``PATHS = {"kwargs": "argument "}``.
        """
        with self._lock:
            return self._commit_value(self._pickle(value, label))

    def pack_fields(self, message: PositionalMessage, label: str = "") -> PickledValue:
        """Pickle the field values of a message."""
        with self._lock:
            pickler, error = self._try_pickle(message.fields())
            if error is not None:
                self._pickle(message, label)  # raises with the path, or marks globals as unsendable
                pickler = self._pickle(message.fields(), label)
            return self._commit_value(pickler)

    def can_pack(self, value: Any) -> bool:
        """Whether a value can be pickled. Records nothing."""
        with self._lock:
            return self._pickling_error(value) is None

    def packing_error(self, value: Any, label: str) -> CannotCross | None:
        """The error of `pack`; None if the value can be pickled. Sends nothing."""
        with self._lock:
            try:
                self._pickle(value, label)
            except CannotCross as error:
                return error
        return None

    def unpack(self, pickled: PickledValue) -> Any:
        """Rebuild a value around the received tensors, which have the order of the sent ones."""
        with self._lock:
            (count,) = _BUFFER_COUNT.unpack_from(pickled.body)
            end = len(pickled.tensors) - count
            buffers: list[Any] = [tensor.numpy() for tensor in pickled.tensors[end:]]
            file = io.BytesIO(pickled.body)
            file.seek(_BUFFER_COUNT.size)
            unpickler = Unpickler(self, file, list(pickled.tensors[:end]), buffers)
            try:
                value = unpickler.load()
            except (EngineError, MemoryError):
                raise
            except Exception as error:
                raise CannotCross(
                    f"a value from another process could not be rebuilt: {type(error).__name__}: {error}.\n"
                    "Use engine='threads'."
                ) from error
            self.requiring_grad, self.closure_values = unpickler.requiring_grad, unpickler.closure_values
            unpickler.memo = {}  # it has bound methods of the unpickler: a reference cycle that holds the tensors
            self._register(unpickler.definitions)
            for namespace, names in unpickler.received_globals:
                self.namespaces.watch_received(namespace, names)
            return value

    def pack_changed_globals(
        self, module_globals: ModuleGlobals | None = None, *, modules_only: bool = False
    ) -> PickledValue | None:
        """Parent only: pickle the globals and class attributes that changed since they were sent; None if none did.

        `module_globals` are the imported modules to look at. `modules_only` leaves out the script's own values.
        """
        with self._lock:
            changes = [] if modules_only else self.sent_values.changed()
            module_updates = None if module_globals is None else module_globals.changes()
            if not changes and module_updates is None:
                return None
            snapshots = [(key, {name: take_snapshot(value)}) for key, name, value in changes]
            for key, name, _ in changes:
                self.unsendable.pop((key[1], name), None)
            pickler, error = self._try_pickle((self._encode(changes), module_updates))
            if error is not None:
                changes = [(key, name, self._value_or_unsendable(key, name, value)) for key, name, value in changes]
                pickler = self._pickle((self._encode(changes), module_updates), "a changed value of the script")
            pickled = self._commit(pickler)
            for key, values in snapshots:
                self.sent_values.mark_sent(key, values)
            if module_globals is not None:
                module_globals.mark_sent()
            if changes:
                self.sent_module_values.add_references(pickler.references)
            return pickled

    def _encode(self, changes: list[tuple[TrackerKey, str, Any]]) -> list[tuple[int | type, str, Any]]:
        """Changed values as they are pickled: with the id of the namespace, or with the class."""
        return [
            (self.get_object(number) if kind == CLASS else number, name, value)
            for (kind, number), name, value in changes
        ]

    def _value_or_unsendable(self, key: TrackerKey, name: str, value: Any) -> Any:
        """A value; an `Unsendable` if it is a global that cannot be pickled."""
        error = self._pickling_error(value)
        if error is None or key[0] == CLASS:
            return value
        culprit = find_unpicklable(value, self._pickling_error)
        if culprit.global_step is not None:
            return value  # the global that it reads is left out
        reason = str(cannot_cross_error(culprit.describe(f"global {name!r}"), error, is_global=not culprit.path))
        self.unsendable[key[1], name] = reason
        return Unsendable(reason)

    def apply_globals(self, body: bytes, tensors: list[Tensor]) -> None:
        """Worker only: assign the values that `pack_changed_globals` packed in the parent."""
        changes, module_updates = self.unpack(PickledValue(body, tensors))
        for owner, name, value in changes:
            if isinstance(owner, int):
                self.namespaces.receive(owner, {name: value})
                self.namespaces.watch_received(owner, [name])
            elif value is not ABSENT:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        if module_updates is not None:
            apply_updates(*module_updates)

    def modified_globals(self) -> list[str]:
        """Worker only: the script's globals that functions here assigned or changed in place."""
        with self._lock:
            return self.namespaces.modified()

    def mark_all_unsent(self) -> None:
        """Send definitions and globals again, because the peer may have failed to unpack them. Ids stay valid."""
        with self._lock:
            self._known_to_peer -= {number for number in self._known_to_peer if not self.is_from_peer(number)}
            self.sent_values.mark_all_unsent()
            self.sent_module_values.mark_all_unsent()

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

    def _register(self, definitions: Mapping[int, Any]) -> None:
        """Record definitions as known to both ends."""
        for number, definition in definitions.items():
            previous = self._objects.get(number)
            if previous is not None and previous is not definition:
                self._ids.pop(id(previous), None)
            self._ids[id(definition)] = number
            self._objects[number] = definition
            self._known_to_peer.add(number)

    def _commit_value(self, pickler: Pickler) -> PickledValue:
        pickled = self._commit(pickler)
        self.closure_cells, self.references = list(pickler.closure_cells.values()), pickler.references
        return pickled

    def _commit(self, pickler: Pickler) -> PickledValue:
        """Record what was pickled as sent."""
        self._register(pickler.definitions)
        if self.is_parent:
            for known in pickler.known & self._references.keys():
                pickler.references.add(self._references[known])
            self._references.update(dict.fromkeys(pickler.definitions, pickler.references))
            for key, (mapping, snapshots) in pickler.snapshots.items():
                self.sent_values.track(key, mapping)
                self.sent_values.mark_sent(key, snapshots)
                self._references.update(((key, name), pickler.references) for name in snapshots)
        body = _BUFFER_COUNT.pack(len(pickler.buffers)) + pickler.file.getvalue()
        return PickledValue(body, [*pickler.tensors, *pickler.buffers])

    def _pickle(self, value: Any, label: str) -> Pickler:
        """Pickle a value. Globals that cannot be pickled become `Unsendable`, which raises when it is used."""
        while True:
            pickler, error = self._try_pickle(value)
            if error is None:
                return pickler
            if isinstance(error, MemoryError):
                raise error
            if isinstance(error, RecursionError):
                what = f"an {label.strip()}" if label.endswith(" ") else label or "a value"  # no path follows
                raise CannotCross(
                    f"{what} cannot be sent to another process: an object is nested too deeply to be "
                    "pickled.\nPass a flatter structure (a list instead of a linked list), or use engine='threads'."
                ) from error
            culprit = find_unpicklable(value, self._pickling_error)
            if not self._mark_unsendable(culprit):
                raise cannot_cross_error(culprit.describe(label), error, is_global=culprit.is_global) from error

    def _mark_unsendable(self, culprit: UnpicklableObject) -> bool:
        """Leave out the global that leads to an unpicklable object; False if there is none."""
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
        try:
            pickler.dump(value)
        except Exception as error:
            return pickler, error
        return pickler, None


_PROCESS_LOCAL_PACKAGES = frozenset({"IPython", "ipykernel", "numpy", "torch", "tornado", "traitlets"})
"""Packages whose context variables are not sent."""


def sendable_context(context: Context, registry: CodeRegistry) -> list[tuple[ContextVar[Any], Any]]:
    """The context variables that code in the peer may read, with their values."""
    return [
        (variable, _sendable_value(variable, value, registry))
        for variable, value in context.items()
        if _can_peer_read(variable, registry)
    ]


def _can_peer_read(variable: ContextVar[Any], registry: CodeRegistry) -> bool:
    number = registry.id_of(variable)
    if number is not None:
        return registry.peer_has(number)
    location = locate_context_var(variable)
    package = "" if location is None else location[0].partition(".")[0]
    return bool(package) and package not in _PROCESS_LOCAL_PACKAGES and package not in sys.stdlib_module_names


def _sendable_value(variable: ContextVar[Any], value: Any, registry: CodeRegistry) -> Any:
    if registry.can_pack(value):
        return value
    return Unsendable(
        str(cannot_cross_error(f"the context variable {variable.name!r} (a {type(value).__name__})", None))
    )
