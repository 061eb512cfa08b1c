"""Replica threads: they belong to the process, are shared by all wrappers, and end with the last one."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from math import inf
from queue import SimpleQueue
from typing import TypeVar

import torch

from instep.engines.tasks import Results, Task, be_inside, begin_elsewhere, inside_replica
from instep.errors import EngineError
from instep.locks import ProcessLock, start, surely

T = TypeVar("T")


class ReplicaThread:
    """A thread that does what it is handed, in order."""

    def __init__(self, name: str) -> None:
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.pid = os.getpid()
        self.users: set[Lease] = set()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._asked = self._works = False

    def start(self) -> None:
        """Begin, once somebody holds it: an interruption meanwhile leaves no thread that nobody knows."""
        if not self._asked:
            self._asked = True
            start(self._thread)

    def _work(self) -> None:
        be_inside(True)
        self._works = True
        try:
            while (task := self.inbox.get()) is not None:
                task()
                del task  # a finished call must not be kept until the next one comes
        finally:
            self._works = False

    def alive(self) -> bool:
        return self.pid == os.getpid() and (self._works or self._thread.is_alive())

    def usable(self) -> bool:
        """Whether it runs, or was not started yet. Of one whose start was interrupted nobody knows."""
        return self.pid == os.getpid() and (not self._asked or self._thread.is_alive())

    def tell_to_stop(self) -> None:
        """It ends when it has done what it was handed; it may be told more than once."""
        self.inbox.put(None)

    def stop(self) -> None:
        """Tell it to stop, and wait for that."""
        self.tell_to_stop()
        if self.alive() and threading.current_thread() is not self._thread:
            self._thread.join()


def _end_dropped() -> None:
    """Give back the leases that nobody holds any longer, unless the lock is held: then whoever holds it does so."""
    while _dropped and not _lock.is_mine():
        try:
            if not _lock.acquire(blocking=False):
                return
            while _dropped:
                _dropped[0].give_back()
                _dropped.popleft()
        finally:  # nothing that an interruption could come behind, before it is free
            try:  # noqa: SIM105
                _lock.release()
            except RuntimeError:  # it was not taken
                pass


_threads: dict[tuple[str, int], ReplicaThread] = {}
_dropped: deque[Lease] = deque()
_lock = ProcessLock(_threads.clear)
"""Whoever gives it back calls `_end_dropped`."""


def _nothing() -> None:
    """There is nothing to look at."""


class Lease:
    """The threads for a list of devices, one each, held until `close`."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._keys: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for device in devices:
            self._keys.append((str(device), seen[str(device)]))
            seen[str(device)] += 1
        self._closed = False
        self._left: Results | None = None
        """What tasks will give that an interrupted caller did not wait for."""
        self._threads: list[ReplicaThread] = []
        try:
            with _lock:
                self._take_all()
        except BaseException:
            self.drop()
            raise
        _end_dropped()

    def _take(self, key: tuple[str, int]) -> ReplicaThread:
        thread = _threads.get(key)
        if thread is None or not thread.usable():
            if thread is not None:
                thread.tell_to_stop()
            thread = _threads[key] = ReplicaThread(f"instep-{key[0]}-{key[1]}")
        thread.users.add(self)
        return thread

    def run(
        self,
        tasks: Sequence[Callable[[], T]],
        *,
        stop: Callable[[], object] | None = None,
        patience: float = inf,
        here: bool = False,
        watch: Callable[[], None] = _nothing,
    ) -> list[T]:
        """The results of one task a thread, in order; the first error that a task raised is raised.

        With `here` the first task runs in this thread: nobody else may start a backward for the device that the engine
        of autograd has given this thread to.

        `watch` is called now and then while one waits, and may raise. After that, or after an interruption of the
        caller, no other task begins, and `stop` tells those that have not to wait for each
        other. It is raised when none runs any longer, or after so many seconds; a second one at once.
        """
        if inside_replica():  # a thread that waited for itself would wait for ever
            return [task() for task in tasks]
        if self._closed:
            raise EngineError("this engine was closed.")
        mine = torch.get_num_threads()
        done = Results(len(tasks))
        parts = [Task(index, task, done, max(1, mine // len(tasks))) for index, task in enumerate(tasks)]

        def late() -> None:
            begin_elsewhere(parts)
            watch()

        try:
            with _lock:  # calls of several wrappers reach every thread in the same order
                self._revive()
                for thread, part in list(zip(self._threads, parts, strict=False))[int(here) :]:
                    thread.inbox.put(part)
            _end_dropped()
            if here:
                parts[0].do_here()
            return done.collect(late)
        except BaseException:
            if not done.complete():
                self._left = done
                for part in parts:
                    part.withdraw()
                if stop is not None:
                    surely(stop)
                done.wait(patience)
            raise
        finally:
            if done.shared:  # torch hands the count set last to every new thread: the caller sets its own again
                torch.set_num_threads(mine)

    def wait(self) -> None:
        """Wait for what an interrupted call has left running."""
        if self._left is not None and not self._left.wait(_PATIENCE):
            raise EngineError(
                f"a call was interrupted more than {_PATIENCE:.0f} s ago, and its forward still runs on a replica. "
                f"Make sure that it ends."
            )
        self._left = None

    def afterwards(self, then: Callable[[], object]) -> None:
        """Do something when that has ended; at once if it has."""
        if self._left is not None:
            self._left.afterwards(then)

    def _revive(self) -> None:
        """A forked child has none of its parent's threads: it starts its own."""
        if not all(thread.alive() for thread in self._threads):
            self._threads = []
            self._take_all()

    def _take_all(self) -> None:
        """Each thread is held before it is started; one that an interruption left unstarted is started now."""
        self._threads.extend(self._take(key) for key in self._keys[len(self._threads) :])
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give the threads back; those that nobody else uses end."""
        if inside_replica():  # somebody may hold the lock and wait for this thread
            self.drop()
            return
        with _lock:
            ended = self.give_back()
        _end_dropped()
        for thread in ended:  # not under the lock: what a thread still does may need it
            thread.stop()

    def drop(self) -> None:
        """The same for a finalizer: it may run anywhere, also in a thread that is waited for, and waits for nothing."""
        _dropped.append(self)
        _end_dropped()

    def give_back(self) -> list[ReplicaThread]:
        """The threads that nobody uses any longer, which are told to stop; to be called under the lock.

        If it was interrupted, it may be called again.
        """
        self._closed = True
        ended = []
        for key, thread in [*zip(self._keys, self._threads, strict=False), *_threads.items()]:
            if self not in thread.users:
                continue
            if len(thread.users) == 1:
                thread.tell_to_stop()
                ended.append(thread)
                if _threads.get(key) is thread:
                    del _threads[key]
            thread.users.discard(self)
        return ended


_PATIENCE = 60.0
"""Seconds that a call waits for what an interrupted one before it has left running."""


def stop_all() -> None:
    """End every replica thread of this process; wrappers start new ones when they are called again."""
    with _lock:
        threads = list(_threads.values())
        for thread in threads:
            thread.tell_to_stop()
        _threads.clear()
    for thread in threads:
        thread.stop()


atexit.register(stop_all)
