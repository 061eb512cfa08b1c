"""The group of replicas that are threads of this process."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.collectives.exchange import all_gather_in_process
from instep.collectives.group import PeerFailure
from instep.engines.thread_pool import Task, TaskResults
from instep.errors import CollectiveError
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.debugger import is_debugger_attached, is_in_debugger
from instep.runtime.locks import run_uninterrupted


def thread_cpu_times(task: int) -> list[str]:
    """The CPU times of a thread from `/proc`; empty if they are not available."""
    try:
        with open(f"/proc/self/task/{task}/stat") as file:
            return file.read().rpartition(")")[2].split()[11:13]
    except OSError:
        return []


T = TypeVar("T")

WARN_AFTER_SECONDS = 60.0
"""Seconds after which a waiting replica warns which replica it waits for."""

_POLL_SECONDS = 0.2
"""Seconds between checks of a waiting thread that is not woken up."""

LEFT_FORWARD = "returned from forward"
LEFT_BACKWARD = "finished its backward"


class Rendezvous:
    """The group of replicas that are threads of this process, for one forward or backward.

    A replica that waits for others stops waiting as soon as one of them returns or fails.

    Args:
        names: The replicas, for messages.
        exit_description: What a replica did that has left the group, for messages.
        joint_graph: Whether the replicas build one autograd graph.
        serialized: Whether only one replica runs at a time: the first until it returns or waits for the others, then
            the next. `start_replica` starts the thread of a replica that is waited for and has none yet.
        suspend: Saves state that serialized replicas share while another one runs; returns a function that restores it.
        timeout: Seconds after which a collective fails if the awaited replicas make no progress.
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
        """Set when a replica was waited for too long; it may never return."""
        self._suspend = suspend if serialized else None
        self.start_replica: Callable[[int], None] | None = None
        self._names = list(names)
        self._exit_description = exit_description
        # Each replica waits on its own queue and polls: no wait needs the lock, whose owner may be interrupted. A plain
        # RLock is acquired without running Python code in between.
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
        """The native ids of these threads."""
        self._warned = False
        self.remote: set[int] = set()
        """Replicas in other processes. Slow ones are reported by the watchdogs of their workers."""

    def enter(self, index: int) -> None:
        """Begin a replica's part; waits for its turn. Raises if the group is broken."""
        with self._lock:
            self._thread_ids[index], self._native_ids[index] = threading.get_ident(), threading.get_native_id()
        self._wait_for_round(index)

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        resume = self._suspend() if self._suspend is not None else None
        payloads = self._exchange(index, label, payload)
        if resume is not None:
            resume()
        return payloads

    def all_gather(self, index: int, label: str, row: Tensor) -> Tensor:
        return all_gather_in_process(self, index, label, row)

    def row_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:  # noqa: ARG002
        return None

    def _exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        try:
            awaited = self._arrive(index, label, payload)
            self._wait_for_round(index, awaited, label)
            return self._collect(awaited)
        except Exception:
            raise
        except BaseException:  # interrupted: another replica may have the turn, and this one must not run meanwhile
            run_uninterrupted(self.abort)
            self._wait_for_turn(index)
            raise

    def _arrive(self, index: int, label: str, payload: Any) -> int:
        """Add a replica's payload to the current round, without waiting; returns the round's number."""
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
        """The payloads of a round; raises if the group broke before all arrived."""
        with self._lock:
            if self._round < awaited:
                self._raise_if_broken()
            payloads = self._payloads
            self._unread -= 1
            if not self._unread:
                self._payloads = []
            return payloads

    def is_broken(self) -> bool:
        """Whether a replica failed, so that no exchange can complete."""
        return self._broken_error is not None

    def _wait_for_round(self, index: int, awaited: int = 0, label: str | None = None) -> None:
        """Wait for a round and for this replica's turn. If the group is broken, wait for the turn only and raise."""
        since, last_positions = time.monotonic(), None
        patience = min(WARN_AFTER_SECONDS, self._timeout / 2)
        while True:
            with self._lock:
                has_turn = self._turn in (None, index)
                may_start = self._turn is None or self._broken_error is None
                if has_turn and self._round >= awaited and (awaited or may_start):
                    return
                if self._is_turn_free(index):
                    self._raise_if_broken()
            waited = time.monotonic() - since
            if self._wait_wakeup(index) or label is None or waited < patience:
                continue
            if not self._warned:
                self._warned = True
                self._warn_slow(label, waited)
            positions = self._thread_positions()
            if positions != last_positions:
                since, last_positions = max(since, time.monotonic() - patience), positions
            elif waited > self._timeout and positions:
                self._fail_with_timeout(label, waited)

    def _wait_for_turn(self, index: int) -> None:
        """After a failure, wait until no other replica runs."""
        while not self._is_turn_free(index):
            self._wait_wakeup(index)

    def _is_turn_free(self, index: int) -> bool:
        """Whether no other replica runs."""
        turn = self._turn
        return turn in (None, index) or turn in self._finished or turn not in self._thread_ids

    def _wait_wakeup(self, index: int) -> bool:
        """Wait for a wake-up, for a short time: an interruption may have consumed it."""
        try:
            self._wakeups[index].get(timeout=min(_POLL_SECONDS, WARN_AFTER_SECONDS))
        except Empty:
            return False
        return True

    def _wake_all(self) -> None:
        for queue in self._wakeups:
            if queue.empty():
                queue.put(None)

    def _awaited_replicas(self) -> list[int]:
        """The replicas of this process that others wait for."""
        absent = [i for i in range(len(self._names)) if i not in self._waiting and i not in self._finished]
        return [i for i in (absent if self._turn is None else [self._turn]) if i not in self.remote]

    def _thread_positions(self) -> dict[int, tuple[int, int, list[str]]]:
        """The positions and CPU times of awaited threads; empty if a debugger may have stopped one."""
        frames = sys._current_frames()
        awaited = {i: frames.get(self._thread_ids.get(i, 0)) for i in self._awaited_replicas()}
        if is_debugger_attached() or any(map(is_in_debugger, awaited.values())):
            return {}
        return {
            i: (id(frame), frame.f_lasti, thread_cpu_times(self._native_ids[i]))
            for i, frame in awaited.items()
            if frame is not None
        }

    def _fail_with_timeout(self, label: str, waited: float) -> None:
        names = " and ".join(self._names[index] for index in self._awaited_replicas())
        with self._lock:
            self.timeout_error = CollectiveError(
                f"{label} has waited {waited:.0f} s for {names}, which made no progress:\n"
                f"{''.join(map(self._format_stack, self._awaited_replicas()))}"
                f"Replicas may wait for one another only in collectives: one may hold a lock that another needs. "
                f"If the replica is only slow: DataParallel(..., timeout={self._timeout * 10:.0f})."
            )
            self._break(self.timeout_error)

    def check_timeout(self) -> None:
        """Raise `timeout_error` if it is set."""
        if self.timeout_error is not None:
            raise self.timeout_error

    def _warn_slow(self, label: str, waited: float) -> None:
        """Warn where the awaited replicas are."""
        for index in self._awaited_replicas():
            warn_caller(
                f"{label} has waited {waited:.0f} s for {self._names[index]}, which is at:\n"
                f"{self._format_stack(index)}",
            )

    def _format_stack(self, index: int) -> str:
        frame = sys._current_frames().get(self._thread_ids.get(index, 0))
        if frame is None:
            return "  (its thread has not started)\n"
        return "".join(traceback.format_stack(frame, 8))

    def leave(self, index: int, error: BaseException | None = None) -> None:
        """End a replica's part. Replicas that wait for it fail."""
        with self._lock:
            self._finished.add(index)
            self._waiting.pop(index, None)
            if error is not None:
                self._break(
                    PeerFailure(f"{self._names[index]} failed with {type(error).__name__} before this collective.")
                )
            elif self._waiting:
                waiting = min(self._waiting)
                self._break(self._missing_error(waiting, self._waiting[waiting][0], index))
            if self._turn == index:
                self._pass_turn(start=False)

    def close(self) -> None:
        """Drop payloads: graphs reference the group, and must not reference themselves through it."""
        with self._lock:
            self._payloads, self._waiting, self.start_replica = [], {}, None

    def abort(self) -> None:
        """Break the group: the caller was interrupted."""
        with self._lock:
            self._break(PeerFailure("the call was interrupted."))

    def _check_label(self, index: int, label: str) -> None:
        for other, (other_label, _) in self._waiting.items():
            if other_label != label:
                self._break(
                    CollectiveError(
                        f"the replicas called different collectives.\n"
                        f"  {self._names[other]} called {other_label}\n"
                        f"  {self._names[index]} called {label}\n"
                        f"Every replica has to make the same calls in the same order: move them out of branches that "
                        f"depend on the shard, and pass the same structure, sizes and dtypes."
                    )
                )
        if self._finished:
            self._break(self._missing_error(index, label, min(self._finished)))
        self._raise_if_broken()

    def _missing_error(self, waiting: int, label: str, finished: int) -> CollectiveError:
        return CollectiveError(
            f"{self._names[waiting]} called {label}, and {self._names[finished]} {self._exit_description} without it.\n"
            f"Every replica has to make the same calls: move them out of branches and loops that depend on the shard."
        )

    def _break(self, error: CollectiveError) -> None:
        if self._broken_error is None:
            self._broken_error = error
        self._wake_all()

    def _raise_if_broken(self) -> None:
        if self._broken_error is not None:
            raise type(self._broken_error)(*self._broken_error.args)

    def _pass_turn(self, start: bool) -> None:
        """Give the turn to the first replica that can run; after a failure, to the first unfinished one."""
        if self._turn is not None:
            candidates = [i for i in range(len(self._names)) if i not in self._finished]
            if self._broken_error is not None:  # they leave their waits one at a time
                candidates = [i for i in candidates if i in self._thread_ids]
            else:
                candidates = [i for i in candidates if i not in self._waiting]
            if candidates:
                self._turn = candidates[0]
                if start and self.start_replica is not None:
                    self.start_replica(candidates[0])
        self._wake_all()


def run_serialized(
    functions: Sequence[Callable[[], T]], group: Rendezvous, should_stop: Callable[[T], bool]
) -> list[T]:
    """Run functions one after another in this thread, until one raises or `should_stop` is true of a result.

    A function that others wait for in a collective runs in its own thread; still only one runs at a time. An
    interruption is raised when none of these threads runs any longer; a second one immediately.
    """
    results = TaskResults(len(functions))
    num_threads = torch.get_num_threads()
    tasks = [Task(index, function, results, num_threads) for index, function in enumerate(functions)]
    group.start_replica = lambda index: tasks[index].run_in_new_thread()
    current, stopped = 0, False
    try:
        try:
            for current, task in enumerate(tasks):
                if task.thread is None:
                    task.run_inline()
                    result, error = results.get(current)
                    stopped = error is None and should_stop(result)
                    if stopped or error is not None:
                        run_uninterrupted(*(task.cancel for task in tasks))
                        break
        except BaseException as interruption:
            leave, fail = partial(group.leave, current, interruption), partial(results.put, current, None, interruption)
            steps = [] if tasks[current].thread is not None else [leave, fail]
            run_uninterrupted(*steps, group.abort, *(task.cancel for task in tasks))
            raise
        finally:
            results.wait(inf)
            for task in tasks:
                task.join()
        group.close()
    except BaseException:
        run_uninterrupted(group.abort, group.close)
        raise
    return results.finished() if stopped else results.collect()
