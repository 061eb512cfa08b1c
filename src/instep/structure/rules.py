"""Merging rules by name: what can be said of an output that joining along the batch does not describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.messages import summary
from instep.structure.tree import Path, open_node, show_path, tensors_in

UserRule = Callable[[Sequence[Any], Sequence[int]], Any]


@dataclass(frozen=True)
class Scene:
    """What a rule may look at besides its own parts."""

    sizes: tuple[int, ...]
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class WeightedBy:
    """A mean over replicas with weights of its own; made by `weighted_by`."""

    weight: str | Callable[..., Any]

    def weights(self, scene: Scene, where: str) -> list[Tensor | float]:
        if callable(self.weight):
            return [_total(self.weight(**shard)) for shard in scene.inputs]
        found = []
        for index in range(len(scene.sizes)):
            value = _look_up(self.weight, scene.outputs[index : index + 1]) if scene.outputs else None
            if value is None and scene.inputs:
                value = _look_up(self.weight, (scene.inputs[index],))
            if value is None:
                raise MergeError(f"{where}: weighted_by({self.weight!r}) names no output and no argument of the call.")
            found.append(_total(value))
        return found


def weighted_by(weight: str | Callable[..., Any]) -> WeightedBy:
    """A mean over replicas, exact where each shard's value is a mean over something else than its samples.

    `weight` is the path of an output or an argument whose sum is the weight (`weighted_by("mask")`), or a function that
    takes a shard's arguments by name: `weighted_by(lambda labels, **_: (labels != -100).sum())`.
    """
    return WeightedBy(weight)


Rule = Union[str, tuple[str, Any], WeightedBy, UserRule]


def _total(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.sum()
    return sum(value) if isinstance(value, (list, tuple)) else value


def _look_up(path: str, roots: Sequence[Any]) -> Any:
    value = roots[0]
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


def rule_for(rules: Mapping[str, Rule], path: Path) -> Rule | None:
    """The rule of the first pattern that matches a path."""
    where = show_path(path)
    for pattern, rule in rules.items():
        if fnmatchcase(where, pattern):
            return rule
    return None


def check_rule(rule: Any) -> None:
    """Refuse a rule that does not exist, when it is given rather than when it is needed."""
    name = rule[0] if isinstance(rule, tuple) and rule else rule
    if callable(rule) or isinstance(rule, WeightedBy) or name in (*LEAF_RULES, *VALUE_RULES):
        return
    known = ", ".join((*LEAF_RULES, *VALUE_RULES))
    raise MergeError(f"there is no merge rule {rule!r}: write one of {known}, weighted_by(...) or a function (parts, sizes).")


def is_leaf_rule(rule: Rule) -> bool:
    name = rule[0] if isinstance(rule, tuple) else rule
    return isinstance(rule, WeightedBy) or name in LEAF_RULES


def apply_rule(rule: Rule, parts: Sequence[Any], scene: Scene, path: Path) -> Any:
    """The parts merged under a rule."""
    where = show_path(path) or "the output"
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
        same = all(isinstance(part, (list, tuple)) for part in parts)
        return [item for part in parts for item in part] if same else list(parts)
    if name == "mean":
        return _weighted(parts, scene.sizes, where)
    if not all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return _numbers(name, parts, where)
    arrays = isinstance(parts[0], np.ndarray)
    merged = _tensors(name, argument, [torch.as_tensor(part) for part in parts], where)
    return merged.numpy() if arrays else merged


def _tensors(name: str, argument: Any, parts: list[Tensor], where: str) -> Any:
    if name == "cat":
        return torch.cat(parts, argument or 0)
    if name == "stack":
        return torch.stack(parts, argument or 0)
    if name == "unique":
        return torch.unique(torch.cat(parts, 0), dim=0)
    if name == "pad":
        return _pad(parts, 0 if argument is None else argument)
    if name == "nested":
        rows = [row for part in parts for row in part.unbind(0)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    _same_shape(parts, name, where)
    total = parts[0]
    for part in parts[1:]:
        total = _pairwise(name, total, part)
    return total


def _pairwise(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name == "sum":
        return left + right
    return torch.maximum(left, right) if name == "max" else torch.minimum(left, right)


def _same_shape(parts: Sequence[Tensor], name: str, where: str) -> None:
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise MergeError(f"{where}: the rule {name!r} needs equal shapes, the replicas gave {sorted(shapes)}.")


def _numbers(name: str, parts: Sequence[Any], where: str) -> Any:
    if name in ("sum", "max", "min") and all(isinstance(part, (int, float, complex)) for part in parts):
        return {"sum": sum, "max": max, "min": min}[name](parts)  # type: ignore[operator]
    raise MergeError(f"{where}: the rule {name!r} does not apply to {summary(parts[0])}.")


def _pad(parts: list[Tensor], value: Any) -> Tensor:
    """Joined along dim 0, with every other dim filled up to the longest."""
    longest = [max(sizes) for sizes in zip(*[part.shape[1:] for part in parts], strict=True)]
    filled = []
    for part in parts:
        margins: list[int] = []
        for size, most in zip(reversed(part.shape[1:]), reversed(longest), strict=True):
            margins += [0, most - size]
        filled.append(torch.nn.functional.pad(part, margins, value=value) if any(margins) else part)
    return torch.cat(filled, 0)


def _weighted(parts: Sequence[Any], weights: Sequence[Any], where: str) -> Any:
    """Sum of weight times value over sum of weights; a part of weight 0 does not count, even where it is NaN."""
    numbers = all(isinstance(part, (int, float, complex)) for part in parts)
    if not numbers and not all(isinstance(part, Tensor) for part in parts):
        raise MergeError(f"{where}: a mean does not apply to {summary(parts[0])}.")
    if not numbers:
        _same_shape(parts, "mean", where)
    kept = [(part, float(weight)) for part, weight in zip(parts, weights, strict=True) if float(weight) != 0]
    if not kept:  # nothing anywhere: whatever one device gives for nothing
        return parts[0]
    whole = sum(weight for _, weight in kept)
    merged = kept[0][0] * (kept[0][1] / whole)
    for part, weight in kept[1:]:
        merged = merged + part * (weight / whole)
    return merged


def merge_leaves(value: Any) -> list[Tensor]:
    """Every tensor of an output, for a caller that wants them flat."""
    return list(tensors_in(value))
