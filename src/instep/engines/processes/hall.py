"""Where a worker's replica meets the others."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

from instep.engines.processes import orders
from instep.engines.processes.talk import Sheet, Talk
from instep.engines.processes.wire import Line, Message
from instep.meeting import PeerFailed
from instep.modes import inference
from instep.packages import from_bare, lift, to_bare


class Mail:
    """The messages to a worker. What comes while its replica waits for the others is for later."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._later: deque[Message] = deque()

    def next(self) -> Message | None:
        """The message to see to."""
        return self._later.popleft() if self._later else self._line.receive()

    def of_meeting(self, call: int) -> Message:
        """What came of a meeting in a call."""
        for place, message in enumerate(self._later):
            if message.kind == orders.MET and message.call == call:
                del self._later[place]
                return message
        with inference(False):  # the mode of this call is none of the others'
            while (new := self._line.receive()) is not None:
                if new.kind == orders.MET and new.call == call:
                    return new
                self._later.append(new)
                if new.kind == orders.STOP:
                    break
        raise PeerFailed("the worker is to end.")


class Hall:
    """Where this replica meets the others: in the process that started it."""

    joint = False

    def __init__(self, talk: Talk, mail: Mail, call: int) -> None:
        self._talk, self._mail = talk, mail
        self._call = call

    def enter(self, index: int) -> None:
        """It is this replica's turn: nobody asks it otherwise."""

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """The others hear of it by the answer."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        tensors: list[Tensor] = []
        bare = to_bare(lift(payload), tensors)
        self._talk.say_sheet(orders.MEET, self._call, Sheet((index, label, bare), tensors, [payload.note]))
        (bares, error), received = self._talk.take_sheet(self._mail.of_meeting(self._call))
        if error is not None:
            raise PeerFailed(error) if isinstance(error, str) else error
        return [from_bare(bare, received) for bare in bares]
