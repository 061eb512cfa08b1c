"""What a worker's replica met the others for, in the process that asks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from instep.engines.processes.shore import Passage
from instep.errors import EngineError
from instep.meeting import Bare, Meeting, from_bare, to_bare


class Met:
    """What one replica met the others for in a call, and what came of it: a worker that begins again is told that."""

    def __init__(self, room: Meeting, passage: Passage) -> None:
        self._room: Meeting | None = room
        self._passage = passage
        self._answers: list[Any] = []
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

    def somebody_failed(self) -> bool:
        """Whether a worker has failed, so that the call is lost."""
        asked: Any = getattr(self._room, "somebody_failed", None)
        return asked is not None and bool(asked())

    def exchange(self, index: int, label: str, payload: Bare) -> Any:
        """What the replicas brought, or why they did not come."""
        if self._told < len(self._answers):
            answer = self._answers[self._told]
        elif self._room is None:
            answer = None, EngineError(f"a forward that was run again came to {label}, where it had not been before.")
        else:
            try:
                packages = self._room.exchange(index, label, from_bare(*payload))
                answer = [to_bare(package, index) for package in packages], None
                self._passage.catch_up()
            except Exception as error:
                answer = None, error
            self._answers.append(answer)
        self._told += 1
        return answer
