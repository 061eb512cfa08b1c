"""The pool of worker processes, shared by all wrappers of this process."""

from __future__ import annotations

import atexit
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from instep.engines.processes.lifecycle.process import WorkerProcess, running_workers
from instep.engines.processes.lifecycle.watchdog import skip_breakpoint
from instep.errors import EngineError, WorkerFailure
from instep.runtime.env import is_quiet
from instep.runtime.locks import ForkSafeLock
from instep.runtime.process_role import inside_worker, mark_worker

MIN_START_SECONDS = 120.0
"""What a worker has to come up, at least, however soon one that does not answer is given up."""
_MAX_START_SECONDS = 86_400.0
"""What it has at most, also without any `timeout`."""
_NOTICE_SECONDS = 1.5
_WARN_SECONDS = 60.0
"""Seconds after which it is said where a worker stands that is not up."""
_STOP_SECONDS = 1.0


def enter_worker() -> None:
    """This process is a worker from now on."""
    mark_worker()
    sys.breakpointhook = skip_breakpoint


class StartTimeout(WorkerFailure):
    """A worker did not come up in time."""


_workers: dict[tuple[str, int], WorkerProcess] = {}
_lock = ForkSafeLock(_workers.clear)


class WorkerPool:
    """The workers for a list of devices, one for each but the first, which is this process.

    They are held until `close`, or until nobody holds this any longer. Wrappers on the same devices share them. In a
    forked child there are none of the parent's: it starts its own.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        if inside_worker():
            raise EngineError(
                "a worker process cannot start workers of its own: the module, or a file that it imports, builds a "
                "wrapper with engine='processes' as it runs. Put that behind `if __name__ == \"__main__\":`."
            )
        self._devices = list(devices)
        self._keys: list[tuple[str, int]] = []
        seen: Counter[str] = Counter()
        for device in map(str, self._devices[1:]):
            self._keys.append((device, seen[device]))
            seen[device] += 1
        self._held: dict[int, WorkerProcess] = {}
        self._closed = self._announced = False

    def get(self, index: int, timeout: float = MIN_START_SECONDS) -> WorkerProcess:
        """The worker of a replica, up and ready, alive or not; the first call starts all that are missing at once.

        One that is not up after `timeout` seconds is `Late`, but none before it had time to import torch. Another one
        than before means that the one before was replaced, for this wrapper or for another.
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
        """The worker that `get` gave last."""
        return self._held.get(index)

    def replace(self, index: int) -> WorkerProcess:
        """A new worker instead of the one that `get` gave last; what is left of that one is ended."""
        self.kill(index)
        return self.get(index)

    def kill(self, index: int) -> None:
        """End what is left of the worker that `get` gave last, or that did not come up; `get` starts another."""
        with _lock:
            old = self._held.pop(index, None)
            if old is not None and _workers.get(self._keys[index - 1]) is old:
                del _workers[self._keys[index - 1]]
        if old is not None:
            old.kill()

    def close(self) -> None:
        """Give the workers back; all that nobody uses end, also those of wrappers that were dropped."""
        with _lock:
            self._closed = True
            mine = {worker for worker in self._held.values() if worker.is_owned()}  # not the parent's of a forked child
            self._held.clear()
            for worker in mine:
                worker.users.discard(self)
            current = set(_workers.values())
            ended = [worker for worker in mine | current if not worker.users or worker not in current]
            for key in [key for key, worker in _workers.items() if worker in ended]:
                del _workers[key]
        _stop_workers(ended)

    def _acquire(self, index: int) -> WorkerProcess:
        """The worker of a replica, under the lock, perhaps still on its way."""
        if self._closed:
            raise EngineError("this engine was closed.")
        if not 0 < index < len(self._devices):
            raise IndexError(f"there is no worker for replica {index} of {len(self._devices)}.")
        key = self._keys[index - 1]
        worker = _workers.get(key)
        if worker is None:
            worker = _workers[key] = WorkerProcess.start(self._worker_name(index))
        if self._held.get(index) is not worker:
            self._held[index] = worker
            worker.users.add(self)
        return worker

    def _worker_name(self, index: int) -> str:
        return f"replica {index} on {self._devices[index]}"

    def _wait_ready(self, worker: WorkerProcess, seconds: float) -> None:
        started = time.monotonic()
        if worker.wait_ready(started + _NOTICE_SECONDS):
            return
        with _lock:
            told, self._announced = self._announced, True
        if not told and _is_interactive() and not is_quiet():
            many = f"{len(self._keys)} worker processes" if len(self._keys) > 1 else "a worker process"
            print(f"instep: starting {many} (torch has to be imported)", file=sys.stderr, flush=True)
        patience = min(_WARN_SECONDS, seconds / 2)
        if worker.wait_ready(started + patience):
            return
        warnings.warn(f"{worker.name} has not come up for {patience:.0f} s.\n{worker.python_stacks()}", stacklevel=2)
        if not worker.wait_ready(started + seconds):
            raise StartTimeout(
                f"{worker.name} did not come up within {seconds:.0f} s and was ended.\n{worker.python_stacks()}\n"
                f"If it only takes long: DataParallel(..., timeout={seconds * 10:.0f})."
            )


def _is_interactive() -> bool:
    """Whether what is printed is seen as it comes: at a terminal, or in a notebook."""
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def _stop_workers(workers: Sequence[WorkerProcess]) -> None:
    """End workers: those that are idle by themselves, the others a moment later all the same."""
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.request_stop()
    for worker in workers:
        worker.wait_exit(deadline)
        worker.kill()


def stop_all() -> None:
    """End every worker of this process; wrappers start new ones when they are called again."""
    with _lock:
        _workers.clear()
    _stop_workers(running_workers())


atexit.register(stop_all)
