"""Where a worker's replica meets the others."""

from __future__ import annotations

from typing import Any

from instep.engines.processes import orders
from instep.engines.processes.talk import Talk
from instep.errors import EngineError
from instep.meeting import from_bare, to_bare


class Hall:
    """Where this replica meets the others: in the process that started it."""

    joint = False

    def __init__(self, talk: Talk, call: int) -> None:
        self._talk = talk
        self._call = call

    def enter(self, index: int) -> None:
        """It is this replica's turn: nobody asks it otherwise."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """The others hear of it by the answer."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        self._talk.say(orders.MEET, self._call, (index, label, to_bare(payload)))
        message = self._talk.line.receive()
        if message is None or message.kind != orders.MET or message.call != self._call:
            raise EngineError("the line to the other replicas brought something else than their answer.")
        (payloads, error), _ = self._talk.take(message)
        if error is not None:
            raise error
        return [from_bare(*payload) for payload in payloads]
