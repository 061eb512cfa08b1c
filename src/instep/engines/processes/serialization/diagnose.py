"""Finds the part of a value that cannot be sent and builds the error for it."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.autograd.graph_walk import reachable_leaves
from instep.engines.processes.serialization.by_reference import global_names, is_by_reference
from instep.engines.processes.serialization.globals import Namespaces
from instep.engines.processes.serialization.reducers import is_process_bound
from instep.errors import CannotCross
from instep.replicas.write_watch import may_overlap
from instep.structure.tree import tensors_in

_MAX_ATTEMPTS = 2000


class PathStep(NamedTuple):
    """One step from an object to something that it holds."""

    text: str
    kind: str = "item"
    """Steps to an "item" or an "attribute" are written one after another; a "start" begins anew."""
    namespace: dict[str, Any] | None = None
    """For a step from a function to a global: the dictionary of globals."""
    name: str = ""


class UnpicklableObject(NamedTuple):
    """What cannot be pickled, and the way there."""

    path: tuple[PathStep, ...]
    value: Any

    @property
    def global_step(self) -> PathStep | None:
        """The last step on the way from a function to a global that it reads, if there is one."""
        return next((step for step in reversed(self.path) if step.namespace is not None), None)

    @property
    def is_global(self) -> bool:
        """Whether it is a global itself, and not something that one holds."""
        return bool(self.path) and self.path[-1].namespace is not None

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
        return f"{start} (a {_type_name(self.value)})"


def cannot_cross_error(described: str, reason: BaseException | None, *, is_global: bool = False) -> CannotCross:
    """The error for something found; `is_global` says that it is a global itself, which no object can leave out."""
    why = f": {reason}" if reason is not None and str(reason) else ""
    otherwise = (
        "make it inside of the function that uses it"
        if is_global
        else "keep it out of what the replicas need (`__getstate__` can leave it out)"
    )
    return CannotCross(f"{described} cannot be sent to another process{why}. Write engine='threads', or {otherwise}.")


def find_unpicklable(value: Any, failure: Callable[[Any], BaseException | None]) -> UnpicklableObject | None:
    """Look for the innermost thing that cannot be packed; `failure` packs one alone and gives back the error."""
    try:
        return _UnpicklableSearch(failure).search(value, ())
    except RecursionError:  # too deep to look for it: the error has to do without the path
        return None


class _UnpicklableSearch:
    def __init__(self, failure: Callable[[Any], BaseException | None]) -> None:
        self._pickling_error = failure
        self._visited: dict[int, Any] = {}
        self._attempts = 0

    def _fails(self, thing: Any) -> bool:
        self._attempts += 1
        return self._pickling_error(thing) is not None

    def search(self, thing: Any, path: tuple[PathStep, ...]) -> UnpicklableObject | None:
        """The culprit in something known to fail, or None where all that fails in it is being looked at already."""
        self._visited[id(thing)] = thing
        own = True
        for step, held in _children(thing):
            if self._attempts > _MAX_ATTEMPTS:
                break
            if id(held) in self._visited:
                own = False
                continue
            if _is_scalar(held) or not self._fails(held):
                continue
            own = False
            found = self.search(held, (*path, step))
            if found is not None:
                return found
        return UnpicklableObject(path, thing) if own or not path else None


def _is_scalar(thing: Any) -> bool:
    return thing is None or isinstance(thing, (bool, int, float, complex, str, bytes))


def _children(thing: Any) -> Iterator[tuple[PathStep, Any]]:
    """What pickling a thing would pickle next, roughly, with the step to it."""
    if is_process_bound(thing):
        return
    if isinstance(thing, type):
        if not is_by_reference(thing):
            yield from ((PathStep(f".{name}", "attribute"), held) for name, held in vars(thing).items())
        return
    if isinstance(thing, types.FunctionType):
        if not is_by_reference(thing):
            yield from _function_children(thing)
        return
    if isinstance(thing, (staticmethod, classmethod)):
        yield PathStep(""), thing.__func__
    elif isinstance(thing, property):
        yield from ((PathStep(""), part) for part in (thing.fget, thing.fset, thing.fdel))
    elif isinstance(thing, types.MethodType):
        yield PathStep("'s own object"), thing.__self__
        yield PathStep(""), thing.__func__
    elif isinstance(thing, functools.partial):
        yield PathStep("'s function"), thing.func
        yield PathStep("'s arguments"), thing.args
        yield PathStep("'s arguments"), thing.keywords
    if isinstance(thing, dict):
        for key, held in thing.items():
            yield PathStep(f"'s key {key!r}"), key
            yield PathStep(f"[{key!r}]"), held
    elif isinstance(thing, (list, tuple)):
        yield from ((PathStep(f"[{place}]"), held) for place, held in enumerate(thing))
    elif isinstance(thing, (set, frozenset)):
        yield from ((PathStep("'s element"), held) for held in thing)
    yield from _attribute_children(thing)
    if not isinstance(thing, (dict, list, tuple, set, frozenset)):
        yield PathStep("'s class"), type(thing)


def _attribute_children(thing: Any) -> Iterator[tuple[PathStep, Any]]:
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
        yield PathStep(f".{name}", "attribute") if start is None else PathStep(start, "start"), value


def _function_children(function: types.FunctionType) -> Iterator[tuple[PathStep, Any]]:
    name = function.__qualname__
    space = function.__globals__
    for variable in global_names(function.__code__):
        if variable in space:
            yield PathStep(f"global {variable!r}, which {name} reads", "start", space, variable), space[variable]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield PathStep(f"variable {variable!r}, which {name} reads", "start"), cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield PathStep(f"the defaults of {name}", "start"), function.__defaults__
    yield PathStep(f"the defaults of {name}", "start"), function.__kwdefaults__
    yield from ((PathStep(f".{key}", "attribute"), held) for key, held in function.__dict__.items())


def _type_name(thing: Any) -> str:
    kind = type(thing)
    short = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if short else f"{kind.__module__}.{kind.__qualname__}"


def check_not_aliased(arguments: Sequence[Tensor], written: int) -> None:
    """`CannotCross` for a tensor that `forward` wrote to in a worker, where another argument does not see that."""
    if any(may_overlap(other, arguments[written]) for n, other in enumerate(arguments) if n != written):
        raise CannotCross(
            "forward writes to an argument that shares its memory with another one; in a worker process they are two.\n"
            "Pass a copy of one of them (x.clone()), or write engine='threads'."
        )


class ForeignLeaves:
    """Those that a worker has been sent, as long as somebody there holds them."""

    def __init__(self) -> None:
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def add(self, tensors: Sequence[Tensor], own: Iterable[Tensor], elsewhere: Iterable[Any]) -> None:
        """Some tensors that need a gradient came with a message.

        `own` are the module's, for which its replica has others; but not where globals and closures lead to them.
        """
        mine = set(map(id, own)).difference(map(id, _iter_tensors(elsewhere)))
        self._leaves.update((id(t), t) for t in tensors if t.is_leaf and id(t) not in mine)

    def check_outputs(self, outputs: Sequence[Tensor], spaces: Namespaces) -> None:
        """Raise where a gradient of what comes out of a forward would come to one of them."""
        below = reachable_leaves(outputs)
        for key, tensor in list(self._leaves.items()):
            if key in below:
                raise lost_gradient_error(_describe(tensor, spaces))


def lost_gradient_error(what: str) -> CannotCross:
    """Says of a tensor that its gradient would stay in a worker."""
    return CannotCross(
        f"forward computes with {what}, which needs a gradient and is not reached through the module: a worker process "
        f"could not send the gradient back.\n"
        f"Use it by way of the module (self.head = head), say that it needs none (requires_grad_(False), "
        f"torch.no_grad()), or write engine='threads'."
    )


def describe_unnamed(tensor: Tensor) -> str:
    """What is said of a tensor that has no name."""
    return f"a tensor of shape {tuple(tensor.shape)} that a closure or a container holds"


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.parameters()
        else:
            yield from tensors_in(value)


def _describe(tensor: Tensor, spaces: Namespaces) -> str:
    for name, value in spaces.received_values():
        if value is tensor:
            return f"the global {name!r}"
        if isinstance(value, nn.Module):
            inside = next((path for path, held in value.named_parameters() if held is tensor), None)
            if inside is not None:
                return f"the global {name!r} ({inside})"
    return describe_unnamed(tensor)
