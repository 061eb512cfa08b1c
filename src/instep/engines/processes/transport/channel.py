"""Sends and receives Python values over a connection, with tensors beside the pickle."""

from __future__ import annotations

import marshal
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.engines.processes.messages import GLOBALS, PositionalMessage
from instep.engines.processes.serialization.reducers import has_strided_data
from instep.engines.processes.serialization.registry import CodeRegistry, Payload
from instep.engines.processes.transport.connection import Connection, Message
from instep.engines.processes.transport.cuda_ipc import CudaIpcChannel, IpcTransfer

VALUE, SOURCE, ARGUMENT = "value", "source", "argument"

TensorTag = tuple[str, int]
"""What kind of tensor it is, and its number; for a value, whether it needs a gradient."""

TagFunction = Callable[[Tensor], TensorTag]
RebuildFunction = Callable[[TensorTag, Tensor | None], Tensor]


def tag_by_value(tensor: Tensor) -> TensorTag:
    """Tag a tensor whose data is sent."""
    return VALUE, int(tensor.requires_grad)


def rebuild_by_value(tag: TensorTag, tensor: Tensor | None) -> Tensor:
    """Rebuild a tensor whose data was sent."""
    assert tensor is not None
    return tensor.requires_grad_() if tag[1] else tensor


def reply_rebuilder(arguments: Sequence[Tensor], counterparts: Sequence[Tensor]) -> RebuildFunction:
    """A function that rebuilds the tensors of a reply: arguments and module tensors are the parent's own."""

    def rebuild(tag: TensorTag, tensor: Tensor | None) -> Tensor:
        if tag[0] == ARGUMENT:
            return arguments[tag[1]]
        if tag[0] == SOURCE:
            return counterparts[tag[1]]
        return rebuild_by_value(tag, tensor)

    return rebuild


class FlatValue(NamedTuple):
    """A value that refers to tensors by index, and the tensors."""

    value: Any
    tensors: list[Tensor]
    untyped: Sequence[Any] = ()
    """What in the value may be anything; the rest is numbers, texts, and lists, tuples and dictionaries of them."""


class Channel:
    """Sends and decodes Python values over a connection."""

    def __init__(self, line: Connection, *, is_parent: bool) -> None:
        self.connection = line
        self.registry = CodeRegistry(is_parent)
        self.cuda_ipc: CudaIpcChannel | None = None
        """Sends CUDA tensors through IPC memory when both processes use one device."""

    def send(
        self,
        kind: str,
        call_id: int,
        value: Any,
        describe: TagFunction = tag_by_value,
        *,
        fds: Sequence[int] = (),
        label: str = "",
    ) -> list[Tensor]:
        """Send a value. Returns its tensors in the order in which the receiver gets them.

        A `PositionalMessage` is received as the tuple of its fields.
        """
        is_order = isinstance(value, PositionalMessage)
        if is_order:
            short = encode_plain_fields(value.fields(), value.__dict__, value.USER_FIELDS)
        else:
            short = encode_plain(value)
        if short is not None:
            return self._send_plain(kind, call_id, *short, describe, fds)
        parcel = self.registry.pack_fields(value, label) if is_order else self.registry.pack(value, label)
        tags = [describe(tensor) for tensor in parcel.tensors]
        sent, cargo = self._split_for_ipc(parcel.tensors, tags)
        try:
            if self.registry.has_new_modules:
                self.send_changed_globals(modules_only=True)
            self.connection.send(kind, call_id, pickle.dumps((tags, parcel.body, cargo), 5), sent, fds)
        except BaseException:
            self.registry.mark_all_unsent()  # the peer did not get what was packed
            raise
        return parcel.tensors

    def send_changed_globals(self, *, modules_only: bool = False) -> None:
        """Send the globals that changed since they were sent, of the script and of the user's imported modules."""
        payload = self.registry.pack_changed_globals(modules_only=modules_only)
        if payload is not None:
            try:
                self.connection.send(GLOBALS, 0, payload.body, [tensor.detach() for tensor in payload.tensors])
            except BaseException:
                self.registry.mark_all_unsent()  # the worker did not get it
                raise

    def _send_plain(
        self, kind: str, call: int, value: Any, tensors: list[Tensor], describe: TagFunction, fds: Sequence[int]
    ) -> list[Tensor]:
        tags = [describe(tensor) for tensor in tensors]
        sent, cargo = self._split_for_ipc(tensors, tags)
        self.connection.send(kind, call, dump_plain((tags, value, cargo)), sent, fds)
        return tensors

    def _split_for_ipc(
        self, tensors: Sequence[Tensor], tags: Sequence[TensorTag]
    ) -> tuple[list[Tensor], tuple[Any, ...] | None]:
        """Tensors to send with the message, and the description of those written to IPC memory."""
        sent = [tensor.detach() for tensor, tag in zip(tensors, tags, strict=True) if tag[0] == VALUE]
        if self.cuda_ipc is None:
            return sent, None
        sent, cargo = self.cuda_ipc.write(sent)
        return sent, cargo.to_tuple()

    def _join_from_ipc(self, message: Message, cargo: tuple[Any, ...] | None) -> Iterator[Tensor]:
        """All tensors of a received message, in order."""
        if self.cuda_ipc is None or cargo is None:
            return iter(message.tensors)
        return iter(self.cuda_ipc.read(message.tensors, IpcTransfer.from_tuple(cargo), self.connection.receiver))

    def send_flat(self, kind: str, call_id: int, sheet: FlatValue) -> None:
        """Send a value whose tensors are already separated; skips pickling where possible."""
        on_host = self.cuda_ipc is None or all(tensor.device.type == "cpu" for tensor in sheet.tensors)
        if on_host and all(map(is_trivial, sheet.untyped)) and all(map(is_plain_tensor, sheet.tensors)):
            self.connection.send(kind, call_id, dump_plain((None, sheet.value)), sheet.tensors)
        else:
            self.send(kind, call_id, (sheet.value, sheet.tensors))

    def decode_flat(self, message: Message) -> tuple[Any, Sequence[Tensor]]:
        """Decode a message sent by `send_flat`."""
        if self.connection.receiver is not None:
            self.connection.receiver.raise_deferred()
        found = load_plain(message.body)
        if found is not None and found[0] is None:
            return found[1], message.tensors
        value, tensors = self.decode(message)[0]
        return value, tensors

    def decode(self, message: Message, rebuild: RebuildFunction = rebuild_by_value) -> tuple[Any, list[Tensor]]:
        """Decode a message: its value, and its tensors in the order in which they were sent.

        Unpickling is safe because only the parent and its worker hold the ends of a connection.
        """
        if self.connection.receiver is not None:
            self.connection.receiver.raise_deferred()
        found = load_plain(message.body)
        if found is not None:
            tags, value, cargo = found
            sent = self._join_from_ipc(message, cargo)
            tensors = [rebuild(tag, next(sent) if tag[0] == VALUE else None) for tag in tags]
            return decode_plain(value, tensors), tensors
        tags, body, cargo = pickle.loads(message.body)
        sent = self._join_from_ipc(message, cargo)
        tensors = [rebuild(tag, next(sent) if tag[0] == VALUE else None) for tag in tags]
        return self.registry.unpack(Payload(body, tensors)), tensors


_SCALARS = frozenset({type(None), bool, int, float, str})
_MAX_DEPTH, _MAX_LENGTH, _MAX_OBJECTS = 16, 64, 64
"""Levels, entries of one container, and containers and tensors: beyond that C code is quicker."""


class _NotPlain(Exception):
    """Something is in a value that the short way has no word for."""


def encode_plain(value: Any) -> tuple[Any, list[Tensor]] | None:
    """A value with a complex number, of which it holds no others, for each tensor, and the tensors; or None."""
    tensors: list[Tensor] = []
    try:
        return _encode(value, tensors, {}, 0), tensors
    except _NotPlain:
        return None


def encode_plain_fields(
    fields: Sequence[Any], names: Iterable[str], loose: Collection[str]
) -> tuple[Any, list[Tensor]] | None:
    """The same for values with names, of which only some may hold anything."""
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}
    try:
        pairs = zip(fields, names, strict=False)
        return tuple([_encode(v, tensors, seen, 1) if name in loose else v for v, name in pairs]), tensors
    except _NotPlain:
        return None


def _encode(value: Any, tensors: list[Tensor], seen: dict[int, Any], depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is Tensor:
        place = seen.get(id(value))
        if place is None:
            if not is_plain_tensor(value):
                raise _NotPlain
            place = seen[id(value)] = complex(len(tensors))
            tensors.append(value)
        return place
    if kind is tuple:
        if not value:
            return value
        seen.setdefault(id(value))
    elif (kind is not list and kind is not dict) or id(value) in seen:  # one list in two places stays one
        raise _NotPlain
    else:
        seen[id(value)] = None
        if not value:
            return kind()
    if len(value) > _MAX_LENGTH or len(seen) > _MAX_OBJECTS or depth > _MAX_DEPTH:
        raise _NotPlain
    below = depth + 1
    if kind is dict:
        if not all(type(key) in _SCALARS for key in value):
            raise _NotPlain
        return {
            key: item if type(item) in _SCALARS else _encode(item, tensors, seen, below) for key, item in value.items()
        }
    items = [item if type(item) in _SCALARS else _encode(item, tensors, seen, below) for item in value]
    return items if kind is list else tuple(items)


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor goes the short way."""
    return type(tensor) is Tensor and not tensor.__dict__ and has_strided_data(tensor)


def is_trivial(value: Any) -> bool:
    """Whether there is nothing to look into."""
    return type(value) in _SCALARS or (not value and type(value) in (tuple, list, dict))


def decode_plain(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The value that `to_plain` was given, with these tensors; lists and dictionaries are filled where they are."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is complex:
        return tensors[int(value.real)]
    if kind is tuple:
        return tuple([item if type(item) in _SCALARS else decode_plain(item, tensors) for item in value])
    for key, item in value.items() if kind is dict else enumerate(value):
        if type(item) not in _SCALARS:
            value[key] = decode_plain(item, tensors)
    return value


def dump_plain(value: Any) -> bytes:
    """What `to_plain` gave, as bytes that begin like no pickle."""
    return b"\0" + marshal.dumps(value)


def load_plain(body: bytes) -> Any | None:
    """What `dumps` was given; None for the bytes of a pickle."""
    return None if body[:1] != b"\0" else marshal.loads(memoryview(body)[1:])
