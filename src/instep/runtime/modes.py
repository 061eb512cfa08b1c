"""Inference mode, combined context managers, and torch.compile around parallel calls."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from instep.runtime.locks import ForkSafeLock
from instep.runtime.torch_private import has_compiled_code, inference_guard, set_eval_frame, skip_frame


def set_inference_mode(on: bool) -> AbstractContextManager[Any]:
    """`torch.inference_mode(on)`, where it is not so already.

    What torch enters sets everything as it was when it is cleared away, too: if an interruption keeps it from its end,
    that is long after, and turns gradients off for the rest of the program. So it is entered only where it must be, and
    in a `with` statement no interruption comes in between. Whoever leaves inference mode finds gradients turned on.
    """
    return nullcontext() if torch.is_inference_mode_enabled() == on else inference_guard(on)


class CombinedContext(ExitStack):
    """Several context managers, entered together."""

    def __init__(self, managers: Sequence[AbstractContextManager[Any]]) -> None:
        super().__init__()
        self._managers = managers

    def __enter__(self) -> CombinedContext:
        super().__enter__()
        for manager in self._managers:
            self.enter_context(manager)
        return self


P = ParamSpec("P")
R = TypeVar("R")

_thread_local = threading.local()
_CALL_REASON = (
    "instep runs the module on several devices, which is no single graph: compile without fullgraph=True, "
    "or compile the module itself, instep.DataParallel(torch.compile(net))"
)

_COLLECTIVE_REASON = (
    "replicas meet here (batch normalisation over the whole batch, instep.all_gather, instep.all_reduce), which no "
    "single graph holds: compile without fullgraph=True"
)


def disable_compile(function: Callable[P, R], why: str = _CALL_REASON) -> Callable[P, R]:
    """A function that the compiler runs as it is, with everything it calls; `compiler` tells which one was at work."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        before, outer = set_eval_frame(None), active_compiler()
        _thread_local.compiler = before
        try:
            return function(*args, **kwargs)
        finally:
            _thread_local.compiler = outer
            set_eval_frame(before)

    skip_frame(call)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return call


def disable_compile_for_collective(function: Callable[P, R]) -> Callable[P, R]:
    """A function in which replicas meet, which no graph can hold."""
    return disable_compile(function, _COLLECTIVE_REASON)


def active_compiler() -> Any:
    """The compiler that was at work around the innermost untraced function of this thread; None for none."""
    return getattr(_thread_local, "compiler", None)


def call_compiled(by: Any, function: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """A call whose code a compiler sees; nothing is different where there is none."""
    if by is None:
        return function(*args, **kwargs)
    before = set_eval_frame(by)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(before)


def scaled_recompile_limit(replicas: int) -> int | None:
    """How many graphs one piece of code may have with so many replicas, each of which needs its own; None for no limit
    to lift."""
    config: Any = sys.modules.get("torch._dynamo.config") if has_compiled_code() else None
    return None if config is None else int(config.recompile_limit) * replicas


@contextmanager
def use_recompile_limit(graphs: int | None) -> Iterator[None]:
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


_stance_lock = ForkSafeLock()
_stances: list[Any] = []
_eager_depth = 0


@contextmanager
def force_eager() -> Iterator[None]:
    """Compiled code runs uncompiled inside, and nothing is compiled.

    torch keeps that setting for the whole process: the first thread to come sets it, the last one to leave resets it.
    """
    global _eager_depth
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance_lock:
        if not _eager_depth:
            _stances.append(torch.compiler.set_stance("force_eager"))
        _eager_depth += 1
    try:
        yield
    finally:
        with _stance_lock:
            _eager_depth -= 1
            if not _eager_depth:
                _stances.pop().__exit__(None, None, None)
