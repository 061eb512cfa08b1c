"""Persistent replica threads, shared by all wrappers of the process."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from instep.collectives.group import PeerFailure, first_error
from instep.errors import EngineError
from instep.runtime.ambient import register_thread_local
from instep.runtime.locks import ForkSafeLock, run_uninterrupted, start_thread

_thread_local = threading.local()


def is_replica_thread() -> bool:
    """Whether this thread is running a replica's part of a call."""
    return getattr(_thread_local, "inside", False)


def set_replica_thread(inside: bool) -> None:
    """Say whether this thread is running a replica's part of a call."""
    _thread_local.inside = inside


register_thread_local(is_replica_thread, set_replica_thread)


@contextmanager
def as_replica_thread() -> Iterator[None]:
    """Run a replica's part of a call in this thread, for the length of a `with` block."""
    before, _thread_local.inside = is_replica_thread(), True
    try:
        yield
    finally:
        _thread_local.inside = before


class TaskResults:
    """What tasks gave, each in its own place; the queue is only a bell.

    An interruption may come when a bell has been taken and nothing has been done about it. Nothing is lost then but the
    bell, and whoever waits looks again after a while.
    """

    def __init__(self, count: int) -> None:
        self.thread_counts_changed = False
        """Whether a task gave its thread another share of the cores."""
        self._results: list[tuple[Any, BaseException | None] | None] = [None] * count
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._callbacks: list[Callable[[], object]] = []

    def put(self, index: int, result: Any, error: BaseException | None) -> None:
        self._results[index] = result, error
        if None not in self._results:  # whoever waits is woken once, by the last
            self._run_callbacks()
            self._wakeup.put(None)

    def add_done_callback(self, then: Callable[[], object]) -> None:
        """Do something when every task has ended."""
        self._callbacks.append(then)
        if self.is_complete():
            self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                then = self._callbacks.pop()
            except IndexError:  # another thread does it
                return
            then()

    def is_complete(self) -> bool:
        """Whether every task has ended."""
        return None not in self._results

    def collect(self, late: Callable[[], None]) -> list[Any]:
        """All results, or the first error. `late` is called whenever results are still missing after a while."""
        while not self.is_complete():
            try:
                self._wakeup.get(timeout=_POLL_SECONDS)
            except Empty:
                late()
        given = [result for result in self._results if result is not None]
        errors = {index: error for index, (_, error) in enumerate(given) if error is not None}
        if errors:
            raise first_error(errors)
        return [result for result, _ in given]

    def wait(self, seconds: float) -> bool:
        """Whether every task has ended, after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while not self.is_complete() and (left := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._wakeup.get(timeout=min(left, _POLL_SECONDS))
        return self.is_complete()


_POLL_SECONDS = 0.1
"""Seconds after which whoever waits for results looks again, without a bell."""


def _set_num_threads(count: int) -> None:
    torch.get_num_threads()  # a thread that asks for the first time takes the process's count: ask before setting
    torch.set_num_threads(count)


class Task:
    """A task with the place its result goes to. It is done once, by the first thread that comes to it."""

    __slots__ = ("index", "num_threads", "pending", "results")

    def __init__(self, index: int, task: Callable[[], Any], done: TaskResults, share: int) -> None:
        self.index, self.results = index, done
        self.pending = [task]
        self.num_threads = share
        """The intra-op threads that it may take."""

    def cancel(self) -> None:
        """See to it that no thread begins it any more, if none has."""
        if self._claim() is not None:
            self.results.put(self.index, None, PeerFailure("the call was interrupted."))

    def _claim(self) -> Callable[[], Any] | None:
        try:
            return self.pending.pop()  # only one thread can
        except IndexError:
            return None

    def run_inline(self) -> None:
        """Do it in the caller's thread, with the caller's share of the cores; an interruption is the caller's own."""
        task = self._claim()
        if task is None:
            return
        try:
            self.results.put(self.index, task(), None)
        except BaseException as error:
            self.results.put(self.index, None, error)
            if not isinstance(error, Exception):
                raise

    def __call__(self) -> None:
        task = self._claim()
        if task is None:
            return
        try:
            if getattr(_thread_local, "share", 0) != self.num_threads:
                self.results.thread_counts_changed = True
                _set_num_threads(self.num_threads)
                _thread_local.share = self.num_threads
            result = task()
        except BaseException as error:
            self.results.put(self.index, None, error)
        else:
            self.results.put(self.index, result, None)


def run_unclaimed(parts: Sequence[Task]) -> None:
    """Do what no replica thread has come to in threads of its own.

    A replica thread may be in the middle of a call that waits for this one: a wrapper called from a thread that the
    `forward` of another one has started.
    """
    for part in parts:
        if part.pending:
            start_thread(
                threading.Thread(target=_run_task, args=(part,), name=f"instep-beside-{part.index}", daemon=True)
            )


def _run_task(part: Task) -> None:
    with as_replica_thread():
        part()


T = TypeVar("T")


class ReplicaThread:
    """A thread that does what it is handed, in order."""

    def __init__(self, name: str) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.pid = os.getpid()
        self.leases: set[ReplicaThreads] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start_requested = self._running = False

    def start(self) -> None:
        """Begin, once somebody holds it: an interruption meanwhile leaves no thread that nobody knows."""
        if not self._start_requested:
            self._start_requested = True
            start_thread(self._thread)

    def _run(self) -> None:
        set_replica_thread(True)
        self._running = True
        try:
            while (task := self.queue.get()) is not None:
                task()
                del task  # a finished call must not be kept until the next one comes
        finally:
            self._running = False

    def is_alive(self) -> bool:
        return self.pid == os.getpid() and (self._running or self._thread.is_alive())

    def is_usable(self) -> bool:
        """Whether it runs, or was not started yet. Of one whose start was interrupted nobody knows."""
        return self.pid == os.getpid() and (not self._start_requested or self._thread.is_alive())

    def request_stop(self) -> None:
        """It ends when it has done what it was handed; it may be told more than once."""
        self.queue.put(None)

    def stop(self) -> None:
        """Tell it to stop, and wait for that."""
        self.request_stop()
        if self.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()


def _release_dropped() -> None:
    """Give back the leases that nobody holds any longer, unless the lock is held: then whoever holds it does so."""
    while _dropped and not _lock.is_owned():
        try:
            if not _lock.acquire(blocking=False):
                return
            while _dropped:
                _dropped[0].release()
                _dropped.popleft()
        finally:  # nothing that an interruption could come behind, before it is free
            try:  # noqa: SIM105
                _lock.release()
            except RuntimeError:  # it was not taken
                pass


_threads: dict[tuple[str, int], ReplicaThread] = {}
_dropped: deque[ReplicaThreads] = deque()
_lock = ForkSafeLock(_threads.clear)
"""Whoever gives it back calls `_end_dropped`."""


def _do_nothing() -> None:
    """There is nothing to look at."""


class ReplicaThreads:
    """The threads for a list of devices, one each, held until `close`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._keys: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for device in devices:
            self._keys.append((str(device), seen[str(device)]))
            seen[str(device)] += 1
        self._closed = False
        self._unfinished: TaskResults | None = None
        """What tasks will give that an interrupted caller did not wait for."""
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
        poll: Callable[[], None] = _do_nothing,
    ) -> list[T]:
        """The results of one task a thread, in order; the first error that a task raised is raised.

        With `here` the first task runs in this thread: nobody else may start a backward for the device that the engine
        of autograd has given this thread to.

        `watch` is called now and then while one waits, and may raise. After that, or after an interruption of the
        caller, no other task begins, and `stop` tells those that have not to wait for each
        other. It is raised when none runs any longer, or after so many seconds; a second one at once.
        """
        if is_replica_thread():  # a thread that waited for itself would wait for ever
            return [task() for task in tasks]
        if self._closed:
            raise EngineError("this engine was closed.")
        mine = torch.get_num_threads()
        done = TaskResults(len(tasks))
        parts = [Task(index, task, done, max(1, mine // len(tasks))) for index, task in enumerate(tasks)]

        def late() -> None:
            run_unclaimed(parts)
            poll()

        try:
            with _lock:  # calls of several wrappers reach every thread in the same order
                self._restart_after_fork()
                for thread, part in list(zip(self._threads, parts, strict=False))[int(first_inline) :]:
                    thread.queue.put(part)
            _release_dropped()
            if first_inline:
                parts[0].run_inline()
            return done.collect(late)
        except BaseException:
            if not done.is_complete():
                self._unfinished = done
                for part in parts:
                    part.cancel()
                if on_interrupt is not None:
                    run_uninterrupted(on_interrupt)
                done.wait(grace)
            raise
        finally:
            if (
                done.thread_counts_changed
            ):  # torch hands the count set last to every new thread: the caller sets its own again
                torch.set_num_threads(mine)

    def wait_idle(self) -> None:
        """Wait for what an interrupted call has left running."""
        if self._unfinished is not None and not self._unfinished.wait(_INTERRUPTED_CALL_TIMEOUT):
            raise EngineError(
                f"a call was interrupted more than {_INTERRUPTED_CALL_TIMEOUT:.0f} s ago, and its forward still runs on a "
                f"replica.\nMake sure that forward returns."
            )
        self._unfinished = None

    def add_idle_callback(self, then: Callable[[], object]) -> None:
        """Do something when that has ended; at once if it has."""
        if self._unfinished is not None:
            self._unfinished.add_done_callback(then)

    def _restart_after_fork(self) -> None:
        """A forked child has none of its parent's threads: it starts its own."""
        if not all(thread.is_alive() for thread in self._threads):
            self._threads = []
            self._acquire_all()

    def _acquire_all(self) -> None:
        """Each thread is held before it is started; one that an interruption left unstarted is started now."""
        self._threads.extend(self._acquire(key) for key in self._keys[len(self._threads) :])
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give the threads back; those that nobody else uses end."""
        if is_replica_thread():  # somebody may hold the lock and wait for this thread
            self.release_async()
            return
        with _lock:
            ended = self.release()
        _release_dropped()
        for thread in ended:  # not under the lock: what a thread still does may need it
            thread.stop()

    def release_async(self) -> None:
        """The same for a finalizer: it may run anywhere, also in a thread that is waited for, and waits for nothing."""
        _dropped.append(self)
        _release_dropped()

    def release(self) -> list[ReplicaThread]:
        """The threads that nobody uses any longer, which are told to stop; to be called under the lock.

        If it was interrupted, it may be called again.
        """
        self._closed = True
        ended = []
        for key, thread in [*zip(self._keys, self._threads, strict=False), *_threads.items()]:
            if self not in thread.leases:
                continue
            if len(thread.leases) == 1:
                thread.request_stop()
                ended.append(thread)
                if _threads.get(key) is thread:
                    del _threads[key]
            thread.leases.discard(self)
        return ended


_INTERRUPTED_CALL_TIMEOUT = 60.0
"""Seconds that a call waits for what an interrupted one before it has left running."""


def stop_all_threads() -> None:
    """End every replica thread of this process; wrappers start new ones when they are called again."""
    with _lock:
        threads = list(_threads.values())
        for thread in threads:
            thread.request_stop()
        _threads.clear()
    for thread in threads:
        thread.stop()


atexit.register(stop_all_threads)
