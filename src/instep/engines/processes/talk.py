"""How values cross a line: their structure is pickled, their tensors go beside it.

Each tensor of a message has a tag. `VALUE` tensors bring their numbers along; the others are known on the other side
by a number: a tensor of the source module (`SOURCE`), or an argument of the call (`ARGUMENT`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.engines.processes import plain
from instep.engines.processes.freight import Depot, Parcel
from instep.engines.processes.hold import Cargo, Hold
from instep.engines.processes.orders import Order
from instep.engines.processes.wire import Line, Message

VALUE, SOURCE, ARGUMENT = "value", "source", "argument"

Tag = tuple[str, int]
"""What kind of tensor it is, and its number; for a value, whether it needs a gradient."""

Describe = Callable[[Tensor], Tag]
Rebuild = Callable[[Tag, Tensor | None], Tensor]


def by_value(tensor: Tensor) -> Tag:
    """A tensor that the other side knows nothing of."""
    return VALUE, int(tensor.requires_grad)


def as_sent(tag: Tag, tensor: Tensor | None) -> Tensor:
    """A tensor whose numbers were sent."""
    assert tensor is not None
    return tensor.requires_grad_() if tag[1] else tensor


def of_answer(arguments: Sequence[Tensor], counterparts: Sequence[Tensor]) -> Rebuild:
    """The tensors of an answer: arguments and tensors of the module as they are here, the others as they were sent."""

    def rebuild(tag: Tag, tensor: Tensor | None) -> Tensor:
        if tag[0] == ARGUMENT:
            return arguments[tag[1]]
        if tag[0] == SOURCE:
            return counterparts[tag[1]]
        return as_sent(tag, tensor)

    return rebuild


class Sheet(NamedTuple):
    """A value that speaks of tensors by their places, with the tensors."""

    value: Any
    tensors: list[Tensor]
    loose: Sequence[Any] = ()
    """What in the value may be anything; the rest is numbers, texts, and lists, tuples and dictionaries of them."""


class Talk:
    """One end of a line, with what is known there of classes and functions that have crossed it."""

    def __init__(self, line: Line, *, home: bool) -> None:
        self.line = line
        self.depot = Depot(home)
        self.hold: Hold | None = None
        """By which tensors of an accelerator cross that both sides work on."""

    def say(
        self,
        kind: str,
        call: int,
        value: Any,
        describe: Describe = by_value,
        *,
        fds: Sequence[int] = (),
        what: str = "",
    ) -> list[Tensor]:
        """Send a value; returns its tensors, in the order in which the other side gets them.

        Of an `Order` the other side gets the bare fields.
        """
        is_order = isinstance(value, Order)
        if is_order:
            short = plain.fields_to_plain(value.fields(), value.__dict__, value.LOOSE)
        else:
            short = plain.to_plain(value)
        if short is not None:
            return self._say_plain(kind, call, *short, describe, fds)
        parcel = self.depot.pack_fields(value, what) if is_order else self.depot.pack(value, what)
        tags = [describe(tensor) for tensor in parcel.tensors]
        sent, cargo = self._loaded(parcel.tensors, tags)
        try:
            self.line.send(kind, call, pickle.dumps((tags, parcel.body, cargo), 5), sent, fds)
        except BaseException:
            self.depot.forget()  # nobody has what was packed
            raise
        return parcel.tensors

    def _say_plain(
        self, kind: str, call: int, value: Any, tensors: list[Tensor], describe: Describe, fds: Sequence[int]
    ) -> list[Tensor]:
        tags = [describe(tensor) for tensor in tensors]
        sent, cargo = self._loaded(tensors, tags)
        self.line.send(kind, call, plain.dumps((tags, value, cargo)), sent, fds)
        return tensors

    def _loaded(self, tensors: Sequence[Tensor], tags: Sequence[Tag]) -> tuple[list[Tensor], tuple[Any, ...] | None]:
        """The tensors that a message brings along, and what it says of those that stay on an accelerator."""
        sent = [tensor.detach() for tensor, tag in zip(tensors, tags, strict=True) if tag[0] == VALUE]
        if self.hold is None:
            return sent, None
        sent, cargo = self.hold.load(sent)
        return sent, cargo.bare()

    def _unloaded(self, message: Message, cargo: tuple[Any, ...] | None) -> Iterator[Tensor]:
        """The same on the other side."""
        if self.hold is None or cargo is None:
            return iter(message.tensors)
        return iter(self.hold.unload(message.tensors, Cargo.of(cargo), self.line.shore))

    def say_sheet(self, kind: str, call: int, sheet: Sheet) -> None:
        """Send a sheet, in a shorter way than other values."""
        on_host = self.hold is None or all(tensor.device.type == "cpu" for tensor in sheet.tensors)
        if on_host and all(map(plain.is_empty, sheet.loose)) and all(map(plain.is_bare, sheet.tensors)):
            self.line.send(kind, call, plain.dumps((None, sheet.value)), sheet.tensors)
        else:
            self.say(kind, call, (sheet.value, sheet.tensors))

    def take_sheet(self, message: Message) -> tuple[Any, Sequence[Tensor]]:
        """The value of a sheet, and its tensors."""
        if self.line.shore is not None:
            self.line.shore.check()
        found = plain.loads(message.body)
        if found is not None and found[0] is None:
            return found[1], message.tensors
        value, tensors = self.take(message)[0]
        return value, tensors

    def take(self, message: Message, rebuild: Rebuild = as_sent) -> tuple[Any, list[Tensor]]:
        """The value of a message, and its tensors in the order in which they were sent.

        What is unpickled here comes from our own worker or from the process that started it, over a line that nobody
        else can join.
        """
        if self.line.shore is not None:
            self.line.shore.check()
        found = plain.loads(message.body)
        if found is not None:
            tags, value, cargo = found
            sent = self._unloaded(message, cargo)
            tensors = [rebuild(tag, next(sent) if tag[0] == VALUE else None) for tag in tags]
            return plain.from_plain(value, tensors), tensors
        tags, body, cargo = pickle.loads(message.body)
        sent = self._unloaded(message, cargo)
        tensors = [rebuild(tag, next(sent) if tag[0] == VALUE else None) for tag in tags]
        return self.depot.unpack(Parcel(body, tensors)), tensors
