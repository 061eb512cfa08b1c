"""Collectives of a worker's replica with the others, through the parent."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from instep.collectives.exchange import decode_payload, encode_payload, stage_on_host
from instep.collectives.group import PeerFailure
from instep.engines.processes import messages
from instep.engines.processes.transport.channel import Channel, FlatValue
from instep.engines.processes.transport.connection import Connection, Message
from instep.runtime.modes import set_inference_mode


class Inbox:
    """The messages to a worker. What comes while its replica waits for the others is for later."""

    def __init__(self, line: Connection) -> None:
        self._connection = line
        self._deferred: deque[Message] = deque()

    def receive(self) -> Message | None:
        """The message to see to."""
        return self._deferred.popleft() if self._deferred else self._connection.receive()

    def receive_collective_result(self, call: int) -> Message:
        """What came of a meeting in a call."""
        for place, message in enumerate(self._deferred):
            if message.kind == messages.COLLECTIVE_RESULT and message.call_id == call:
                del self._deferred[place]
                return message
        with set_inference_mode(False):  # the mode of this call is none of the others'
            while (new := self._connection.receive()) is not None:
                if new.kind == messages.COLLECTIVE_RESULT and new.call_id == call:
                    return new
                self._deferred.append(new)
                if new.kind == messages.STOP:
                    break
        raise PeerFailure("the worker is to end.")


class WorkerRendezvous:
    """Where this replica meets the others: in the process that started it."""

    joint_graph = False

    def __init__(self, talk: Channel, mail: Inbox, call: int) -> None:
        self._channel, self._inbox = talk, mail
        self._call = call

    def enter(self, index: int) -> None:
        """It is this replica's turn: nobody asks it otherwise."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """The others hear of it by the answer."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        tensors: list[Tensor] = []
        bare = encode_payload(stage_on_host(payload), tensors)
        self._channel.send_flat(
            messages.COLLECTIVE, self._call, FlatValue((index, label, bare), tensors, [payload.metadata])
        )
        (bares, error), received = self._channel.decode_flat(self._inbox.receive_collective_result(self._call))
        if error is not None:
            raise PeerFailure(error) if isinstance(error, str) else error
        return [decode_payload(bare, received) for bare in bares]
