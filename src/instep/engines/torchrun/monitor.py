"""Finding out where other ranks are, if one does not arrive."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

from instep.errors import RankFailure

_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
"""How long a rank that asks waits for the answers of the others."""
_STACK_FRAMES = 6
_MAX_LISTED = 16


class RankMonitor:
    """Answers, from a thread of its own, what this rank is doing, and asks the others."""

    def __init__(self, store: Any, rank: int, count: int, main_thread: int) -> None:
        """
        Args:
            store: A store that all ranks share, and that only monitors use.
            rank: This rank.
            count: The number of ranks.
            main_thread: The id of the thread whose stack is shown.
        """
        self._store, self._rank, self._count, self._main_thread = store, rank, count, main_thread
        self._current = ""
        """The step at which this rank waits for others; empty if it does not."""
        self._last = "none"
        self._since = 0.0
        self._waiting = _Waiting(self)
        self._stopped = threading.Event()
        thread = threading.Thread(target=_answer, args=(weakref.ref(self), self._stopped), daemon=True)
        thread.name = "instep rank monitor"
        thread.start()

    def waiting(self, step: str) -> AbstractContextManager[None]:
        """Context manager: this rank waits for others at a step, until the context is left."""
        self._waiting.step = step
        return self._waiting

    def start_waiting(self, step: str) -> None:
        """This rank waits for others from now on."""
        self._current = self._last = step
        self._since = time.monotonic()

    def stop_waiting(self) -> None:
        """The step is over."""
        self._current = ""

    def close(self) -> None:
        """Leave a last answer for the others, when this process exits."""
        self._stopped.set()
        with suppress(Exception):  # the store may have ended before
            reason = "has failed" if hasattr(sys, "last_value") else "has come to the end of its script"
            self._store.set(f"ended/{self._rank}", f"{reason}. Its last call: {self._last}")

    def answer(self, answered: int) -> int:
        """Answer the questions after number `answered`; returns the number of the last one."""
        asked = int(self._store.add("asked", 0))
        if asked > answered:
            self._store.set(f"answer/{asked}/{self._rank}", self._describe())
        return asked

    def _describe(self) -> str:
        if self._current:
            return f"waits for the others in {self._current}"
        frame = sys._current_frames().get(self._main_thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-_STACK_FRAMES:]).rstrip()
        return f"is not in a call of instep. It is at:\n{stack}"

    def describe_failure(self) -> RankFailure:
        """The error for an exchange that failed: where every other rank is, or that it does not answer."""
        waited = time.monotonic() - self._since
        headline = f"rank {self._rank} waited {waited:.0f} s for the other ranks in {self._current}."
        try:
            answers = self._ask()
        except Exception as failure:  # the process with the store has ended
            return RankFailure(
                f"{headline}\nThe store of the ranks does not answer ({type(failure).__name__}): the process of rank "
                f"0, or its machine, has probably ended."
            )
        silent = "does not answer: its process has ended, or its network is cut off"
        others = [rank for rank in range(self._count) if rank != self._rank]
        lines = [f"  rank {rank} {answers.get(rank, silent)}" for rank in others]
        shown = "\n".join(lines[:_MAX_LISTED])
        return RankFailure(
            f"{headline}\n{shown}\n"
            f"Every rank has to make the same calls. A step for one rank only calls the module itself: "
            f"model.module(...). If a rank is only slow: DataParallel(..., timeout=...)."
        )

    def _ask(self) -> dict[int, str]:
        number = int(self._store.add("asked", 1))
        pending = set(range(self._count)) - {self._rank}
        answers: dict[int, str] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while pending and time.monotonic() < deadline:
            for rank in sorted(pending):
                if self._store.check([f"ended/{rank}"]):
                    answers[rank] = self._store.get(f"ended/{rank}").decode()
                    pending.discard(rank)
                    continue
                # several ranks may ask at once: each answer is under the number of a later question too
                for asked in range(number, int(self._store.add("asked", 0)) + 1):
                    key = f"answer/{asked}/{rank}"
                    if self._store.check([key]):
                        answers[rank] = self._store.get(key).decode()
                        pending.discard(rank)
                        break
            time.sleep(0.1)
        return answers


class _Waiting:
    """Context manager of a wait. One object for all of them, because every exchange waits."""

    def __init__(self, monitor: RankMonitor) -> None:
        self._monitor, self.step = weakref.proxy(monitor), ""

    def __enter__(self) -> None:
        self._monitor.start_waiting(self.step)

    def __exit__(self, *_: object) -> None:
        self._monitor.stop_waiting()


def _answer(monitor_ref: weakref.ref[RankMonitor], stopped: threading.Event) -> None:
    answered = 0
    while not stopped.wait(_POLL_SECONDS):
        monitor = monitor_ref()
        if monitor is None:
            return
        try:
            answered = monitor.answer(answered)
        except Exception:  # the store has ended, and with it the job
            return
        del monitor
