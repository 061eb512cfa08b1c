"""The error for what cannot leave its process, and the search for the place where it is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.engines.processes.by_value import by_name, names_read
from instep.engines.processes.reducers import stays_home
from instep.errors import CannotCross
from instep.replicas.memory import overlap

__all__ = ["CannotCross", "Culprit", "Step", "find", "refusal", "refuse_shared"]

_TRIALS_AT_MOST = 2000


class Step(NamedTuple):
    """One step from an object to something that it holds."""

    text: str
    kind: str = "item"
    """Steps to an "item" or an "attribute" are written one after another; a "start" begins anew."""
    space: dict[str, Any] | None = None
    """For a step from a function to a global: the dictionary of globals."""
    name: str = ""


class Culprit(NamedTuple):
    """What cannot be pickled, and the way there."""

    path: tuple[Step, ...]
    thing: Any

    @property
    def through(self) -> Step | None:
        """The last step on the way from a function to a global that it reads, if there is one."""
        return next((step for step in reversed(self.path) if step.space is not None), None)

    @property
    def is_global(self) -> bool:
        """Whether it is a global itself, and not something that one holds."""
        return bool(self.path) and self.path[-1].space is not None

    def describe(self, what: str) -> str:
        """The way in words: argument 'batch'['lock'] (a _thread.lock)."""
        path, start = list(self.path), what
        for place in range(len(path) - 1, -1, -1):
            if path[place].kind == "start":
                start, path = path[place].text, path[place + 1 :]
                break
        rest = "".join(step.text for step in path)
        if path and path[0].kind == "attribute":
            where = f"attribute '{rest[1:]}'"
            start = f"{start.rstrip()}, {where}" if start else where
        elif path and start.endswith(" ") and rest.startswith("["):
            start += rest.replace("[", "", 1).replace("]", "", 1)
        else:
            start = f"{start.rstrip()}{rest}" or "a value"
        return f"{start} (a {_type_name(self.thing)})"


def refusal(described: str, reason: BaseException | None, *, is_global: bool = False) -> CannotCross:
    """The error for something found; `is_global` says that it is a global itself, which no object can leave out."""
    why = f": {reason}" if reason is not None and str(reason) else ""
    otherwise = (
        "make it inside of the function that uses it"
        if is_global
        else "keep it out of what the replicas need (`__getstate__` can leave it out)"
    )
    return CannotCross(f"{described} cannot be sent to another process{why}. Write engine='threads', or {otherwise}.")


def find(value: Any, failure: Callable[[Any], BaseException | None]) -> Culprit | None:
    """Look for the innermost thing that cannot be packed; `failure` packs one alone and gives back the error."""
    try:
        return _Search(failure).inside(value, ())
    except RecursionError:  # too deep to look for it: the error has to do without the path
        return None


class _Search:
    def __init__(self, failure: Callable[[Any], BaseException | None]) -> None:
        self._failure = failure
        self._seen: dict[int, Any] = {}
        self._trials = 0

    def _fails(self, thing: Any) -> bool:
        self._trials += 1
        return self._failure(thing) is not None

    def inside(self, thing: Any, path: tuple[Step, ...]) -> Culprit | None:
        """The culprit in something known to fail, or None where all that fails in it is being looked at already."""
        self._seen[id(thing)] = thing
        own = True
        for step, held in _held_by(thing):
            if self._trials > _TRIALS_AT_MOST:
                break
            if id(held) in self._seen:
                own = False
                continue
            if _plain(held) or not self._fails(held):
                continue
            own = False
            found = self.inside(held, (*path, step))
            if found is not None:
                return found
        return Culprit(path, thing) if own or not path else None


def _plain(thing: Any) -> bool:
    return thing is None or isinstance(thing, (bool, int, float, complex, str, bytes))


def _held_by(thing: Any) -> Iterator[tuple[Step, Any]]:
    """What pickling a thing would pickle next, roughly, with the step to it."""
    if stays_home(thing):
        return
    if isinstance(thing, type):
        if not by_name(thing):
            yield from ((Step(f".{name}", "attribute"), held) for name, held in vars(thing).items())
        return
    if isinstance(thing, types.FunctionType):
        if not by_name(thing):
            yield from _held_by_function(thing)
        return
    if isinstance(thing, (staticmethod, classmethod)):
        yield Step(""), thing.__func__
    elif isinstance(thing, property):
        yield from ((Step(""), part) for part in (thing.fget, thing.fset, thing.fdel))
    elif isinstance(thing, types.MethodType):
        yield Step("'s own object"), thing.__self__
        yield Step(""), thing.__func__
    elif isinstance(thing, functools.partial):
        yield Step("'s function"), thing.func
        yield Step("'s arguments"), thing.args
        yield Step("'s arguments"), thing.keywords
    if isinstance(thing, dict):
        for key, held in thing.items():
            yield Step(f"'s key {key!r}"), key
            yield Step(f"[{key!r}]"), held
    elif isinstance(thing, (list, tuple)):
        yield from ((Step(f"[{place}]"), held) for place, held in enumerate(thing))
    elif isinstance(thing, (set, frozenset)):
        yield from ((Step("'s element"), held) for held in thing)
    yield from _held_as_attributes(thing)
    if not isinstance(thing, (dict, list, tuple, set, frozenset)):
        yield Step("'s class"), type(thing)


def _held_as_attributes(thing: Any) -> Iterator[tuple[Step, Any]]:
    attributes = getattr(thing, "__dict__", None)
    held = dict(attributes) if isinstance(attributes, dict) else {}
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                held[name] = getattr(thing, name)
    if isinstance(thing, nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            held.update(held.pop(group, None) or {})
    starts = getattr(type(thing), "PATHS", {})
    for name, value in held.items():
        start = starts.get(name) if isinstance(starts, dict) else None
        yield Step(f".{name}", "attribute") if start is None else Step(start, "start"), value


def _held_by_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    name = function.__qualname__
    space = function.__globals__
    for variable in names_read(function.__code__):
        if variable in space:
            yield Step(f"global {variable!r}, which {name} reads", "start", space, variable), space[variable]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield Step(f"variable {variable!r}, which {name} reads", "start"), cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield Step(f"the defaults of {name}", "start"), function.__defaults__
    yield Step(f"the defaults of {name}", "start"), function.__kwdefaults__
    yield from ((Step(f".{key}", "attribute"), held) for key, held in function.__dict__.items())


def _type_name(thing: Any) -> str:
    kind = type(thing)
    short = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if short else f"{kind.__module__}.{kind.__qualname__}"


def refuse_shared(arguments: Sequence[Tensor], written: int) -> None:
    """`CannotCross` for a tensor that `forward` wrote to in a worker, where another argument does not see that."""
    if any(overlap(other, arguments[written]) for n, other in enumerate(arguments) if n != written):
        raise CannotCross(
            "forward writes to an argument that shares its memory with another one; in a worker process they are two.\n"
            "Pass a copy of one of them (x.clone()), or write engine='threads'."
        )
