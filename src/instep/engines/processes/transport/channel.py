"""Sends and receives Python values over a connection, with tensors beside the pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.engines.plain_values import (
    decode_plain,
    dump_plain,
    encode_plain,
    encode_plain_fields,
    is_data_only,
    is_trivial,
    load_plain,
)
from instep.engines.processes.messages import GLOBALS, PositionalMessage
from instep.engines.processes.serialization.module_globals import ModuleGlobals
from instep.engines.processes.serialization.registry import CodeRegistry, PickledValue
from instep.engines.processes.transport.connection import Connection, Message
from instep.engines.processes.transport.cuda_ipc import CudaIpcChannel, IpcTransfer

VALUE, SOURCE, ARGUMENT = "value", "source", "argument"

TensorTag = tuple[str, int]
"""How a tensor is sent.

`(VALUE, requires_grad)`: its data is sent. `(SOURCE, i)`: it is tensor `i` of the module's table, which the receiver
has. `(ARGUMENT, i)`: it is tensor `i` of the request's arguments, which the receiver of the reply has.
"""

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
    """A function that rebuilds the tensors of a reply. Arguments and module tensors become the parent's own."""

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
    """Parts of the value that may be any object. The rest is scalars, and lists, tuples and dictionaries of them."""


class Channel:
    """Sends and decodes Python values over a connection."""

    def __init__(self, connection: Connection, *, is_parent: bool) -> None:
        self.connection = connection
        self.registry = CodeRegistry(is_parent)
        self.cuda_ipc: CudaIpcChannel | None = None
        """Sends CUDA tensors through memory on the parent's device, if the worker can open it."""

    def send(
        self,
        kind: str,
        call_id: int,
        value: Any,
        get_tag: TagFunction = tag_by_value,
        *,
        fds: Sequence[int] = (),
        label: str = "",
        module_globals: ModuleGlobals | None = None,
    ) -> list[Tensor]:
        """Send a value. Returns its tensors in the order in which the receiver gets them.

        A `PositionalMessage` is received as the tuple of its fields. `label` names the value in errors. Modules that
        the value refers to are added to `module_globals`, and their values are sent before.
        """
        is_positional = isinstance(value, PositionalMessage)
        if is_positional:  # trailing fields may be omitted
            plain = encode_plain_fields(zip(value.fields(), value.__dict__, strict=False), value.USER_FIELDS)
        else:
            plain = encode_plain(value)
        if plain is not None:
            encoded, tensors = plain
            tags, inline, transfer = self._prepare_tensors(tensors, get_tag)
            self.connection.send(kind, call_id, dump_plain((tags, encoded, transfer)), inline, fds)
            return tensors
        payload = self.registry.pack_fields(value, label) if is_positional else self.registry.pack(value, label)
        try:
            tags, inline, transfer = self._prepare_tensors(payload.tensors, get_tag)
            if module_globals is not None:
                module_globals.add(self.registry.references)
                if module_globals.has_new_modules:
                    self.send_changed_globals(module_globals, modules_only=True)
            self.connection.send(kind, call_id, pickle.dumps((tags, payload.body, transfer), 5), inline, fds)
        except BaseException:
            self.registry.mark_all_unsent()  # the peer did not get what was packed
            raise
        return payload.tensors

    def send_changed_globals(self, module_globals: ModuleGlobals | None = None, *, modules_only: bool = False) -> None:
        """Send the globals that changed since they were sent, of the script and of the user's imported modules."""
        payload = self.registry.pack_changed_globals(module_globals, modules_only=modules_only)
        if payload is None:
            return
        try:
            self.connection.send(GLOBALS, 0, payload.body, [tensor.detach() for tensor in payload.tensors])
        except BaseException:
            self.registry.mark_all_unsent()  # the worker did not get it
            raise
        if module_globals is not None and not modules_only:  # changed globals may refer to further modules
            self.send_changed_globals(module_globals, modules_only=True)

    def _prepare_tensors(
        self, tensors: Sequence[Tensor], get_tag: TagFunction
    ) -> tuple[list[TensorTag], Sequence[Tensor], tuple[Any, ...] | None]:
        """The tags, the tensors to send with the message, and the description of those written to IPC memory."""
        tags = [get_tag(tensor) for tensor in tensors]
        values = [tensor.detach() for tensor, tag in zip(tensors, tags, strict=True) if tag[0] == VALUE]
        return tags, *self.write_tensors(values)

    def write_tensors(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], tuple[Any, ...] | None]:
        """Write the values of tensors to IPC memory, if there is any.

        Returns the tensors to send with the message, and the description of the others for `read_tensors`.
        """
        if self.cuda_ipc is None:
            return tensors, None
        inline, transfer = self.cuda_ipc.write(tensors)
        return inline, transfer.to_tuple()

    def send_flat(self, kind: str, call_id: int, flat: FlatValue) -> None:
        """Send a value whose tensors are already separated. Skips the search for tensors where possible."""
        on_host = self.cuda_ipc is None or all(tensor.device.type == "cpu" for tensor in flat.tensors)
        if on_host and all(map(is_trivial, flat.untyped)) and all(map(is_data_only, flat.tensors)):
            self.connection.send(kind, call_id, dump_plain((None, flat.value)), flat.tensors)
        else:
            self.send(kind, call_id, (flat.value, flat.tensors))

    def decode_flat(self, message: Message) -> tuple[Any, Sequence[Tensor]]:
        """Decode a message sent by `send_flat`."""
        content = load_plain(message.body)
        if content is None or content[0] is not None:
            value, tensors = self.decode(message)[0]
            return value, tensors
        if self.connection.receiver is not None:
            self.connection.receiver.raise_deferred()
        return content[1], message.tensors

    def decode(self, message: Message, rebuild: RebuildFunction = rebuild_by_value) -> tuple[Any, list[Tensor]]:
        """Decode a message: its value, and its tensors in the order in which they were sent.

        Unpickling is safe because only the parent and its worker hold the ends of a connection.
        """
        plain = load_plain(message.body)
        tags, content, transfer = pickle.loads(message.body) if plain is None else plain
        values = iter(self.read_tensors(message, transfer))
        tensors = [rebuild(tag, next(values) if tag[0] == VALUE else None) for tag in tags]
        if plain is None:
            return self.registry.unpack(PickledValue(content, tensors)), tensors
        return decode_plain(content, tensors), tensors

    def read_tensors(self, message: Message, transfer: tuple[Any, ...] | None) -> list[Tensor]:
        """The tensors of a message whose data was sent, including those in IPC memory."""
        if self.connection.receiver is not None:
            self.connection.receiver.raise_deferred()
        if self.cuda_ipc is None or transfer is None:
            return message.tensors
        return self.cuda_ipc.read(message.tensors, IpcTransfer.from_tuple(transfer), self.connection.receiver)
