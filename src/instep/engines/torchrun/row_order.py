"""The rows that a forward or backward gathers, in order, known from earlier calls.

Before a collective, ranks exchange a message on the host, which shows a rank that is about to do something else. In a
call like the last ones that would only repeat what is known. Each rank then compares its collectives with those of the
earlier calls, which were the same on all ranks, and gathers the rows alone. A rank that fails, or that calls another
collective, first gathers zeros in place of the rows that the others still expect, and says so in the last message.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_ORDERS = 64
_MAX_REPEATS = 2**20


class Row(NamedTuple):
    """What ranks have to agree on in an all-gather: for example that of the statistics of a batch norm layer."""

    label: str
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    @classmethod
    def describe(cls, label: str, row: Tensor) -> Row:
        return cls(label, row.dtype, row.shape, row.device)

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass
class _Order:
    rows: tuple[Row, ...] = ()
    repeats: int = 0
    """How often these rows were gathered in a row, after the first time."""
    needed: int = 1
    """The repeats after which the rows are expected. Doubles when they were expected and did not come."""


class RowOrders:
    """The rows of each kind of operation. All ranks record the same ones."""

    def __init__(self) -> None:
        self._orders: dict[Hashable, _Order] = {}

    def expected(self, key: Hashable) -> tuple[Row, ...]:
        """The rows that the next operation of this kind will gather; empty if that is not known."""
        order = self._orders.get(key)
        return order.rows if order is not None and order.repeats >= order.needed else ()

    def record(self, key: Hashable, rows: Sequence[Row]) -> None:
        """Record the rows of an operation in which all ranks gathered the same ones, with messages."""
        if key not in self._orders and len(self._orders) >= _MAX_ORDERS:
            self._orders.clear()
        order = self._orders.setdefault(key, _Order())
        order.repeats = order.repeats + 1 if order.rows == tuple(rows) else 0
        order.rows = tuple(rows)

    def forget(self, key: Hashable) -> None:
        """The expected rows did not come: do not expect any for a while."""
        order = self._orders.get(key)
        if order is not None:
            order.repeats, order.needed = 0, min(2 * order.needed, _MAX_REPEATS)
