"""Choosing an engine by name or by rule."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from instep.engines.base import Engine
from instep.engines.serial import SerialEngine
from instep.engines.thread_pool import stop_all_threads
from instep.engines.threads import ThreadsEngine
from instep.errors import CannotCross, EngineError
from instep.runtime.env import ENGINE_NAMES, engine_from_env


class EngineChoice(NamedTuple):
    """An engine's name and the reason for it."""

    name: str
    reason: str
    automatic: bool = False
    """Whether nobody has asked for it, so that another one may take its place."""


def choose_engine(asked: str, devices: Sequence[torch.device]) -> EngineChoice:
    """The engine for these devices. A name given in code wins over `INSTEP_ENGINE`, which wins over the rule."""
    _check_engine_name(asked, "engine")
    if asked != "auto":
        return EngineChoice(asked, "it was asked for")
    environment = engine_from_env()
    if environment is not None:
        _check_engine_name(environment, "INSTEP_ENGINE")
        if environment != "auto":
            return EngineChoice(environment, f"INSTEP_ENGINE={environment}")
    if len(devices) == 1:
        return EngineChoice("serial", "one device needs no parallel engine")
    several = len({device for device in devices if device.type == "cuda"})
    if several > 1 and sys.platform == "linux" and not inside_worker():
        return EngineChoice(
            "processes", f"{several} accelerators are kept busy by as many interpreters", automatic=True
        )
    return EngineChoice(
        "threads", f"{len(devices)} replicas in one process need no pickling and no start-up", automatic=True
    )


def fallback_engine(choice: EngineChoice, error: CannotCross) -> EngineChoice:
    """What runs a module that cannot be sent to other processes; the error again where somebody asked for them."""
    if not choice.automatic or choice.name != "processes":
        raise error
    return EngineChoice("threads", f"worker processes cannot have the module: {str(error).splitlines()[0]}")


def create_engine(
    choice: EngineChoice, devices: Sequence[torch.device], restarts: int = 3, timeout: float = 600.0
) -> Engine:
    """The chosen engine; it takes threads or worker processes only when it is first used."""
    if choice.name == "processes":
        from instep.engines.processes.engine import ProcessesEngine  # not on every system, and not for everybody

        return ProcessesEngine(devices, restarts=restarts, timeout=timeout)
    return SerialEngine() if choice.name == "serial" else ThreadsEngine(devices, timeout=timeout)


def inside_worker() -> bool:
    """Whether this process is a worker, which starts none of its own."""
    hands: Any = sys.modules.get("instep.engines.processes.lifecycle.pool")
    return hands is not None and bool(hands.inside_worker())


def shutdown() -> None:
    """End every replica thread and worker process; wrappers start new ones when they are called again."""
    stop_all_threads()
    for name, stop in (("controller.nccl_manager", "abort_all_groups"), ("lifecycle.pool", "stop_all")):
        part: Any = sys.modules.get(f"instep.engines.processes.{name}")
        if part is not None:
            getattr(part, stop)()


def _check_engine_name(name: str, what: str) -> None:
    if name not in ENGINE_NAMES:
        raise EngineError(f"{what}={name!r} is no engine: write one of {', '.join(ENGINE_NAMES)}.")
