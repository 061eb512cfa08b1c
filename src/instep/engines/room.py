"""A meeting of replicas that are threads of this process: nobody waits for one that will not come."""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from instep.engines.pool import as_replica
from instep.errors import CollectiveError
from instep.meeting import PeerFailed, first_error

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a replica that waits says for whom."""

FORWARD = "returned from forward"
BACKWARD = "came to the end of its backward"


class Room:
    """Where the replicas of one call, or of one backward, meet.

    With `in_turn` only one of them runs at a time: the first until it returns or waits for the others, then the next. A
    replica that is waited for and has no thread yet is given one by `start`. What replicas in turn have in common is
    put aside while another has its turn: `step_aside` returns what brings it back.
    """

    def __init__(
        self,
        names: Sequence[str],
        end: str,
        *,
        joint: bool = False,
        in_turn: bool = False,
        step_aside: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.joint = joint
        self._step_aside = step_aside if in_turn else None
        self.start: Callable[[int], None] | None = None
        self._names = list(names)
        self._end = end
        self._lock = threading.RLock()  # taken by itself: an interruption finds no line of Python to come in between
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._left: set[int] = set()
        self._round = 0
        self._unread = 0
        self._payloads: list[Any] = []
        self._broken: CollectiveError | None = None
        self._turn: int | None = 0 if in_turn else None
        self._threads: dict[int, int] = {}
        self._said = False

    def enter(self, index: int) -> None:
        """Begin a replica's part; waits for its turn, which does not come after a failure."""
        with self._lock:
            self._threads[index] = threading.get_ident()
            while self._turn is not None and self._turn != index:
                self._raise_broken()
                self._changed.wait()

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        go_on = self._step_aside() if self._step_aside is not None else None
        payloads = self._exchange(index, label, payload)
        if go_on is not None:
            go_on()
        return payloads

    def _exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        with self._lock:
            self._raise_broken()
            self._check(index, label)
            self._waiting[index] = (label, payload)
            awaited = self._round + 1
            if len(self._waiting) == len(self._names):
                self._payloads = [self._waiting[i][1] for i in range(len(self._names))]
                self._waiting = {}
                self._round, self._unread = awaited, len(self._names)
            self._pass_turn(start=True)
            while self._round < awaited or self._turn not in (None, index):
                self._raise_broken()
                self._wait(label)
            payloads = self._payloads
            self._unread -= 1
            if not self._unread:
                self._payloads = []
            return payloads

    def _wait(self, label: str) -> None:
        """Wait for a change; after a while say once what the others are doing, for one that runs may take its time."""
        if self._changed.wait(PATIENCE) or self._said:
            return
        self._said = True
        frames = sys._current_frames()
        able = [i for i in range(len(self._names)) if i not in self._waiting and i not in self._left]
        for index in able if self._turn is None else [self._turn]:
            frame = frames.get(self._threads.get(index, 0))
            stack = (
                "".join(traceback.format_stack(frame, 8))
                if frame is not None
                else "  (its thread has not come to it yet)\n"
            )
            warnings.warn(
                f"{label} has waited {PATIENCE:.0f} s for {self._names[index]}, which is at:\n{stack}", stacklevel=2
            )

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """End a replica's part: whoever waits for it, waits no longer."""
        with self._lock:
            self._left.add(index)
            self._waiting.pop(index, None)
            if error is not None:
                self._break(PeerFailed(f"{self._names[index]} failed with {type(error).__name__} before it came here."))
            elif self._waiting:
                waiting = min(self._waiting)
                self._break(self._missing(waiting, self._waiting[waiting][0], index))
            if self._turn == index:
                self._pass_turn(start=False)

    def close(self) -> None:
        """Let go of what nobody came for: graphs lead to the room, and must not lead on to themselves."""
        with self._lock:
            self._payloads, self._waiting, self.start = [], {}, None

    def abort(self) -> None:
        """Let nobody wait any longer: the caller was interrupted."""
        with self._lock:
            self._break(PeerFailed("the call was interrupted."))

    def _check(self, index: int, label: str) -> None:
        for other, (theirs, _) in self._waiting.items():
            if theirs != label:
                self._break(
                    CollectiveError(
                        f"the replicas came to different operations.\n"
                        f"  {self._names[other]} called {theirs}\n"
                        f"  {self._names[index]} called {label}\n"
                        f"Every replica has to make the same calls in the same order: take them out of branches that "
                        f"depend on the shard, and give them the same structure, sizes and dtypes."
                    )
                )
        if self._left:
            self._break(self._missing(index, label, min(self._left)))
        self._raise_broken()

    def _missing(self, waiting: int, label: str, gone: int) -> CollectiveError:
        return CollectiveError(
            f"{self._names[waiting]} called {label}, and {self._names[gone]} {self._end} without it.\n"
            f"Every replica has to make the same calls: take them out of branches and loops that depend on the shard."
        )

    def _break(self, error: CollectiveError) -> None:
        if self._broken is None:
            self._broken = error
        self._changed.notify_all()

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)

    def _pass_turn(self, start: bool) -> None:
        """Let the first replica run that is neither waiting nor gone."""
        if self._turn is not None:
            able = [i for i in range(len(self._names)) if i not in self._waiting and i not in self._left]
            if able:
                self._turn = able[0]
                if start and self.start is not None:
                    self.start(able[0])
        self._changed.notify_all()


def run_here(tasks: Sequence[Callable[[], T]], room: Room, stop: Callable[[T], bool]) -> list[T]:
    """Run tasks one after another in this thread, until a result says stop.

    A task that the others wait for in the middle of their own runs in a thread of its own; still one runs at a time.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    threads: dict[int, threading.Thread] = {}

    def work(index: int) -> None:
        try:
            with as_replica():
                results[index] = tasks[index]()
        except BaseException as error:
            errors[index] = error

    def begin(index: int) -> None:
        if index > current and index not in threads:
            thread = threads[index] = threading.Thread(
                target=work, args=(index,), name=f"instep-turn-{index}", daemon=True
            )
            thread.start()

    room.start = begin
    current = 0
    try:
        for current, task in enumerate(tasks):
            if current not in threads:
                results[current] = task()
                if stop(results[current]):
                    break
        _join(threads)
    except BaseException as error:
        errors[current] = error
        room.abort()
    finally:
        _join(threads)
        room.close()
    if errors:
        raise first_error(errors)
    return [results[index] for index in sorted(results)]


def _join(threads: dict[int, threading.Thread]) -> None:
    for thread in threads.values():
        if thread.ident is not None:  # an interruption may come before one has started
            thread.join()
