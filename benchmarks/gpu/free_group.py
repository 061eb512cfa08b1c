"""A process group whose collectives do nothing, to measure what a step costs without communication."""

from __future__ import annotations


class FreeGroup:
    """Takes the place of torch's NCCL group. Its collectives are complete at once, and send nothing."""

    def broadcast(self, *_: object) -> FreeGroup:
        return self

    reduce = broadcast

    def wait(self) -> None:
        """Nothing to wait for."""

    def abort(self) -> None:
        """Nothing to end."""


def make_group(*_: object) -> FreeGroup:
    return FreeGroup()
