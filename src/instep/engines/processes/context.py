"""Context variables of the caller that code in a worker may read.

A worker has the same variable where it imports the module that holds it, and where a function or class that reads it
crossed by value; nobody else can ask for it there.
"""

from __future__ import annotations

import sys
from contextvars import Context, ContextVar
from typing import Any

from instep.engines.processes.by_value import place_of
from instep.engines.processes.cannot import refusal
from instep.engines.processes.depot import Depot
from instep.engines.processes.pickling import LeftOut

_THEIR_OWN = frozenset({"IPython", "ipykernel", "numpy", "torch", "tornado", "traitlets"})
"""Libraries whose variables are about this process."""


def carried(context: Context, depot: Depot) -> list[tuple[ContextVar[Any], Any]]:
    """The variables that the other side of a line may read, with their values; one that cannot cross says so there."""
    return [
        (variable, _value(variable, value, depot)) for variable, value in context.items() if _reads(variable, depot)
    ]


def _reads(variable: ContextVar[Any], depot: Depot) -> bool:
    number = depot.number(variable)
    if number is not None:
        return depot.crossed(number)
    place = place_of(variable)
    package = "" if place is None else place[0].partition(".")[0]
    return bool(package) and package not in _THEIR_OWN and package not in sys.stdlib_module_names


def _value(variable: ContextVar[Any], value: Any, depot: Depot) -> Any:
    if depot.can_pack(value):
        return value
    return LeftOut(str(refusal(f"the context variable {variable.name!r} (a {type(value).__name__})", None)))
