"""Which engine runs, by a fixed rule, and why in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from instep.engines.pool import stop_all
from instep.engines.protocol import Engine
from instep.engines.serial import SerialEngine
from instep.engines.threads import ThreadsEngine
from instep.errors import CannotCross, EngineError
from instep.settings import ENGINES, engine_from_environment


class Choice(NamedTuple):
    """An engine's name and the reason for it."""

    name: str
    why: str
    by_rule: bool = False
    """Whether nobody has asked for it, so that another one may take its place."""


def choose(asked: str, devices: Sequence[torch.device]) -> Choice:
    """The engine for these devices. A name given in code wins over `INSTEP_ENGINE`, which wins over the rule."""
    _check(asked, "engine")
    if asked != "auto":
        return Choice(asked, "it was asked for")
    environment = engine_from_environment()
    if environment is not None:
        _check(environment, "INSTEP_ENGINE")
        if environment != "auto":
            return Choice(environment, f"INSTEP_ENGINE={environment}")
    if len(devices) == 1:
        return Choice("serial", "one device needs no parallel engine")
    several = len({device for device in devices if device.type == "cuda"})
    if several > 1 and sys.platform == "linux" and not inside_worker():
        return Choice("processes", f"{several} accelerators are kept busy by as many interpreters", by_rule=True)
    return Choice("threads", f"{len(devices)} replicas in one process need no pickling and no start-up", by_rule=True)


def instead(choice: Choice, error: CannotCross) -> Choice:
    """What runs a module that cannot be sent to other processes; the error again where somebody asked for them."""
    if not choice.by_rule or choice.name != "processes":
        raise error
    return Choice("threads", f"worker processes cannot have the module: {str(error).splitlines()[0]}")


def start(choice: Choice, devices: Sequence[torch.device], restarts: int = 3, timeout: float = 600.0) -> Engine:
    """The chosen engine; it takes threads or worker processes only when it is first used."""
    if choice.name == "processes":
        from instep.engines.processes.engine import ProcessesEngine  # not on every system, and not for everybody

        return ProcessesEngine(devices, restarts=restarts, timeout=timeout)
    return SerialEngine() if choice.name == "serial" else ThreadsEngine(devices, timeout=timeout)


def inside_worker() -> bool:
    """Whether this process is a worker, which starts none of its own."""
    hands: Any = sys.modules.get("instep.engines.processes.hands")
    return hands is not None and bool(hands.inside_worker())


def shutdown() -> None:
    """End every replica thread and worker process; wrappers start new ones when they are called again."""
    stop_all()
    for name in ("fleet", "hands"):
        part: Any = sys.modules.get(f"instep.engines.processes.{name}")
        if part is not None:
            part.stop_all()


def _check(name: str, what: str) -> None:
    if name not in ENGINES:
        raise EngineError(f"{what}={name!r} is no engine: write one of {', '.join(ENGINES)}.")
