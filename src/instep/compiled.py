"""Beside torch.compile: what it must not trace, and what replicas compile in its place.

A call of ours is no graph: it crosses threads. The compiler leaves it alone, and whatever compiler was at work around
it is at work around each replica's module instead, as it would have been around the one.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from instep.locks import ProcessLock
from instep.private import anything_compiled, leave_frame_alone, set_frame_compiler

P = ParamSpec("P")
R = TypeVar("R")

_here = threading.local()
_WHY = (
    "instep runs the module on several devices, which is no single graph: compile without fullgraph=True, "
    "or compile the module itself, instep.DataParallel(torch.compile(net))"
)

_MEETING = (
    "replicas meet here (batch normalisation over the whole batch, instep.all_gather, instep.all_reduce), which no "
    "single graph holds: compile without fullgraph=True"
)


def untraced(function: Callable[P, R], why: str = _WHY) -> Callable[P, R]:
    """A function that the compiler runs as it is, with everything it calls; `compiler` tells which one was at work."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before, outer = set_frame_compiler(None), compiler()
        _here.compiler = before
        try:
            return function(*args, **kwargs)
        finally:
            _here.compiler = outer
            set_frame_compiler(before)

    leave_frame_alone(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return call


def meets(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which replicas meet, which no graph can hold."""
    return untraced(function, _MEETING)


def compiler() -> Any:
    """The compiler that was at work around the innermost untraced function of this thread; None for none."""
    return getattr(_here, "compiler", None)


def compiled_by(by: Any, function: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """A call whose code a compiler sees; nothing is different where there is none."""
    if by is None:
        return function(*args, **kwargs)
    before = set_frame_compiler(by)
    try:
        return function(*args, **kwargs)
    finally:
        set_frame_compiler(before)


def graph_limit(replicas: int) -> int | None:
    """How many graphs one piece of code may have with so many replicas, each of which needs its own; None for no limit
    to lift."""
    config: Any = sys.modules.get("torch._dynamo.config") if anything_compiled() else None
    return None if config is None else int(config.recompile_limit) * replicas


@contextmanager
def allowing(graphs: int | None) -> Iterator[None]:
    """So many graphs for one piece of code while inside; the setting is each thread's own in some versions of torch."""
    config: Any = sys.modules.get("torch._dynamo.config") if graphs is not None else None
    before = config.recompile_limit if config is not None else None
    if before is None or before >= graphs:
        yield
        return
    config.recompile_limit = graphs
    try:
        yield
    finally:
        config.recompile_limit = before


_stance_lock = ProcessLock()
_stances: list[Any] = []
_eager = 0


@contextmanager
def eagerly() -> Iterator[None]:
    """Compiled code runs uncompiled inside, and nothing is compiled.

    torch keeps that setting for the whole process: the first thread to come sets it, the last one to leave resets it.
    """
    global _eager
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance_lock:
        if not _eager:
            _stances.append(torch.compiler.set_stance("force_eager"))
        _eager += 1
    try:
        yield
    finally:
        with _stance_lock:
            _eager -= 1
            if not _eager:
                _stances.pop().__exit__(None, None, None)
