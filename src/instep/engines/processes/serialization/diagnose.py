"""Finds the part of a value that cannot be sent, and builds the errors for it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.autograd.graph_walk import reachable_leaves
from instep.engines.processes.serialization.by_reference import functions_of, global_names, is_by_reference
from instep.engines.processes.serialization.globals import Namespaces, read_cell
from instep.engines.processes.serialization.reducers import is_process_bound
from instep.errors import CannotCross
from instep.replicas.object_graph import Visit, is_atomic, references_of, walk
from instep.replicas.write_watch import may_overlap
from instep.structure.tree import tensors_in

_MAX_ATTEMPTS = 2000


class PathStep(NamedTuple):
    """One step from an object to one that it references."""

    text: str
    kind: str = "item"
    """Steps to an "item" or an "attribute" are joined; a "start" begins a new path."""
    namespace: dict[str, Any] | None = None
    """For a step from a function to a global: the namespace."""
    name: str = ""
    """For a step from a function to a global: its name."""


class UnpicklableObject(NamedTuple):
    """An object that cannot be pickled, and the path to it."""

    path: tuple[PathStep, ...]
    value: Any

    @property
    def global_step(self) -> PathStep | None:
        """The last step from a function to a global."""
        return next((step for step in reversed(self.path) if step.namespace is not None), None)

    @property
    def is_global(self) -> bool:
        """Whether the object itself is a global."""
        return bool(self.path) and self.path[-1].namespace is not None

    def describe(self, label: str) -> str:
        """The path as text: ``argument 'batch'['lock'] (a _thread.lock)``. `label` is the start of the path."""
        starts = [index for index, step in enumerate(self.path) if step.kind == "start"]
        path = self.path[starts[-1] + 1 :] if starts else self.path
        start = self.path[starts[-1]].text if starts else label
        rest = "".join(step.text for step in path)
        if path and path[0].kind == "attribute":
            attribute = f"attribute '{rest[1:]}'"
            start = f"{start.rstrip()}, {attribute}" if start else attribute
        elif path and start.endswith(" ") and rest.startswith("["):  # "argument " and "['batch'][0]"
            start += rest.replace("[", "", 1).replace("]", "", 1)
        else:
            start = f"{start.rstrip()}{rest}" or "a value"
        return f"{start} (a {_type_name(self.value)})"


def cannot_cross_error(description: str, reason: BaseException | None, *, is_global: bool = False) -> CannotCross:
    """The error for an object that cannot be sent."""
    why = f": {reason}" if reason is not None and str(reason) else ""
    advice = (
        "create it inside the function that uses it"
        if is_global
        else "leave it out of the object that holds it (`__getstate__`)"
    )
    return CannotCross(f"{description} cannot be sent to another process{why}. Use engine='threads', or {advice}.")


def find_unpicklable(value: Any, pickling_error: Callable[[Any], BaseException | None]) -> UnpicklableObject:
    """Find the reason why a value cannot be pickled: the first unpicklable object whose references are picklable."""
    results: dict[int, tuple[Any, bool]] = {}

    def is_picklable(thing: Any) -> bool:
        if id(thing) not in results:
            is_plain = is_atomic(thing) and not isinstance(thing, type)  # a class may be sent by value
            picklable = is_plain or len(results) > _MAX_ATTEMPTS or pickling_error(thing) is None
            results[id(thing)] = thing, picklable
        return results[id(thing)][1]

    visit = Visit(value, PathStep(""))
    for visit in walk([(PathStep(""), value)], _references, skip=is_picklable):
        if all(is_picklable(child) for _, child in _references(visit.value)):
            break
    return UnpicklableObject(visit.path[1:], visit.value)


def _references(thing: Any) -> Iterator[tuple[PathStep, Any]]:
    """The objects that are pickled with an object."""
    if is_process_bound(thing):
        return
    if isinstance(thing, (type, types.FunctionType)):
        if not is_by_reference(thing):
            yield from _attributes(vars(thing)) if isinstance(thing, type) else _function_references(thing)
    elif isinstance(thing, (staticmethod, classmethod, property)):
        yield from ((PathStep(""), function) for function in functions_of(thing))
    elif isinstance(thing, (dict, list, tuple, set, frozenset)):
        yield from ((PathStep(f"[{key!r}]"), item) for key, item in references_of(thing))
    else:
        attributes = dict(vars(thing) if isinstance(thing, nn.Module) else references_of(thing))
        if isinstance(thing, nn.Module):
            for group in ("_parameters", "_buffers", "_modules"):
                attributes.update(attributes.pop(group, None) or {})
        yield from _attributes(attributes, getattr(type(thing), "PATHS", None))
        yield PathStep("'s class"), type(thing)


def _attributes(
    attributes: Mapping[str, Any], starts: Mapping[str, str] | None = None
) -> Iterator[tuple[PathStep, Any]]:
    starts = starts or {}
    for name, value in attributes.items():
        yield PathStep(starts[name], "start") if name in starts else PathStep(f".{name}", "attribute"), value


def _function_references(function: types.FunctionType) -> Iterator[tuple[PathStep, Any]]:
    name = function.__qualname__
    namespace = function.__globals__
    for variable in global_names(function.__code__):
        if variable in namespace:
            text = f"global {variable!r}, which {name} reads"
            yield PathStep(text, "start", namespace, variable), namespace[variable]
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield PathStep(f"variable {variable!r}, which {name} reads", "start"), read_cell(cell)
    yield PathStep(f"the defaults of {name}", "start"), (function.__defaults__, function.__kwdefaults__)
    yield from _attributes(function.__dict__)


def _type_name(thing: Any) -> str:
    kind = type(thing)
    short = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if short else f"{kind.__module__}.{kind.__qualname__}"


def check_not_aliased(arguments: Sequence[Tensor], written: int) -> None:
    """`CannotCross` if an argument that `forward` wrote to in a worker shares memory with another argument."""
    if any(may_overlap(other, arguments[written]) for n, other in enumerate(arguments) if n != written):
        raise CannotCross(
            "forward writes to an argument that shares its memory with another one; a worker process has two copies.\n"
            "Pass a copy of one of them (x.clone()), or use engine='threads'."
        )


class ForeignLeaves:
    """Tensors in a worker that require grad and are neither the module's nor arguments: globals, closure variables.

    Their gradients could not be sent back. They are held by weak references.
    """

    def __init__(self) -> None:
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def add(self, tensors: Sequence[Tensor], module_tensors: Iterable[Tensor], reachable: Iterable[Any]) -> None:
        """Add received tensors that require grad.

        Tensors of the module are left out, because the replica has others in their place. But if globals or closure
        variables (`reachable`) lead to them, `forward` may use the received ones.
        """
        replaced = set(map(id, module_tensors)).difference(map(id, _iter_tensors(reachable)))
        self._leaves.update((id(t), t) for t in tensors if t.is_leaf and id(t) not in replaced)

    def check_outputs(self, outputs: Sequence[Tensor], namespaces: Namespaces) -> None:
        """`CannotCross` if an output depends on one of the tensors."""
        used = reachable_leaves(outputs)
        for key, tensor in list(self._leaves.items()):
            if key in used:
                raise lost_gradient_error(_describe_tensor(tensor, namespaces))


def lost_gradient_error(description: str) -> CannotCross:
    """The error for a tensor whose gradient could not be sent back."""
    return CannotCross(
        f"forward computes with {description}, which needs a gradient and is not part of the module: a worker process "
        f"could not send the gradient back.\n"
        f"Set it on the module (self.head = head), use it without a gradient (requires_grad_(False), "
        f"torch.no_grad()), or use engine='threads'."
    )


def describe_unnamed(tensor: Tensor) -> str:
    """The description of a tensor that is not a global."""
    return f"a tensor of shape {tuple(tensor.shape)} that a closure or a container holds"


def _iter_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        yield from value.parameters() if isinstance(value, nn.Module) else tensors_in(value)


def _describe_tensor(tensor: Tensor, namespaces: Namespaces) -> str:
    for name, value in namespaces.received_values():
        if value is tensor:
            return f"the global {name!r}"
        if isinstance(value, nn.Module):
            path = next((path for path, parameter in value.named_parameters() if parameter is tensor), None)
            if path is not None:
                return f"the global {name!r} ({path})"
    return describe_unnamed(tensor)
