"""Sends exceptions between processes with their type, causes and traceback."""

from __future__ import annotations

import traceback
from typing import Any

from instep.engines.processes.serialization.reducers import exception_slots, make_exception, set_attributes
from instep.engines.processes.serialization.registry import CodeRegistry, Payload
from instep.errors import CannotCross

_MAX_CHAIN = 50


class WorkerTraceback(Exception):
    """Where in another process an exception was raised; on Python 3.10, which has no notes, it is the cause."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def pack_exception(error: BaseException, depot: CodeRegistry) -> Payload:
    """An exception with its traceback, its causes and its attributes. What cannot cross of them goes as its repr."""
    try:
        return depot.pack(_exception_chain(error, depot, plain=False))
    except CannotCross:
        return depot.pack(_exception_chain(error, depot, plain=True))


def unpack_exception(parcel: Payload, depot: CodeRegistry) -> BaseException:
    """The exception, of its own type but never through that type's `__init__`; the traceback is a note on it."""
    links = depot.unpack(parcel)
    made = [_rebuild(link) for link in links]
    for error, link in zip(made, links, strict=True):
        error.__cause__ = made[link["cause"]] if link["cause"] is not None else None
        error.__context__ = made[link["context"]] if link["context"] is not None else None
        error.__suppress_context__ = link["suppressed"]
    for error, link in zip(made, links, strict=True):
        _add_worker_traceback(error, link["stack"])
    return made[0]


def _exception_chain(error: BaseException, depot: CodeRegistry, plain: bool) -> list[dict[str, Any]]:
    """The exception and those that led to it, each once; they refer to one another by their places."""
    errors = [error]
    for one in errors:
        for other in (one.__cause__, one.__context__):
            known = other is None or any(other is e for e in errors)
            if other is not None and not known and len(errors) < _MAX_CHAIN:
                errors.append(other)
    place = {id(one): number for number, one in enumerate(errors)}
    return [
        {
            **_exception_parts(one, depot, plain),
            "stack": [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(one.__traceback__)],
            "cause": place.get(id(one.__cause__)),
            "context": place.get(id(one.__context__)),
            "suppressed": one.__suppress_context__,
        }
        for one in errors
    ]


def _exception_parts(error: BaseException, depot: CodeRegistry, plain: bool) -> dict[str, Any]:
    cls, args, slots, attributes = type(error), error.args, exception_slots(error), dict(error.__dict__)
    if plain:
        fallback = cls
        while not _is_sendable(fallback, depot):
            fallback = next(base for base in fallback.__mro__[1:] if issubclass(base, BaseException))
        args = tuple(_or_repr(value, depot) for value in args)
        slots = {name: value for name, value in slots.items() if _is_sendable(value, depot)}
        attributes = {name: _or_repr(value, depot) for name, value in attributes.items()}
        if fallback is not cls:
            args = (f"{cls.__qualname__}: {_safe_str(error)}",)
        cls = fallback
    return {"class": cls, "args": args, "slots": slots, "attributes": attributes}


def _is_sendable(value: Any, depot: CodeRegistry) -> bool:
    return depot.can_pack(value)


def _or_repr(value: Any, depot: CodeRegistry) -> Any:
    if _is_sendable(value, depot):
        return value
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raised {type(error).__name__}>"


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its text raised {type(problem).__name__}>"


def _rebuild(link: dict[str, Any]) -> BaseException:
    made = make_exception(link["class"], link["args"], link["slots"])
    set_attributes(made, link["attributes"])
    return made


def _add_worker_traceback(error: BaseException, stack: list[tuple[str, int, str, str]]) -> None:
    """Say where in the other process it was raised. Lines are read here, where a notebook's cells are known."""
    if not stack:
        return
    shown = []
    for file, line, name, text in stack:
        here = traceback.FrameSummary(file, line, name)
        shown.append(here if here.line else traceback.FrameSummary(file, line, name, line=text))
    said = "Traceback in the worker (most recent call last):\n" + "".join(traceback.format_list(shown)).rstrip()
    if hasattr(error, "add_note"):
        error.add_note(said)
        return
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
    if not isinstance(last, WorkerTraceback):
        last.__cause__ = WorkerTraceback(said)
