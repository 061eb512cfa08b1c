"""The desks of all workers, one for each."""

from __future__ import annotations

import weakref

from instep.engines.processes.desk import Desk
from instep.engines.processes.hands import Worker
from instep.locks import ProcessLock

_desks: weakref.WeakKeyDictionary[Worker, Desk] = weakref.WeakKeyDictionary()
_opening = ProcessLock()


def desk_of(worker: Worker) -> Desk:
    """The desk of a worker, which all engines share, and which threads that come at once are not to open twice."""
    desk = _desks.get(worker)
    if desk is not None:
        return desk
    with _opening:
        if worker not in _desks:
            leave_desks()
            _desks[worker] = Desk(worker)
        return _desks[worker]


def leave_desks() -> None:
    """Forget what workers knew that have ended: memory of a device may hang on it."""
    for worker in [reference() for reference in _desks.keyrefs()]:
        if worker is not None and not (worker.own() and worker.alive()):
            _desks.pop(worker, None)
