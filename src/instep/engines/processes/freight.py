"""What crosses between this process and a worker: values, exceptions, and the script's changed globals."""

from __future__ import annotations

from instep.engines.processes.cannot import CannotCross
from instep.engines.processes.depot import Depot, Parcel
from instep.engines.processes.errors_across import WorkerTraceback, pack_error, unpack_error

__all__ = ["CannotCross", "Depot", "Parcel", "WorkerTraceback", "pack_error", "unpack_error"]
