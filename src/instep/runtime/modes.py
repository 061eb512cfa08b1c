"""Inference and grad mode, combined context managers, and torch.compile around parallel calls.

A parallel call runs in several threads and cannot be traced as one graph. Dynamo skips it; the compiler that was active
around it compiles each replica's module instead.
"""

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
    """Context manager: `torch.inference_mode(on)`, entered only if the mode differs.

    torch's guard restores the mode also when it is garbage collected. After an interruption that may be long after, and
    would turn gradients off for the rest of the program. So the guard is entered only where it is needed. Leaving
    inference mode enables gradients.
    """
    return NO_CONTEXT if torch.is_inference_mode_enabled() == on else inference_guard(on)


def set_grad_mode(on: bool) -> AbstractContextManager[Any]:
    """Context manager: `torch.set_grad_enabled(on)`, if the mode differs."""
    return NO_CONTEXT if torch.is_grad_enabled() == on else torch.set_grad_enabled(on)


NO_CONTEXT: AbstractContextManager[None] = nullcontext()
"""Does nothing. Shared: it may be entered any number of times."""


class CombinedContext(ExitStack):
    """Enters several context managers."""

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


class _ThreadLocal(threading.local):
    compiler: Any = None


_thread_local = _ThreadLocal()
_CALL_REASON = (
    "instep runs the module on several devices, which cannot be traced as a single graph: compile without "
    "fullgraph=True, or compile the module itself: instep.DataParallel(torch.compile(net)). To export it with "
    "strict=True: torch.export.export(model.module, ...)"
)

_COLLECTIVE_REASON = (
    "collectives (synchronized batch normalization, instep.all_gather, instep.all_reduce) cannot be traced: compile "
    "without fullgraph=True"
)


def disable_compile(function: Callable[P, R], reason: str = _CALL_REASON) -> Callable[P, R]:
    """Decorator: dynamo does not trace the function. `active_compiler` returns the compiler around it."""

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
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call


def disable_compile_for_collective(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for collectives: `disable_compile` with the reason for a graph break."""
    return disable_compile(function, _COLLECTIVE_REASON)


def active_compiler() -> Any:
    """The compiler around the innermost function under `disable_compile` in this thread; None if there is none."""
    return _thread_local.compiler


def call_compiled(compiler: Any, function: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Call a function with a compiler active; without one, call it directly."""
    if compiler is None:
        return function(*args, **kwargs)
    before = set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(before)


def scaled_recompile_limit(replicas: int) -> int | None:
    """Dynamo's recompile limit times the replicas, which compile separately; None if nothing is compiled."""
    config: Any = sys.modules.get("torch._dynamo.config") if has_compiled_code() else None
    return None if config is None else int(config.recompile_limit) * replicas


@contextmanager
def use_recompile_limit(limit: int | None) -> Iterator[None]:
    """Context manager: raise dynamo's recompile limit, which is thread-local in some versions of torch."""
    config: Any = sys.modules.get("torch._dynamo.config") if limit is not None else None
    before = config.recompile_limit if config is not None else None
    if before is None or before >= limit:
        yield
        return
    config.recompile_limit = limit
    try:
        yield
    finally:
        config.recompile_limit = before


_stance_lock = ForkSafeLock()
_stances: list[Any] = []
_eager_depth = 0


@contextmanager
def force_eager() -> Iterator[None]:
    """Context manager: compiled code runs eagerly, and nothing is compiled.

    The stance is process-wide in torch: the first thread to enter sets it, the last one to leave resets it.
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
