"""Engines: where replicas run. Registers instep's own engines; each is imported when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed

from instep.engines.select import register_engine
from instep.runtime.launcher import is_started_by_torchrun
from instep.runtime.process_role import inside_worker


def _torchrun_reason(devices: Sequence[torch.device]) -> str | None:  # noqa: ARG001
    if inside_worker():
        return None
    if is_started_by_torchrun():
        return "torchrun has started one process per device"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1:
        return "the default process group has several ranks"
    return None


def _serial_reason(devices: Sequence[torch.device]) -> str | None:
    return "one device needs no parallel engine" if len(devices) == 1 else None


def _processes_reason(devices: Sequence[torch.device]) -> str | None:
    count = len({device for device in devices if device.type == "cuda"})
    if count < 2 or sys.platform != "linux" or inside_worker():
        return None
    return f"{count} GPUs are driven by one process each, without a shared GIL"


def _threads_reason(devices: Sequence[torch.device]) -> str | None:
    return f"{len(devices)} replicas in one process need no pickling and no start-up"


# engine="auto" takes the first engine whose rule gives a reason.
register_engine("torchrun", "instep.engines.torchrun.engine:TorchrunEngine", _torchrun_reason)
register_engine("serial", "instep.engines.serial:SerialEngine", _serial_reason)
register_engine("processes", "instep.engines.processes.engine:ProcessesEngine", _processes_reason, fallback="threads")
register_engine("threads", "instep.engines.threads:ThreadsEngine", _threads_reason)
