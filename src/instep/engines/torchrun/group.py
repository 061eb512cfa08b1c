"""The group of replicas that are ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.collectives.exchange import decode_payload, encode_payload
from instep.collectives.group import describe_row
from instep.engines.torchrun.channel import Message, RankChannel


class RankGroup:
    """The ranks of one forward or backward."""

    joint_graph = False

    def __init__(self, channel: RankChannel, operation: str, count: int) -> None:
        """`count` is the number of ranks that have a replica in this call, the first ones."""
        self._channel, self._operation, self._count = channel, operation, count
        self.broken: list[Message] | None = None
        """The messages of the exchange after which the ranks are no longer in step."""

    def enter(self, index: int) -> None:
        """Nothing to wait for: each rank runs one replica."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """The last exchange of the operation tells the others how a replica has ended."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:  # noqa: ARG002
        tensors: list[Tensor] = []
        encoded = encode_payload(payload, tensors)
        messages = self._exchange(label, encoded, tensors)
        return [decode_payload(message.body, message.tensors) for message in messages[: self._count]]

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:  # noqa: ARG002
        messages = self._exchange(describe_row(label, row), None, [row])
        return torch.stack([message.tensors[0] for message in messages[: self._count]])

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
