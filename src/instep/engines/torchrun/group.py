"""The group of replicas that are ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from instep.collectives.exchange import decode_payload, encode_payload
from instep.collectives.group import describe_row
from instep.engines.torchrun.channel import Message, RankChannel
from instep.engines.torchrun.row_order import Row, RowOrders
from instep.errors import LostExchange, RankFailure


class RankGroup:
    """The ranks of one forward or backward."""

    joint_graph = False

    def __init__(self, channel: RankChannel, operation: str, count: int) -> None:
        """`count` is the number of ranks that have a replica in this call, the first ones."""
        self._channel, self._operation, self._count = channel, operation, count
        self._order_key: Hashable = None
        """The kind of this operation, if its rows are recorded."""
        self.expected: Sequence[Row] = ()
        """The rows that all ranks expect each other to gather."""
        self.rows: list[Row] = []
        """The rows that this rank has gathered."""
        self._only_rows = count == channel.count
        """Whether every rank has a replica, and nothing but rows was exchanged."""
        self.left_order = False
        """Whether this rank made other collective calls than those that were expected."""
        self.broken: list[Message] | None = None
        """The messages of the exchange after which the ranks are no longer in step."""

    def expect_rows(self, orders: RowOrders, key: Hashable) -> None:
        """Expect the rows of earlier operations of this kind, if they are known."""
        self._order_key = key
        if self._only_rows:
            self.expected = orders.expected(key)

    def record_rows(self, orders: RowOrders) -> None:
        """Record the rows, at the end of an operation in which no rank has failed."""
        if self._only_rows and self._order_key is not None and not self.expected:
            orders.record(self._order_key, self.rows)

    def forget_rows(self, orders: RowOrders) -> None:
        """A rank did not gather the rows that were expected."""
        if self.expected:
            orders.forget(self._order_key)

    def enter(self, index: int) -> None:
        """Nothing to wait for: each rank runs one replica."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """The last exchange of the operation tells the others how a replica has ended."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:  # noqa: ARG002
        self._only_rows = False
        if self.expected:
            self._leave_order()
        tensors: list[Tensor] = []
        encoded = encode_payload(payload, tensors)
        messages = self._exchange(label, encoded, tensors)
        return [decode_payload(message.body, message.tensors) for message in messages[: self._count]]

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:  # noqa: ARG002
        described = Row.describe(label, row)
        if self.expected:
            at = len(self.rows)
            if self.left_order or at >= len(self.expected) or self.expected[at] != described:
                self._leave_order()
            rows = self._channel.gather_row(self._operation, row)
            self.rows.append(described)
            return rows
        self.rows.append(described)
        messages = self._exchange(describe_row(label, row), None, [row])
        return torch.stack([message.tensors[0] for message in messages[: self._count]])

    def finish(self, *, failed: bool) -> Exception | None:
        """Take part in the gathers that the other ranks still expect, at the end of the forward or backward.

        Returns the error of a device that can no longer be used.
        """
        rest = self.expected[len(self.rows) :]
        self.left_order = self.left_order or bool(rest and not failed)
        try:
            for row in rest:
                self._channel.gather_row(self._operation, row.zeros())
        except RankFailure:
            raise
        except Exception as error:
            return error
        return None

    def _leave_order(self) -> NoReturn:
        self.left_order = True
        raise LostExchange("this rank made other collective calls than in the last calls.")

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        return None

    def _exchange(self, label: str, body: Any, tensors: Sequence[Tensor]) -> list[Message]:
        messages = self._channel.exchange(Message(self._operation, label, body=body, tensors=tensors))
        try:
            self._channel.check(messages)
        except Exception:
            self.broken = messages
            raise
        return messages
