"""Names of arguments that options are given by: one that no argument can have is said, rather than passed over."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from instep.errors import StructureError

_WILD = frozenset("*?[")


def check_names(
    option: str,
    table: Mapping[Any, Any],
    module: nn.Module,
    method: str,
    others: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> None:
    """`StructureError` for a name of an option that no argument of a method can have.

    `others` are methods that run in parallel too, and may be what the name was written for; `extra` are arguments that
    the method does not see.
    """
    own = _parameters(getattr(module, method))
    if own is None:
        return
    known = {*own, *extra, *_elsewhere(module)}
    for other in others:
        names = _parameters(getattr(module, other))
        if names is None:
            return
        known.update(names)
    for name in table:
        if isinstance(name, str) and not _may_be_of(name, known):
            raise StructureError(_unknown(option, name, method, [*own, *extra]))


def _may_be_of(name: str, known: Iterable[str]) -> bool:
    """Whether a path or pattern may lead to or into one of these arguments."""
    first = name.partition(".")[0]
    return not _WILD.isdisjoint(first) or first in known


def _unknown(option: str, name: str, method: str, own: Sequence[str]) -> str:
    first, dot, below = name.partition(".")
    near = difflib.get_close_matches(first, own, 1)
    meant = f"\nDid you mean {near[0] + dot + below!r}?" if near else ""
    return (
        f"{option}={{{name!r}: ...}} names no argument of {method}: it has {', '.join(own) or 'none'}.{meant}\n"
        f"If it is for a method that takes it by **kwargs, say which one: methods=['...']."
    )


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """The names that arguments of a function can have; None where they may have any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters]


def _elsewhere(module: nn.Module) -> Iterator[str]:
    """The names of arguments of the methods that a module's own classes have: `call` may run any of them."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            return
        for function in vars(cls).values():
            if inspect.isfunction(function) and function.__name__ != "__init__":
                yield from _parameters(function) or ()
