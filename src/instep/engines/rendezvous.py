"""The group of replicas that are threads of this process."""

from __future__ import annotations

import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from instep.collectives.group import PeerFailure, first_error
from instep.engines.thread_pool import as_replica_thread
from instep.errors import CollectiveError
from instep.runtime.debugger import is_debugger_attached, is_in_debugger
from instep.runtime.locks import run_uninterrupted, start_thread


def thread_cpu_times(task: int) -> list[str]:
    """How long a thread has worked, as the system counts; nothing where it does not say."""
    try:
        with open(f"/proc/self/task/{task}/stat") as file:
            return file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return []


T = TypeVar("T")

WARN_AFTER_SECONDS = 60.0
"""Seconds after which a replica that waits says for whom."""

_POLL_SECONDS = 0.2
"""Seconds after which whoever waits looks again, without a bell."""

_UNSTARTED_POLLS = 5
"""So many times, before a thread that has not begun is taken for one that never will."""

LEFT_FORWARD = "returned from forward"
LEFT_BACKWARD = "came to the end of its backward"


class Rendezvous:
    """Where the replicas of one call, or of one backward, meet.

    With `in_turn` only one of them runs at a time: the first until it returns or waits for the others, then the next. A
    replica that is waited for and has no thread yet is given one by `start`. What replicas in turn have in common is
    put aside while another has its turn: `step_aside` returns what brings it back. Whoever has waited for `timeout`
    seconds, in which the others have not moved, waits no longer.
    """

    def __init__(
        self,
        names: Sequence[str],
        exit_description: str,
        *,
        joint_graph: bool = False,
        serialized: bool = False,
        suspend: Callable[[], Callable[[], None]] | None = None,
        timeout: float = inf,
    ) -> None:
        self.joint_graph = joint_graph
        self._timeout = inf if serialized else timeout
        self.timeout_error: CollectiveError | None = None
        """That some replica was waited for too long: it may never come to an end."""
        self._suspend = suspend if serialized else None
        self.start_replica: Callable[[int], None] | None = None
        self._names = list(names)
        self._exit_description = exit_description
        # Each replica waits for a bell of its own and looks again by itself: no wait needs the lock, whose owner may be
        # interrupted. It is Python's own lock, taken without a line of Python between.
        self._lock = threading.RLock()
        self._wakeups: list[SimpleQueue[None]] = [SimpleQueue() for _ in names]
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._finished: set[int] = set()
        self._round = 0
        self._unread = 0
        self._payloads: list[Any] = []
        self._broken_error: CollectiveError | None = None
        self._turn: int | None = 0 if serialized else None
        self._thread_ids: dict[int, int] = {}
        self._native_ids: dict[int, int] = {}
        """What the system calls these threads."""
        self._warned = False
        self.stack_providers: dict[int, Callable[[], str]] = {}
        """What says where a replica stands whose thread here only waits for it."""

    def enter(self, index: int) -> None:
        """Begin a replica's part; waits for its turn. After a failure its part is not begun."""
        with self._lock:
            self._thread_ids[index], self._native_ids[index] = threading.get_ident(), threading.get_native_id()
        self._wait_for_round(index)

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        go_on = self._suspend() if self._suspend is not None else None
        payloads = self._exchange(index, label, payload)
        if go_on is not None:
            go_on()
        return payloads

    def _exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        try:
            awaited = self._arrive(index, label, payload)
            self._wait_for_round(index, awaited, label)
            return self._collect(awaited)
        except Exception:
            raise
        except BaseException:  # an interruption: others may have their turn, and this replica must not run beside them
            run_uninterrupted(self.abort)
            self._wait_for_turn(index)
            raise

    def _arrive(self, index: int, label: str, payload: Any) -> int:
        """Come to a meeting, and wait for nobody; the number of the round that it is in."""
        with self._lock:
            self._raise_if_broken()
            self._check_label(index, label)
            self._waiting[index] = (label, payload)
            awaited = self._round + 1
            if len(self._waiting) == len(self._names):
                self._payloads = [self._waiting[i][1] for i in range(len(self._names))]
                self._waiting = {}
                self._round, self._unread = awaited, len(self._names)
            self._pass_turn(start=True)
        return awaited

    def _collect(self, awaited: int) -> list[Any]:
        """What all have brought to a round; if they have not, the failure that keeps them from it."""
        with self._lock:
            if self._round < awaited:
                self._raise_if_broken()
            payloads = self._payloads
            self._unread -= 1
            if not self._unread:
                self._payloads = []
            return payloads

    def is_broken(self) -> bool:
        """Whether replicas meet no longer, for one of them failed."""
        return self._broken_error is not None

    def _wait_for_round(self, index: int, awaited: int = 0, label: str | None = None) -> None:
        """Wait for a round, and for one's turn; after a failure for the turn alone, and raise it."""
        since, stood = time.monotonic(), None
        patience = min(WARN_AFTER_SECONDS, self._timeout / 2)
        while True:
            with self._lock:
                mine = self._turn in (None, index)
                if mine and self._round >= awaited and (awaited or self._turn is None or self._broken_error is None):
                    return
                if self._is_turn_free(index):
                    self._raise_if_broken()
            waited = time.monotonic() - since
            if self._wait_wakeup(index) or label is None or waited < patience:
                continue
            if not self._warned:
                self._warned = True
                self._warn_slow(label, waited, self._awaited_replicas())
            stands = self._thread_positions()
            if stands != stood:
                since, stood = max(since, time.monotonic() - patience), stands
            elif waited > self._timeout and stands:
                self._fail_with_timeout(label, waited)

    def _wait_for_turn(self, index: int) -> None:
        """After a failure, wait until no other replica has its turn."""
        while not self._is_turn_free(index):
            self._wait_wakeup(index)

    def _is_turn_free(self, index: int) -> bool:
        """Whether no other replica has its turn."""
        turn = self._turn
        return turn in (None, index) or turn in self._finished or turn not in self._thread_ids

    def _wait_wakeup(self, index: int) -> bool:
        """Wait for a change, and not for long: the bell may have rung for an interruption."""
        try:
            self._wakeups[index].get(timeout=min(_POLL_SECONDS, WARN_AFTER_SECONDS))
        except Empty:
            return False
        return True

    def _wake_all(self) -> None:
        for bell in self._wakeups:
            if bell.empty():
                bell.put(None)

    def _awaited_replicas(self) -> list[int]:
        """The replicas that others wait for."""
        able = [i for i in range(len(self._names)) if i not in self._waiting and i not in self._finished]
        return able if self._turn is None else [self._turn]

    def _thread_positions(self) -> dict[int, tuple[int, int, list[str]]]:
        """Where the threads stand that are waited for, and how long they have worked; nothing where a debugger may
        hold one of them.

        Of one that only waits for another process nothing is said here: whoever listens there sees to that.
        """
        frames = sys._current_frames()
        awaited = {
            i: frames.get(self._thread_ids.get(i, 0)) for i in self._awaited_replicas() if i not in self.stack_providers
        }
        if is_debugger_attached() or any(map(is_in_debugger, awaited.values())):
            return {}
        there = {i: frame for i, frame in awaited.items() if frame is not None}
        return {i: (id(frame), frame.f_lasti, thread_cpu_times(self._native_ids[i])) for i, frame in there.items()}

    def _fail_with_timeout(self, label: str, waited: float) -> None:
        names = " and ".join(self._names[index] for index in self._awaited_replicas())
        with self._lock:
            self.timeout_error = CollectiveError(
                f"{label} has waited {waited:.0f} s for {names}, and nothing has moved there:\n"
                f"{''.join(map(self._format_stack, self._awaited_replicas()))}"
                f"Let no replica wait for another but in instep's own operations: one may hold a lock that another "
                f"needs. If it only takes long: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )
            self._break(self.timeout_error)

    def check_timeout(self) -> None:
        """Raise that a replica was waited for too long."""
        if self.timeout_error is not None:
            raise self.timeout_error

    def _warn_slow(self, label: str, waited: float, awaited: Iterable[int]) -> None:
        """Say once what the others are doing, for one that runs may take its time."""
        for index in awaited:
            warnings.warn(
                f"{label} has waited {waited:.0f} s for {self._names[index]}, which is at:\n"
                f"{self._format_stack(index)}",
                stacklevel=2,
            )

    def _format_stack(self, index: int) -> str:
        if index in self.stack_providers:
            return self.stack_providers[index]()
        frame = sys._current_frames().get(self._thread_ids.get(index, 0))
        if frame is None:
            return "  (its thread has not come to it yet)\n"
        return "".join(traceback.format_stack(frame, 8))

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """End a replica's part: whoever waits for it, waits no longer."""
        with self._lock:
            self._finished.add(index)
            self._waiting.pop(index, None)
            if error is not None:
                self._break(
                    PeerFailure(f"{self._names[index]} failed with {type(error).__name__} before it came here.")
                )
            elif self._waiting:
                waiting = min(self._waiting)
                self._break(self._missing_error(waiting, self._waiting[waiting][0], index))
            if self._turn == index:
                self._pass_turn(start=False)

    def close(self) -> None:
        """Let go of what nobody came for: graphs lead to the room, and must not lead on to themselves."""
        with self._lock:
            self._payloads, self._waiting, self.start_replica = [], {}, None

    def abort(self) -> None:
        """Let nobody wait any longer: the caller was interrupted."""
        with self._lock:
            self._break(PeerFailure("the call was interrupted."))

    def _check_label(self, index: int, label: str) -> None:
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
        if self._finished:
            self._break(self._missing_error(index, label, min(self._finished)))
        self._raise_if_broken()

    def _missing_error(self, waiting: int, label: str, gone: int) -> CollectiveError:
        return CollectiveError(
            f"{self._names[waiting]} called {label}, and {self._names[gone]} {self._exit_description} without it.\n"
            f"Every replica has to make the same calls: take them out of branches and loops that depend on the shard."
        )

    def _break(self, error: CollectiveError) -> None:
        if self._broken_error is None:
            self._broken_error = error
        self._wake_all()

    def _raise_if_broken(self) -> None:
        if self._broken_error is not None:
            raise type(self._broken_error)(*self._broken_error.args)

    def _pass_turn(self, start: bool) -> None:
        """Let the first replica run that is neither waiting nor gone; after a failure, the first that is not gone."""
        if self._turn is not None:
            able = [i for i in range(len(self._names)) if i not in self._finished]
            if self._broken_error is not None:  # they come out of where they wait, one at a time
                able = [i for i in able if i in self._thread_ids]
            else:
                able = [i for i in able if i not in self._waiting]
            if able:
                self._turn = able[0]
                if start and self.start_replica is not None:
                    self.start_replica(able[0])
        self._wake_all()


def run_serialized(tasks: Sequence[Callable[[], T]], group: Rendezvous, should_stop: Callable[[T], bool]) -> list[T]:
    """Run tasks one after another in this thread, until a result says stop.

    A task that the others wait for in the middle of their own runs in a thread of its own; still one runs at a time. An
    interruption is raised when none of these threads runs any longer; a second one at once.
    """
    beside = _SideThreads(tasks)
    group.start_replica = beside.start
    interruption: BaseException | None = None
    try:
        try:
            for index, task in enumerate(tasks):
                beside.current = index
                if index not in beside.threads:
                    beside.results[index] = task()
                    if should_stop(beside.results[index]):
                        break
            beside.wait()
        except BaseException as error:
            interruption = None if isinstance(error, Exception) else error
            beside.errors[beside.current] = error
            run_uninterrupted(partial(group.leave, beside.current, error), group.abort)
            beside.wait()
        group.close()
    except BaseException:
        run_uninterrupted(group.abort, group.close)
        raise
    results, errors = beside.take_results()
    if interruption is not None:
        raise interruption
    if errors:
        raise first_error(errors)
    return [results[index] for index in sorted(results)]


class _SideThreads(Generic[T]):
    """Tasks, and the threads of those that do not run in the caller's.

    Nobody waits for these by `Thread.join`: one that is interrupted takes the thread for ended.
    """

    def __init__(self, tasks: Sequence[Callable[[], T]]) -> None:
        self.current = 0
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.threads: dict[int, threading.Thread] = {}
        self._tasks = tasks
        self._claims: dict[int, object] = {}
        """Who came to a task first: its thread, or somebody who no longer wants it."""
        self._wakeup: SimpleQueue[None] = SimpleQueue()

    def start(self, index: int) -> None:
        """Run a task in a thread of its own."""
        if index > self.current and index not in self.threads:
            thread = threading.Thread(target=self._run, args=(index,), name=f"instep-turn-{index}", daemon=True)
            self.threads[index] = thread
            start_thread(thread)

    def _run(self, index: int) -> None:
        mine = object()
        if self._claims.setdefault(index, mine) is not mine:
            return
        try:
            with as_replica_thread():
                self.results[index] = self._tasks[index]()
        except BaseException as error:
            self.errors[index] = error
        finally:
            self._wakeup.put(None)

    def wait(self) -> None:
        """Wait until no thread runs; one that an interruption left unstarted will not start any more."""
        mine, looks = object(), 0
        while self._unfinished():
            try:
                self._wakeup.get(timeout=_POLL_SECONDS)
            except Empty:
                looks += 1
            if looks >= _UNSTARTED_POLLS:
                for index in self._unfinished():
                    if self.threads[index].ident is None and self._claims.setdefault(index, mine) is mine:
                        del self.threads[index]
        for thread in list(self.threads.values()):
            if thread.ident is not None:
                thread.join()

    def take_results(self) -> tuple[dict[int, T], dict[int, BaseException]]:
        """What tasks gave. Python may hold on to a thread that never started, and must not hold on to that."""
        results, errors = self.results, self.errors
        self.results, self.errors, self._tasks = {}, {}, ()
        return results, errors

    def _unfinished(self) -> list[int]:
        return [i for i in list(self.threads) if i not in self.results and i not in self.errors]
