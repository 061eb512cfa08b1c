"""The engine registry, and choosing an engine by name or by rule."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch

from instep.engines.base import Engine
from instep.engines.thread_pool import stop_all_threads
from instep.errors import CannotCross, EngineError
from instep.runtime.env import engine_from_env

AUTO = "auto"

EngineRule = Callable[[Sequence[torch.device]], str | None]
"""Returns why an engine suits a list of devices, or None if it does not."""


class _Registration(NamedTuple):
    target: str
    """The engine class, as `module:class`."""
    rule: EngineRule
    fallback: str | None


_registry: dict[str, _Registration] = {}


class EngineChoice(NamedTuple):
    """The name of an engine and why it was chosen."""

    name: str
    reason: str
    automatic: bool = False
    """Whether the rule chose it, so that another engine may replace it."""


def register_engine(name: str, target: str, rule: EngineRule, *, fallback: str | None = None) -> None:
    """Register an engine class, given as `module:class`; the module is imported when the engine is first created.

    ``engine="auto"`` takes the first registered engine whose rule returns a reason. `fallback` names the engine that
    replaces an automatically chosen one if the module cannot be sent to its replicas.
    """
    _registry[name] = _Registration(target, rule, fallback)


def engine_names() -> tuple[str, ...]:
    """The values that `DataParallel(engine=...)` accepts."""
    return (AUTO, *_registry)


def choose_engine(requested: str, devices: Sequence[torch.device]) -> EngineChoice:
    """Choose the engine for these devices.

    A name given in code takes precedence over `INSTEP_ENGINE`, which takes precedence over the rules.
    """
    _check_engine_name(requested, "engine")
    if requested != AUTO:
        return EngineChoice(requested, "requested")
    from_env = engine_from_env()
    if from_env is not None:
        _check_engine_name(from_env, "INSTEP_ENGINE")
        if from_env != AUTO:
            return EngineChoice(from_env, f"INSTEP_ENGINE={from_env}")
    for name, engine in _registry.items():
        if reason := engine.rule(devices):
            return EngineChoice(name, reason, automatic=True)
    raise EngineError(f"no engine runs on {', '.join(map(str, devices))}.")


def fallback_engine(choice: EngineChoice, error: CannotCross) -> EngineChoice:
    """The engine that replaces one to which the module cannot be sent; raises `error` if the user requested it."""
    fallback = _registry[choice.name].fallback
    if not choice.automatic or fallback is None:
        raise error
    return EngineChoice(fallback, f"engine={choice.name!r} cannot be used: {str(error).splitlines()[0]}")


def engine_class(choice: EngineChoice) -> type[Engine]:
    """The class of the chosen engine."""
    module, _, name = _registry[choice.name].target.partition(":")
    return cast(type[Engine], getattr(importlib.import_module(module), name))


def create_engine(
    choice: EngineChoice, devices: Sequence[torch.device], restarts: int = 3, timeout: float = 600.0
) -> Engine:
    """Create the chosen engine. It starts threads or worker processes when it is first used."""
    return engine_class(choice).create(devices, restarts=restarts, timeout=timeout)


def shutdown() -> None:
    """Stop all replica threads and worker processes. Wrappers start new ones when they are called again."""
    stop_all_threads()
    for registration in _registry.values():
        module, _, name = registration.target.partition(":")
        if module in sys.modules:
            engine = cast(type[Engine], getattr(sys.modules[module], name))
            engine.shutdown()


def _check_engine_name(name: str, source: str) -> None:
    if name not in engine_names():
        raise EngineError(f"{source}={name!r} is not an engine. Choose one of: {', '.join(engine_names())}.")
