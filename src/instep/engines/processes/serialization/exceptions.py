"""Sends exceptions between processes with their type, causes and traceback."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from instep.engines.processes.serialization.reducers import exception_slots, make_exception, set_attributes
from instep.engines.processes.serialization.registry import CodeRegistry, PickledValue
from instep.errors import CannotCross

_MAX_CHAIN = 50


class WorkerTraceback(Exception):
    """The traceback of an exception in another process. It is the cause on Python 3.10, which has no notes."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def pack_exception(error: BaseException, registry: CodeRegistry) -> PickledValue:
    """Pickle an exception with its traceback, causes and attributes. Parts that cannot be pickled become their repr."""
    try:
        return registry.pack(_exception_chain(error, registry, plain=False))
    except CannotCross:
        return registry.pack(_exception_chain(error, registry, plain=True))


def unpack_exception(pickled: PickledValue, registry: CodeRegistry) -> BaseException:
    """Rebuild an exception without calling its `__init__`. The traceback becomes a note."""
    links = registry.unpack(pickled)
    errors = [_rebuild(link) for link in links]
    for error, link in zip(errors, links, strict=True):
        error.__cause__ = errors[link["cause"]] if link["cause"] is not None else None
        error.__context__ = errors[link["context"]] if link["context"] is not None else None
        error.__suppress_context__ = link["suppressed"]
    for error, link in zip(errors, links, strict=True):
        _add_worker_traceback(error, link["stack"])
    return errors[0]


def _exception_chain(error: BaseException, registry: CodeRegistry, plain: bool) -> list[dict[str, Any]]:
    """An exception, its causes and contexts. They refer to each other by index."""
    errors = [error]
    for one in errors:
        for other in (one.__cause__, one.__context__):
            is_new = other is not None and not any(other is known for known in errors)
            if other is not None and is_new and len(errors) < _MAX_CHAIN:
                errors.append(other)
    indices = {id(one): index for index, one in enumerate(errors)}
    return [
        {
            **_exception_parts(one, registry, plain),
            "stack": [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(one.__traceback__)],
            "cause": indices.get(id(one.__cause__)),
            "context": indices.get(id(one.__context__)),
            "suppressed": one.__suppress_context__,
        }
        for one in errors
    ]


def _exception_parts(error: BaseException, registry: CodeRegistry, plain: bool) -> dict[str, Any]:
    cls, args, slots, attributes = type(error), error.args, exception_slots(error), dict(error.__dict__)
    if plain:
        bases = (base for base in cls.__mro__ if issubclass(base, BaseException))
        cls = next(base for base in bases if registry.can_pack(base))
        args = tuple(_or_repr(value, registry) for value in args)
        slots = {name: value for name, value in slots.items() if registry.can_pack(value)}
        attributes = {name: _or_repr(value, registry) for name, value in attributes.items()}
        if cls is not type(error):
            args = (f"{type(error).__qualname__}: {_safe_text(error, str)}",)
    return {"class": cls, "args": args, "slots": slots, "attributes": attributes}


def _or_repr(value: Any, registry: CodeRegistry) -> Any:
    return value if registry.can_pack(value) else _safe_text(value, repr)


def _safe_text(value: Any, to_text: Callable[[Any], str]) -> str:
    try:
        return to_text(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose {to_text.__name__} raised {type(error).__name__}>"


def _rebuild(link: dict[str, Any]) -> BaseException:
    error = make_exception(link["class"], link["args"], link["slots"])
    set_attributes(error, link["attributes"])
    return error


def _add_worker_traceback(error: BaseException, stack: list[tuple[str, int, str, str]]) -> None:
    """Add the worker's traceback. Source lines are read here, because a notebook's cells only exist here."""
    if not stack:
        return
    frames = []
    for file, line, name, text in stack:
        frame = traceback.FrameSummary(file, line, name)
        frames.append(frame if frame.line else traceback.FrameSummary(file, line, name, line=text))
    text = "Traceback in the worker (most recent call last):\n" + "".join(traceback.format_list(frames)).rstrip()
    if hasattr(error, "add_note"):
        error.add_note(text)
        return
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
    if not isinstance(last, WorkerTraceback):
        last.__cause__ = WorkerTraceback(text)
