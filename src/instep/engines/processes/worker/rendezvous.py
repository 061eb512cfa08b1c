"""Collectives of a worker's replica with the others, through the parent."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from instep.collectives.exchange import all_gather_by_exchange, decode_payload, encode_payload, stage_on_host
from instep.collectives.group import PeerFailure
from instep.engines.processes import messages
from instep.engines.processes.transport.channel import Channel, FlatValue
from instep.engines.processes.transport.connection import Connection, Message
from instep.runtime.modes import set_inference_mode


class Inbox:
    """Messages to a worker. Those that arrive while its replica waits in a collective are deferred."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deferred: deque[Message] = deque()

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None if none arrives within `timeout` seconds."""
        return self._deferred.popleft() if self._deferred else self._connection.receive(timeout)

    def receive_collective_result(self, call_id: int) -> Message:
        """Wait for the result of a collective; defer other messages."""
        for position, message in enumerate(self._deferred):
            if message.kind == messages.COLLECTIVE_RESULT and message.call_id == call_id:
                del self._deferred[position]
                return message
        with set_inference_mode(False):  # messages of other calls are decoded outside of this call's mode
            while (received := self._connection.receive()) is not None:
                if received.kind == messages.COLLECTIVE_RESULT and received.call_id == call_id:
                    return received
                self._deferred.append(received)
                if received.kind == messages.STOP:
                    break
        raise PeerFailure("the worker was stopped.")


class WorkerRendezvous:
    """The `Group` of a worker's replica. The parent runs the exchange."""

    joint_graph = False

    def __init__(self, channel: Channel, inbox: Inbox, call_id: int, count: int) -> None:
        self._channel, self._inbox = channel, inbox
        self._call = call_id
        self._count = count
        """The number of replicas."""

    def enter(self, index: int) -> None:
        """Nothing to do: the parent decides when this replica runs."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """Nothing to do: the reply tells the parent."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        tensors: list[Tensor] = []
        encoded = encode_payload(stage_on_host(payload), tensors)
        self._channel.send_flat(
            messages.COLLECTIVE, self._call, FlatValue((index, label, encoded), tensors, [payload.metadata])
        )
        (encoded_payloads, error), received = self._channel.decode_flat(
            self._inbox.receive_collective_result(self._call)
        )
        if error is not None:
            raise PeerFailure(error) if isinstance(error, str) else error
        return [decode_payload(encoded, received) for encoded in encoded_payloads]

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        return all_gather_by_exchange(self, index, self._count, label, row)
