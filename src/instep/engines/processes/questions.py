"""What a worker is asked besides its parts of calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from instep.engines.processes.call import Call
from instep.engines.processes.desk import Desk
from instep.engines.processes.hearing import Hearing
from instep.engines.processes.waiting import Box
from instep.reaching import Reach


class ReachPart:
    """Where one replica's backward from some of its outputs would meet the others."""

    def __init__(self, call: Call, outputs: Sequence[Tensor]) -> None:
        self._call = call
        self._outputs = outputs
        self._box: Box

    def ask(self, desk: Desk) -> Box:
        call = self._call
        spent = call.at(desk, self._outputs)
        self._box = desk.ask_reach(call.number, [call.outputs[id(output)] for output in self._outputs], spent)
        return self._box

    def hear(self, desk: Desk) -> Hearing[Reach]:
        found, _ = desk.talk.take((yield from desk.hear(self._box, self._call.met)))
        assert isinstance(found, Reach)
        return found


class NearPart:
    """Whether tensors can stay on the device that a worker and this process both work on."""

    def ask(self, desk: Desk) -> None:
        """It was tried when the worker took its device."""

    def hear(self, desk: Desk) -> Hearing[bool]:
        yield from ()
        return desk.near
