"""Whose a hook is: the user's, or one by which torch or another library does its work."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "compressed_tensors", "diffusers", "instep", "optimum", "peft", "torch", "torchao"}
    | {"transformers"}
)


def users(hooks: Iterable[Any]) -> Iterator[Any]:
    """Those hooks that no library put there."""
    return (hook for hook in hooks if _package(hook) not in LIBRARIES)


def bare_hook(hook: Any) -> Any:
    """The function behind a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _package(hook: Any) -> str:
    """The package that a hook's function, or the class of a hook that is an object, is defined in."""
    function = bare_hook(hook)
    where = getattr(function, "__module__", None) if hasattr(function, "__code__") else type(function).__module__
    return (where or "").partition(".")[0]
