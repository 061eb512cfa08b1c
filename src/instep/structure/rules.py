"""Merging rules by name: what can be said of an output that joining along the batch does not describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.fit import NUMBERS, own_kind
from instep.structure.messages import summary
from instep.structure.shapes import shape_of
from instep.structure.tree import Path, is_sequence, open_node, show_path
from instep.structure.weights import Weight

UserRule = Callable[[Sequence[Any], Sequence[int]], Any]


@dataclass(frozen=True)
class Scene:
    """What a rule may look at besides its own parts: an entry for each replica that has a part."""

    sizes: tuple[int, ...]
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()

    def only(self, kept: Sequence[int]) -> Scene:
        """The scene of some of the replicas."""
        inputs = tuple([self.inputs[index] for index in kept]) if self.inputs else ()
        outputs = tuple([self.outputs[index] for index in kept])
        return Scene(tuple([self.sizes[index] for index in kept]), outputs, inputs)


@dataclass(frozen=True)
class WeightedBy:
    """A mean over replicas with weights of its own; made by `weighted_by`."""

    weight: str | Callable[..., Any]

    def weights(self, scene: Scene, where: str) -> list[Any]:
        if callable(self.weight):
            if not scene.inputs:
                raise MergeError(f"{where}: weighted_by(function) needs the arguments of the call, and there are none.")
            return [_total(call_by_name(self.weight, shard)) for shard in scene.inputs]
        return [_total(self._find(self.weight, scene, index, where)) for index in range(len(scene.sizes))]

    def _find(self, path: str, scene: Scene, index: int, where: str) -> Any:
        value = look_up(path, scene.outputs[index])
        if value is None and scene.inputs:
            value = look_up(path, scene.inputs[index])
        if value is None:
            raise MergeError(f"{where}: weighted_by({path!r}) names no output and no argument of the call.")
        return value


def weighted_by(weight: str | Callable[..., Any]) -> WeightedBy:
    """A mean over replicas, exact where each shard's value is a mean over something else than its samples.

    `weight` is the path of an output or an argument whose sum is the weight (`weighted_by("mask")`), or a function that
    takes a shard's arguments by name: `weighted_by(lambda labels: (labels != -100).sum())`.
    """
    return WeightedBy(weight)


Rule: TypeAlias = str | tuple[str, Any] | WeightedBy | UserRule


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of the arguments that it asks for."""
    if isinstance(function, Weight):
        return function(**arguments)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function(**arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})


def _total(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.sum()
    return sum(value) if isinstance(value, (list, tuple)) else value


def look_up(path: str, value: Any) -> Any:
    """What a dotted path leads to inside a structure; None where it leads nowhere."""
    for key in path.split("."):
        node = open_node(value)
        if node is None:
            return None
        match = [child for name, child in zip(node.keys, node.children, strict=True) if str(name) == key]
        if not match:
            return None
        value = match[0]
    return value


# Rules that speak of leaves: given for a container, they hold for every leaf below it.
LEAF_RULES = ("cat", "stack", "mean", "sum", "max", "min", "unique", "pad", "nested")
# Rules that speak of any value as it stands.
VALUE_RULES = ("list", "first", "drop")
_WITH_ARGUMENT = ("cat", "stack", "pad")
_OF_NUMBERS = ("mean", "sum", "max", "min")


def rule_for(rules: Mapping[str, Rule], path: Path) -> Rule | None:
    """The rule of the first pattern that matches a path."""
    where = show_path(path)
    for pattern, rule in rules.items():
        if fnmatchcase(where, pattern):
            return rule
    return None


def check_rule(rule: Any) -> None:
    """Refuse a rule that does not exist, when it is given rather than when it is needed."""
    if callable(rule) or isinstance(rule, WeightedBy):
        return
    if isinstance(rule, str) and rule in (*LEAF_RULES, *VALUE_RULES):
        return
    if isinstance(rule, tuple) and len(rule) == 2 and rule[0] in _WITH_ARGUMENT:
        return
    known = ", ".join((*LEAF_RULES, *VALUE_RULES))
    raise MergeError(
        f"there is no merge rule {rule!r}: write one of {known}, ('pad', value), ('cat', dim), ('stack', dim), "
        f"instep.weighted_by(...) or a function (parts, sizes)."
    )


def _name_of(rule: Rule) -> Any:
    return rule[0] if isinstance(rule, tuple) else rule


def is_leaf_rule(rule: Rule) -> bool:
    """Whether a rule that is given for a container is meant for the leaves below it."""
    return isinstance(rule, WeightedBy) or _name_of(rule) in LEAF_RULES


def speaks_of(rule: Rule, parts: Sequence[Any]) -> bool:
    """Whether a rule that is given for every leaf has anything to say about these parts."""
    if rule in ("first", "drop"):
        return True
    if any(open_node(part) is not None for part in parts):
        return rule == "list" and all(is_sequence(part) for part in parts)
    if not is_leaf_rule(rule):
        return True
    if all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return all(own_kind(part) is None for part in parts)
    numbers = all(isinstance(part, (*NUMBERS, Tensor)) and not isinstance(part, bool) for part in parts)
    return numbers and (isinstance(rule, WeightedBy) or rule in _OF_NUMBERS)


def apply_rule(rule: Rule, parts: Sequence[Any], scene: Scene, path: Path, dim: int = 0) -> Any:
    """The parts merged under a rule; `dim` is where their batch is."""
    where = repr(show_path(path)) if path else "the output"
    if isinstance(rule, WeightedBy):
        return _weighted(parts, rule.weights(scene, where), where)
    name, argument = rule if isinstance(rule, tuple) else (rule, None)
    if not isinstance(name, str):
        return name(list(parts), list(scene.sizes))
    if name == "first":
        return parts[0]
    if name == "drop":
        return None
    if name == "list":
        return [item for part in parts for item in part] if all(map(is_sequence, parts)) else list(parts)
    if name == "mean":
        return _weighted(parts, scene.sizes, where)
    parts = _alike(parts)
    if not all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return _numbers(name, parts, where)
    try:
        merged = _tensors(name, argument, [torch.as_tensor(part) for part in parts], dim)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = [shape_of(part) for part in parts]
        raise MergeError(f"{where}: the rule {name!r} does not apply to parts of shapes {shapes}: {error}") from error
    return merged.numpy() if isinstance(parts[0], np.ndarray) else merged


def _alike(parts: Sequence[Any]) -> Sequence[Any]:
    """A number beside tensors as a tensor: `loss = 0.0` on the one replica that had nothing to do."""
    like = next((part for part in parts if isinstance(part, Tensor)), None)
    if like is None or not all(isinstance(part, (*NUMBERS, Tensor)) for part in parts):
        return parts
    return [part if isinstance(part, Tensor) else torch.as_tensor(part).to(like) for part in parts]


def _tensors(name: str, argument: Any, parts: list[Tensor], dim: int) -> Tensor:
    if name == "cat":
        return torch.cat(parts, dim if argument is None else argument)
    if name == "stack":
        return torch.stack(parts, argument or 0)
    if name == "unique":
        unique: Tensor = torch.unique(torch.cat(parts, dim), dim=dim)
        return unique
    if name == "pad":
        return _pad(parts, 0 if argument is None else argument, dim)
    if name == "nested":
        rows = [row for part in parts for row in part.unbind(dim)]
        nested: Tensor = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return nested
    _same_shape(parts)
    total = parts[0]
    for part in parts[1:]:
        total = _pairwise(name, total, part)
    return total


def _pairwise(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name == "sum":
        return left + right
    return torch.maximum(left, right) if name == "max" else torch.minimum(left, right)


def _same_shape(parts: Sequence[Any]) -> None:
    if len({tuple(part.shape) for part in parts}) > 1:
        raise ValueError("it needs equal shapes")


def _numbers(name: str, parts: Sequence[Any], where: str) -> Any:
    if name in _OF_NUMBERS and all(isinstance(part, NUMBERS) for part in parts):
        return {"sum": sum, "max": max, "min": min}[name](parts)  # type: ignore[operator]
    raise MergeError(f"{where}: the rule {name!r} does not apply to {summary(parts[0])}.")


def _pad(parts: list[Tensor], value: Any, dim: int) -> Tensor:
    """Joined along `dim`, with every other dim filled up to the longest."""
    longest = [max(sizes) for sizes in zip(*[part.shape for part in parts], strict=True)]
    filled = []
    for part in parts:
        wanted = [
            size if axis == dim % part.ndim else most
            for axis, (size, most) in enumerate(zip(part.shape, longest, strict=True))
        ]
        margins = [margin for size, most in zip(part.shape, wanted, strict=True) for margin in (most - size, 0)][::-1]
        filled.append(torch.nn.functional.pad(part, margins, value=value) if any(margins) else part)
    return torch.cat(filled, dim)


def _weighted(parts: Sequence[Any], weights: Sequence[Any], where: str) -> Any:
    """Sum of weight times value over sum of weights; a part of weight 0 does not count, even where it is NaN."""
    parts = _alike(parts)
    numbers = all(isinstance(part, NUMBERS) for part in parts)
    dense = all(isinstance(part, Tensor) and not part.is_nested for part in parts)
    if not numbers and not dense and not all(isinstance(part, np.ndarray) for part in parts):
        raise MergeError(f"{where}: a mean does not apply to {summary(parts[0])}.")
    if not numbers and len({tuple(part.shape) for part in parts}) > 1:
        raise MergeError(
            f"{where}: a mean needs equal shapes, the replicas gave {[list(part.shape) for part in parts]}."
        )
    kept = [(part, float(weight)) for part, weight in zip(parts, weights, strict=True) if float(weight) != 0]
    if not kept:  # nothing anywhere: whatever one device gives for nothing
        return parts[0]
    whole = sum(weight for _, weight in kept)
    merged = kept[0][0] * (kept[0][1] / whole)
    for part, weight in kept[1:]:
        merged = merged + part * (weight / whole)
    return merged


def mean_of_equals(parts: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The mean, weighted by size, of tensors that are equal: their value to the last bit, with the mean's gradient."""
    first, whole = parts[0], sum(sizes)
    if not whole or not bool(torch.isfinite(first).all()):
        merged: Tensor = _weighted(parts, sizes, "")
        return merged
    total = first
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        total = total + (part - first) * (size / whole)
    return total
