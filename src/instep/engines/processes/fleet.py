"""The workers of an engine whose devices all differ, as one group: made when it is first needed, again after a death.

Only this process decides what is done in the group, and in what order. Each worker's desk says so to its worker,
between the other things that it says to it; calls reach all desks in the same order, so collectives do too. A worker
that comes to another one than was due ends the group, and what it was to bring comes by host memory.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from instep.engines.pool import Lease
from instep.engines.processes import orders
from instep.engines.processes.asking import Office
from instep.engines.processes.group import Group
from instep.engines.processes.hands import Late, Worker
from instep.engines.processes.orders import Join
from instep.engines.processes.shore import Passage
from instep.engines.processes.variables import FOR_NCCL
from instep.engines.processes.waiting import Stuck
from instep.engines.processes.wire import Gone
from instep.engines.tasks import inside_replica
from instep.errors import WorkerFailure
from instep.locks import ProcessLock
from instep.private import nccl_groups
from instep.settings import may_use_nccl

KIND = "nccl"
MORE: dict[int, dict[str, str | None]] = {}
"""By the number of a member: further variables of the environment that it is made in."""
_generations = itertools.count(1)
_UNUSED = "nobody uses it any longer"


def apart(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL can join these devices: GPUs, and no two of them the same."""
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices) > 1


class Home:
    """A group as its first member has it, which is this process."""

    def __init__(self, workers: Sequence[Worker], device: torch.device) -> None:
        self.workers = list(workers)
        self.users: weakref.WeakSet[Fleet] = weakref.WeakSet()
        self.first = next(_generations) << 32
        self.lost = False
        """Whether a worker ended, or did not answer, as the group was made."""
        self.failure: WorkerFailure | None = None
        """That too many have ended by then."""
        self.store, self.bell = os.memfd_create("instep-group", os.MFD_CLOEXEC), os.eventfd(0, os.EFD_CLOEXEC)
        self.group = Group(self.order(0, device), os.dup(self.store), os.dup(self.bell))
        self.turn = threading.Lock()
        """Held by whoever begins a collective, until this process's part of it has begun."""

    def order(self, rank: int, device: torch.device) -> Join:
        """What a member is told."""
        return Join(KIND, rank, len(self.workers) + 1, device, {**FOR_NCCL, **MORE.get(rank, {})}, self.first)

    def made(self) -> None:
        """All members have come: nobody is sent these any more."""
        for fd in (self.store, self.bell):
            os.close(fd)


class Officer(Office, Protocol):
    """An office that has threads for its workers."""

    @property
    def lease(self) -> Lease: ...


class Fleet:
    """An engine's way to the group of its workers."""

    def __init__(self, office: Officer, devices: Sequence[torch.device]) -> None:
        self._office, self._devices = office, list(devices)
        self._home: Home | None = None
        self._making = ProcessLock()
        self._possible = apart(devices)
        self.refusal = ""
        """Why there is no group, and will be none."""

    def fits(self, count: int) -> bool:
        """Whether weights and gradients of a call with so many replicas go through a group."""
        if not self._possible or self.refusal or count != len(self._devices) or not may_use_nccl():
            return False
        if KIND == "nccl" and nccl_groups() is None:
            self._refuse("this torch has none that can be given up when a worker dies")
            return False
        return not inside_replica()  # whoever waits for itself waits for ever

    def words(self) -> str:
        """What is to be said of how weights and gradients cross, after how tensors do."""
        if self._home is not None and not self._home.group.over:
            return ", weights and gradients by NCCL"
        return f", weights and gradients too, because NCCL is of no use here ({self.refusal})" if self.refusal else ""

    def ready(self, passage: Passage) -> Home | None:
        """The group of the workers that there are now; None where one has just died, or where there can be none.

        One that died makes way for another: who calls this again gets the group of those that there are then.
        """
        with self._making:
            try:
                workers = [self._office.worker(index)[0] for index in range(1, len(self._devices))]
            except Gone:  # whoever asks it for something sees to that
                return None
            if self._home is None or self._home.group.over or self._home.workers != workers:
                self.leave()
                self._home = self._find(workers) or self._make(workers, passage)
            return self._home

    def _find(self, workers: Sequence[Worker]) -> Home | None:
        """The group that another engine has made of the same workers."""
        with _lock:
            home = next((h for h in _homes if h.workers == workers and not h.group.over), None)
            if home is not None:
                home.users.add(self)
            return home

    def _make(self, workers: Sequence[Worker], passage: Passage) -> Home | None:
        home = Home(workers, self._devices[0])
        home.users.add(self)
        _tell_of_other_groups()
        tasks: list[Callable[[], None]] = [partial(_meet, home)]
        tasks += [partial(self._ask_in, home, index, passage) for index in range(1, len(self._devices))]
        try:
            self._office.lease.run(tasks, stop=lambda: home.group.abort("the call was interrupted"))
        except Exception as error:
            if home.failure is not None:
                raise home.failure from None
            if not home.lost:
                self._refuse(str(error))
            return None
        finally:
            home.made()
        with _lock:
            _homes.append(home)
        return home

    def _refuse(self, why: str) -> None:
        self.refusal = why.strip().splitlines()[0] if why.strip() else "no reason was given"
        warnings.warn(
            f"weights and gradients cross between GPUs by host memory, because NCCL is of no use here: {self.refusal}\n"
            f"INSTEP_NCCL=0 says that this is known.",
            stacklevel=2,
        )

    def _ask_in(self, home: Home, index: int, passage: Passage) -> None:
        """Have a worker take its place in a group."""
        worker: Worker | None = None
        try:
            worker, desk = self._office.worker(index)
            if worker is not home.workers[index - 1]:
                raise Gone(f"{worker.name} was replaced")
            with desk.busy:
                self._office.settle(index, desk, passage, False)
                box = desk.ask(orders.JOIN, home.order(index, self._devices[index]), (home.store, home.bell))
            desk.answer(box, None)
        except BaseException as error:
            home.lost = home.lost or isinstance(error, (Gone, Late, Stuck))
            home.group.abort(f"{type(error).__name__}: {error}")
            if isinstance(error, Gone) and worker is home.workers[index - 1]:
                self._bury(home, index, error)
            raise

    def _bury(self, home: Home, index: int, gone: Gone) -> None:
        try:
            self._office.bury(index, home.workers[index - 1], gone)
        except WorkerFailure as failure:
            home.failure = failure

    def lose(self, worker: Worker | None) -> None:
        """A worker is no more, or does not answer: nobody waits for it in a collective."""
        with _lock:
            homes = [home for home in (*_homes, self._home) if home is not None and worker in home.workers]
        for home in homes:
            home.group.abort("a worker ended")

    def leave(self) -> None:
        """Give the group back; one that nobody else uses ends."""
        home, self._home = self._home, None
        if home is None:
            return
        with _lock:
            home.users.discard(self)
            ends = not home.users or bool(home.group.over)
            if ends and home in _homes:
                _homes.remove(home)
        if ends:
            home.group.abort(_UNUSED)

    def close(self) -> None:
        """Give the group back, and end all that nobody uses: those of engines that were dropped stay until now."""
        self.leave()
        with _lock:
            ended = [home for home in _homes if not home.users]
            _homes[:] = [home for home in _homes if home not in ended]
        for home in ended:
            home.group.abort(_UNUSED)


def _meet(home: Home) -> None:
    try:
        home.group.make()
    except BaseException as error:
        home.group.abort(f"{type(error).__name__}: {error}")
        raise


def _tell_of_other_groups() -> None:
    """NCCL keeps to the interface that it began with: another group's, if there is one in this process."""
    global _told
    if not _told and dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        _told = True
        warnings.warn(
            "this process has an NCCL group of its own already, so the sockets by which workers meet listen on its "
            "interface, and not on loopback. INSTEP_NCCL=0 does without them.",
            stacklevel=2,
        )


def stop_all() -> None:
    """End every group of this process; engines make new ones when they are used again."""
    with _lock:
        homes, _homes[:] = list(_homes), []
    for home in homes:
        home.group.abort("this process ends its groups")


_told = False
_homes: list[Home] = []
_lock = ProcessLock(_homes.clear)
atexit.register(stop_all)
