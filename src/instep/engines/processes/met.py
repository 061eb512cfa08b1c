"""What a worker's replica met the others for, in the process that asks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from instep.engines.processes.hearing import Hearing
from instep.engines.processes.shore import Passage
from instep.engines.processes.talk import Sheet
from instep.errors import EngineError
from instep.packages import Bare, Package, from_bare, to_bare


class Hosted(Protocol):
    """A meeting that replicas of other processes take part in."""

    def receive(self, index: int, label: str, payload: Package) -> Hearing[list[Any]]:
        """Let a replica come, and say what all have brought."""
        ...


class Met:
    """What one replica met the others for in a call, and what came of it: a worker that begins again is told that."""

    def __init__(self, room: Hosted, passage: Passage) -> None:
        self._room: Hosted | None = room
        self._passage = passage
        self._answers: list[Sheet] = []
        self._told = 0

    def begin(self) -> None:
        """The call begins, or begins again."""
        self._told = 0

    def end(self) -> None:
        """Nobody is met any longer: the answers are all that there is."""
        self._room = None

    def watch(self, glance: Callable[[], bool]) -> None:
        """Let whoever waits for another replica see whether this one has failed."""
        glances: list[Callable[[], bool]] | None = getattr(self._room, "glances", None)
        if glances is not None:
            glances.append(glance)

    def look(self) -> None:
        """A moment has passed in which this replica was not heard of."""
        look: Any = getattr(self._room, "look", None)
        if look is not None:
            look()

    def somebody_failed(self) -> bool:
        """Whether a worker has failed, so that the call is lost."""
        asked: Any = getattr(self._room, "somebody_failed", None)
        return asked is not None and bool(asked())

    def meet(self, index: int, label: str, bare: Bare, tensors: Sequence[Tensor]) -> Hearing[Sheet]:
        """What the replicas brought, or why they did not come."""
        if self._told < len(self._answers):
            answer = self._answers[self._told]
        elif self._room is None:
            again = EngineError(f"a forward that was run again came to {label}, where it had not been before.")
            answer = refusal(again)
        else:
            try:
                packages = yield from self._room.receive(index, label, from_bare(bare, tensors))
                answer = _answer(packages, index)
                if any(tensor.device.type != "cpu" for tensor in answer.tensors):
                    self._passage.catch_up()
            except Exception as error:
                answer = refusal(error)
            self._answers.append(answer)
        self._told += 1
        return answer


def _answer(packages: Sequence[Package], index: int) -> Sheet:
    """What the replicas brought for one of them."""
    tensors: list[Tensor] = []
    bares = [to_bare(package, tensors, index) for package in packages]
    return Sheet((bares, None), tensors, [package.note for package in packages])


def refusal(error: Exception | str) -> Sheet:
    """Why they did not come."""
    return Sheet((None, error), [], [error])
