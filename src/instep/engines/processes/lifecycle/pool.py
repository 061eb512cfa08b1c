"""The pool of worker processes, shared by all wrappers of this process.

Workers of a wrapper that was garbage-collected stay available. Unused workers end when any wrapper is closed.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from instep.engines.processes.lifecycle.process import WorkerProcess, running_workers
from instep.errors import EngineError, WorkerFailure
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.env import is_quiet
from instep.runtime.locks import ForkSafeLock
from instep.runtime.process_role import inside_worker

MIN_START_SECONDS = 120.0
"""Minimum time allowed for a worker to start, even if the timeout for replies is shorter."""
_MAX_START_SECONDS = 86_400.0
"""Maximum time allowed for a worker to start, even without a `timeout`."""
_NOTICE_SECONDS = 1.5
"""Seconds after which a notice that workers are starting is printed."""
_WARN_SECONDS = 60.0
"""Seconds after which a warning shows the stack of a worker that has not started."""
_STOP_SECONDS = 1.0


class StartTimeout(WorkerFailure):
    """A worker did not start in time."""


_workers: dict[tuple[str, int], WorkerProcess] = {}
_lock = ForkSafeLock(_workers.clear)


class WorkerPool:
    """The workers for a list of devices: one for each device but the first, which this process uses itself.

    Pools with the same devices share workers. A pool holds its workers until `close` or garbage collection. A forked
    child does not use its parent's workers; it starts its own.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        if inside_worker():
            raise EngineError(
                "a worker process cannot start workers of its own: the module, or a file that it imports, creates a "
                "wrapper with engine='processes' at import. Put that under `if __name__ == \"__main__\":`."
            )
        self._devices = list(devices)
        self._keys: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for device in map(str, self._devices[1:]):
            self._keys.append((device, seen[device]))
            seen[device] += 1
        self._acquired: dict[int, WorkerProcess] = {}
        """The worker that `get` returned last, by replica."""
        self._closed = self._announced = False

    def get(self, index: int, timeout: float = MIN_START_SECONDS) -> WorkerProcess:
        """The worker of a replica, after it has started. It may have died since.

        The first call starts all missing workers at once. Raises `StartTimeout` after `timeout` seconds, but not before
        `MIN_START_SECONDS`. If the result differs from that of an earlier call, this pool or another one has replaced
        the worker.
        """
        with _lock:
            worker = self._acquire(index)
            if not worker.ready:
                for other in range(1, len(self._devices)):
                    self._acquire(other)
        if not worker.ready:
            self._wait_ready(worker, min(max(timeout, MIN_START_SECONDS), _MAX_START_SECONDS))
        worker.name = self._worker_name(index)
        return worker

    def last_worker(self, index: int) -> WorkerProcess | None:
        """The worker that `get` returned last."""
        return self._acquired.get(index)

    def kill(self, index: int) -> None:
        """Kill the worker that `get` returned last, or that did not start. The next `get` starts another."""
        with _lock:
            old = self._acquired.pop(index, None)
            if old is not None and _workers.get(self._keys[index - 1]) is old:
                del _workers[self._keys[index - 1]]
        if old is not None:
            old.kill()

    def close(self) -> None:
        """Release the workers and stop all unused ones, including those of garbage-collected pools."""
        with _lock:
            self._closed = True
            released = {worker for worker in self._acquired.values() if worker.is_owned()}  # none after a fork
            self._acquired.clear()
            for worker in released:
                worker.users.discard(self)
            current = set(_workers.values())
            unused = [worker for worker in released | current if not worker.users or worker not in current]
            for key in [key for key, worker in _workers.items() if worker in unused]:
                del _workers[key]
        stop_workers(unused)

    def _acquire(self, index: int) -> WorkerProcess:
        """The worker of a replica, started if necessary but not awaited. The caller holds the lock."""
        if self._closed:
            raise EngineError("the worker pool is closed.")
        if not 0 < index < len(self._devices):
            raise IndexError(f"there is no worker for replica {index} of {len(self._devices)}.")
        key = self._keys[index - 1]
        worker = _workers.get(key)
        if worker is None:
            worker = _workers[key] = WorkerProcess(self._worker_name(index))
        if self._acquired.get(index) is not worker:
            self._acquired[index] = worker
            worker.users.add(self)
        return worker

    def _worker_name(self, index: int) -> str:
        return f"replica {index} on {self._devices[index]}"

    def _wait_ready(self, worker: WorkerProcess, seconds: float) -> None:
        started = time.monotonic()
        if worker.wait_ready(started + _NOTICE_SECONDS):
            return
        with _lock:
            announced, self._announced = self._announced, True
        if not announced and _is_interactive() and not is_quiet():
            workers = f"{len(self._keys)} worker processes" if len(self._keys) > 1 else "a worker process"
            print(f"instep: starting {workers} (importing torch)", file=sys.stderr, flush=True)
        warn_after = min(_WARN_SECONDS, seconds / 2)
        if worker.wait_ready(started + warn_after):
            return
        warn_caller(f"{worker.name} has not started after {warn_after:.0f} s.\n{worker.python_stacks()}")
        if not worker.wait_ready(started + seconds):
            raise StartTimeout(
                f"{worker.name} did not start within {seconds:.0f} s and was killed.\n{worker.python_stacks()}\n"
                f"To wait longer: DataParallel(..., timeout={seconds * 10:.0f})."
            )


def _is_interactive() -> bool:
    """Whether stderr is a terminal or a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def stop_workers(workers: Sequence[WorkerProcess]) -> None:
    """Ask workers to stop when their results are complete, and kill those that have not stopped shortly after."""
    for worker in workers:
        if worker.before_stop is not None:
            worker.before_stop()
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.request_stop()
    for worker in workers:
        worker.wait_exit(deadline)
        worker.kill()


def stop_all() -> None:
    """Stop every worker of this process. Wrappers start new ones at their next call."""
    with _lock:
        _workers.clear()
    stop_workers(running_workers())


atexit.register(stop_all)
