"""Persistent replica threads, shared by all wrappers of the process."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from instep.collectives.group import PeerFailure, first_error
from instep.errors import EngineError
from instep.runtime.ambient import register_thread_local
from instep.runtime.locks import ForkSafeLock, run_uninterrupted, start_thread


class _ThreadLocal(threading.local):
    is_replica = False
    num_threads = 0


_thread_local = _ThreadLocal()


def is_replica_thread() -> bool:
    """Whether this thread runs a replica's part of a call."""
    return _thread_local.is_replica


def set_replica_thread(is_replica: bool) -> None:
    """Set whether this thread runs a replica's part of a call."""
    _thread_local.is_replica = is_replica


register_thread_local(is_replica_thread, set_replica_thread)


_POLL_SECONDS = 0.1
"""Seconds between checks of a waiting thread that is not woken up."""

_INTERRUPTED_CALL_TIMEOUT = 60.0
"""Seconds that a call waits for an earlier, interrupted call."""

T = TypeVar("T")


class TaskResults:
    """The results of the tasks of one `ReplicaThreads.run`.

    The queue only wakes up the waiting thread, which polls too: an interruption may consume a wake-up.
    """

    def __init__(self, count: int) -> None:
        self.thread_counts_changed = False
        """Whether a task changed the number of intra-op threads of its thread."""
        self._results: list[tuple[Any, BaseException | None] | None] = [None] * count
        """By task: the result and the error; None while it runs."""
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._callbacks: list[Callable[[], object]] = []

    def put(self, index: int, result: Any, error: BaseException | None) -> None:
        self._results[index] = result, error
        if self.is_complete():
            self._run_callbacks()
            self._wakeup.put(None)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when every task has finished."""
        self._callbacks.append(callback)
        if self.is_complete():
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread runs it
                return
            callback()

    def is_complete(self) -> bool:
        """Whether every task has finished."""
        return None not in self._results

    def get(self, index: int) -> tuple[Any, BaseException | None]:
        """The result and the error of a task that has finished."""
        pair = self._results[index]
        assert pair is not None
        return pair

    def finished(self) -> list[Any]:
        """The results of the tasks that have finished without an error."""
        return [pair[0] for pair in self._results if pair is not None and pair[1] is None]

    def collect(self, poll: Callable[[], None] | None = None) -> list[Any]:
        """Wait for all results, or raise the first error. Calls `poll` regularly while results are missing."""
        while not self.is_complete():
            try:
                self._wakeup.get(timeout=_POLL_SECONDS)
            except Empty:
                if poll is not None:
                    poll()
        pairs = enumerate(map(self.get, range(len(self._results))))
        errors = {index: error for index, (_, error) in pairs if error is not None}
        if errors:
            raise first_error(errors)
        return self.finished()

    def wait(self, seconds: float) -> bool:
        """Wait for at most this many seconds; returns whether every task has finished."""
        deadline = time.monotonic() + seconds
        while not self.is_complete() and (remaining := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._wakeup.get(timeout=min(remaining, _POLL_SECONDS))
        return self.is_complete()


def _set_num_threads(count: int) -> None:
    torch.get_num_threads()  # the first call in a thread initializes its count: call before setting
    torch.set_num_threads(count)


class Task:
    """A task and where its result goes. It runs once, in the first thread that claims it."""

    __slots__ = ("index", "num_threads", "pending", "results", "thread")

    def __init__(self, index: int, function: Callable[[], Any], results: TaskResults, num_threads: int) -> None:
        self.index, self.results = index, results
        self.pending = [function]
        """Empty when the task is claimed."""
        self.num_threads = num_threads
        """The number of intra-op threads that it may use."""
        self.thread: threading.Thread | None = None
        """The task's own thread, if it has one."""

    def cancel(self) -> None:
        """Cancel the task, unless a thread has claimed it."""
        if self._claim() is not None:
            self.results.put(self.index, None, PeerFailure("the call was interrupted."))

    def _claim(self) -> Callable[[], Any] | None:
        try:
            return self.pending.pop()  # only one thread succeeds
        except IndexError:
            return None

    def run_inline(self) -> None:
        """Run the task in the caller's thread, with the caller's number of threads; interruptions propagate."""
        function = self._claim()
        if function is None:
            return
        try:
            self.results.put(self.index, function(), None)
        except BaseException as error:
            self.results.put(self.index, None, error)
            if not isinstance(error, Exception):
                raise

    def run(self) -> None:
        """Run the task in a replica thread."""
        function = self._claim()
        if function is None:
            return
        try:
            if _thread_local.num_threads != self.num_threads:
                self.results.thread_counts_changed = True
                _set_num_threads(self.num_threads)
                _thread_local.num_threads = self.num_threads
            result = function()
        except BaseException as error:
            self.results.put(self.index, None, error)
        else:
            self.results.put(self.index, result, None)

    def run_in_new_thread(self) -> None:
        """Run the task in a thread of its own, unless another thread has claimed it."""
        if self.pending and self.thread is None:
            self.thread = threading.Thread(target=self._run_thread, name=f"instep-task-{self.index}", daemon=True)
            start_thread(self.thread)

    def join(self) -> None:
        """Wait until the task's own thread has exited."""
        if self.thread is not None and self.thread.ident is not None:
            self.thread.join()

    def _run_thread(self) -> None:
        set_replica_thread(True)
        self.run()


class ReplicaThread:
    """A persistent thread that runs tasks in order."""

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[Task | None] = SimpleQueue()
        self.pid = os.getpid()
        self.leases: set[ReplicaThreads] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start_requested = self._running = False

    def start(self) -> None:
        """Start the thread, once. Its owner registers it first: an interruption then leaves no unknown thread."""
        if not self._start_requested:
            self._start_requested = True
            start_thread(self._thread)

    def _run(self) -> None:
        set_replica_thread(True)
        self._running = True
        try:
            while (task := self.queue.get()) is not None:
                task.run()
                del task  # do not keep a finished call alive
        finally:
            self._running = False

    def is_alive(self) -> bool:
        return self.pid == os.getpid() and (self._running or self._thread.is_alive())

    def is_usable(self) -> bool:
        """Whether it runs or was not started yet; a thread whose start was interrupted is not usable."""
        return self.pid == os.getpid() and (not self._start_requested or self._thread.is_alive())

    def request_stop(self) -> None:
        """Stop after the queued tasks; may be called more than once."""
        self.queue.put(None)

    def stop(self) -> None:
        """Stop after the queued tasks, and wait for that."""
        self.request_stop()
        if self.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()


def _release_dropped() -> None:
    """Release dropped leases. If another thread holds the lock, that thread releases them."""
    while _dropped and not _lock.is_owned():
        try:
            if not _lock.acquire(blocking=False):
                return
            while _dropped:
                _dropped[0].release()
                _dropped.popleft()
        finally:  # no code before the release in which an interruption could come
            try:  # noqa: SIM105
                _lock.release()
            except RuntimeError:  # not acquired
                pass


_threads: dict[tuple[str, int], ReplicaThread] = {}
_dropped: deque[ReplicaThreads] = deque()
_lock = ForkSafeLock(_threads.clear)
"""After releasing it, call `_release_dropped`."""


class ReplicaThreads:
    """A lease of replica threads, one for each device, until `close`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._keys: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for device in devices:
            self._keys.append((str(device), seen[str(device)]))
            seen[str(device)] += 1
        self._closed = False
        self._unfinished: TaskResults | None = None
        """Results of an interrupted call that still runs."""
        self._threads: list[ReplicaThread] = []
        try:
            with _lock:
                self._acquire_all()
        except BaseException:
            self.release_async()
            raise
        _release_dropped()

    def _acquire(self, key: tuple[str, int]) -> ReplicaThread:
        thread = _threads.get(key)
        if thread is None or not thread.is_usable():
            if thread is not None:
                thread.request_stop()
            thread = _threads[key] = ReplicaThread(f"instep-{key[0]}-{key[1]}")
        thread.leases.add(self)
        return thread

    def run(
        self,
        tasks: Sequence[Callable[[], T]],
        *,
        on_interrupt: Callable[[], object] | None = None,
        grace: float = inf,
        first_inline: bool = False,
        poll: Callable[[], None] | None = None,
    ) -> list[T]:
        """Run one task in each thread; returns the results in order, or raises the first error.

        If `poll` raises or the caller is interrupted, unclaimed tasks are cancelled and `on_interrupt` is called; the
        exception propagates when no task runs any longer, or after `grace` seconds. A second interruption propagates
        immediately.

        Args:
            tasks: One task for each thread.
            on_interrupt: Tells running tasks not to wait for each other.
            grace: Seconds to wait for running tasks after an interruption.
            first_inline: Run the first task in this thread. Needed for a backward on a device whose autograd thread
                this is.
            poll: Called regularly while waiting; may raise.
        """
        if is_replica_thread():  # waiting for itself would deadlock
            return [task() for task in tasks]
        if self._closed:
            raise EngineError("this engine was closed.")
        num_threads = torch.get_num_threads()
        results = TaskResults(len(tasks))
        queued = [Task(index, task, results, max(1, num_threads // len(tasks))) for index, task in enumerate(tasks)]

        def poll_all() -> None:
            # A replica thread may be busy with a call that waits for this one: forward of another wrapper may have
            # started the thread that makes this call.
            for task in queued:
                task.run_in_new_thread()
            if poll is not None:
                poll()

        try:
            with _lock:  # calls of several wrappers are queued in the same order in every thread
                self._restart_after_fork()
                for thread, task in list(zip(self._threads, queued, strict=False))[int(first_inline) :]:
                    thread.queue.put(task)
            _release_dropped()
            if first_inline:
                queued[0].run_inline()
            return results.collect(poll_all)
        except BaseException:
            if not results.is_complete():
                self._unfinished = results
                for task in queued:
                    task.cancel()
                if on_interrupt is not None:
                    run_uninterrupted(on_interrupt)
                results.wait(grace)
            raise
        finally:
            if results.thread_counts_changed:  # the count set last applies to new threads: set the caller's again
                torch.set_num_threads(num_threads)

    def wait_idle(self) -> None:
        """Wait for the tasks of an interrupted call."""
        if self._unfinished is not None and not self._unfinished.wait(_INTERRUPTED_CALL_TIMEOUT):
            raise EngineError(
                f"a call was interrupted more than {_INTERRUPTED_CALL_TIMEOUT:.0f} s ago, and its forward still "
                f"runs on a replica.\nMake sure that forward returns."
            )
        self._unfinished = None

    def add_idle_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when the tasks of an interrupted call have finished."""
        if self._unfinished is not None:
            self._unfinished.add_done_callback(callback)

    def _restart_after_fork(self) -> None:
        """Start new threads in a forked child, which has none of its parent's."""
        if not all(thread.is_alive() for thread in self._threads):
            self._threads = []
            self._acquire_all()

    def _acquire_all(self) -> None:
        """Acquire and start all threads; also starts those that an interruption left unstarted."""
        self._threads.extend(self._acquire(key) for key in self._keys[len(self._threads) :])
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Release the threads; those without another lease stop."""
        if is_replica_thread():  # the lock's owner may wait for this thread
            self.release_async()
            return
        with _lock:
            unused = self.release()
        _release_dropped()
        for thread in unused:  # not under the lock: a running task may need it
            thread.stop()

    def release_async(self) -> None:
        """Like `close`, for finalizers: may be called in any thread, and does not wait."""
        _dropped.append(self)
        _release_dropped()

    def release(self) -> list[ReplicaThread]:
        """Release the threads and request a stop of unused ones, which are returned. Call under the lock.

        If it was interrupted, it may be called again.
        """
        self._closed = True
        unused = []
        for key, thread in [*zip(self._keys, self._threads, strict=False), *_threads.items()]:
            if self not in thread.leases:
                continue
            if len(thread.leases) == 1:
                thread.request_stop()
                unused.append(thread)
                if _threads.get(key) is thread:
                    del _threads[key]
            thread.leases.discard(self)
        return unused


def stop_all_threads() -> None:
    """Stop all replica threads of this process. Wrappers start new ones when they are called again."""
    with _lock:
        threads = list(_threads.values())
        for thread in threads:
            thread.request_stop()
        _threads.clear()
    for thread in threads:
        thread.stop()


atexit.register(stop_all_threads)
