"""The named merge rules (`cat`, `mean`, `sum`, ...) and `weighted_by`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure.host_scalars import HostScalars, is_readable
from instep.structure.shapes import shape_of, tensors_equal
from instep.structure.split_messages import summarize
from instep.structure.tree import NUMBER_TYPES, Path, flatten_one_level, format_path, is_sequence
from instep.structure.types_torch import handler_for
from instep.structure.weights import Weight

MergeFunction = Callable[[Sequence[Any], Sequence[int]], Any]


@dataclass(frozen=True)
class MergeContext:
    """What a rule can read besides its own parts. Each tuple has one entry for each replica that has a part."""

    sizes: tuple[int, ...]
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Mapping[str, Any], ...] = ()
    scalars: HostScalars = field(default_factory=HostScalars, compare=False)
    """Host values of 0-d tensors, read with one transfer."""
    weights: dict[Any, list[Any]] = field(default_factory=dict, compare=False)
    """The total weight of each replica, as a number or a 0-d tensor, for every weight used so far."""

    @classmethod
    def create(
        cls,
        sizes: tuple[int, ...],
        outputs: Sequence[Any],
        inputs: Sequence[Mapping[str, Any]],
        weights: Iterable[Weight] = (),
        known: Mapping[Weight, list[Any]] = MappingProxyType({}),
    ) -> MergeContext:
        """A context that transfers the outputs' 0-d tensors and these weights together, when one is first read.

        `known` are weights of the same inputs that were read already.
        """
        totals: dict[Any, list[Any]] = {}
        for weight in weights if inputs else ():
            found = known.get(weight, ())
            totals[weight] = list(found) if len(found) == len(inputs) else [weight(**shard) for shard in inputs]
        return cls(sizes, tuple(outputs), tuple(inputs), HostScalars((*outputs, *totals.values())), dict(totals))

    def select(self, indices: Sequence[int]) -> MergeContext:
        """The context of some of the replicas."""

        def pick(items: Sequence[Any]) -> tuple[Any, ...]:
            return tuple([items[index] for index in indices])

        weights = {weight: list(pick(totals)) for weight, totals in self.weights.items()}
        inputs = pick(self.inputs) if self.inputs else ()
        return MergeContext(pick(self.sizes), pick(self.outputs), inputs, self.scalars, weights)

    def are_equal(self, parts: Sequence[Tensor]) -> bool:
        """Whether tensors of one shape are bitwise equal, or all NaN."""
        return self.scalars.are_equal(parts) if _are_scalars(parts) else tensors_equal(parts)

    def is_finite(self, part: Tensor) -> bool:
        """Whether a tensor has neither NaN nor infinities."""
        if _are_scalars([part]):
            return bool(np.isfinite(self.scalars.read([part])[0]))
        return bool(torch.isfinite(part).all())

    def is_nonzero(self, part: Tensor) -> bool:
        """Whether any entry is not 0."""
        return bool(self.scalars.read([part])[0]) if _are_scalars([part]) else bool(part.any())


def _are_scalars(parts: Sequence[Tensor]) -> bool:
    return all(is_readable(part) for part in parts)


@dataclass(frozen=True)
class WeightedBy:
    """A mean over replicas with explicit weights; made by `weighted_by`."""

    weight: str | Callable[..., Any]

    def weights(self, context: MergeContext, where: str) -> list[Any]:
        """The weight of each replica, as a number on the host."""
        key = self.weight if isinstance(self.weight, (str, Weight)) else id(self.weight)  # may be unhashable
        totals = context.weights.get(key)
        if totals is None:
            totals = context.weights[key] = [_sum_entries(value) for value in self._values(context, where)]
        tensors = [total for total in totals if isinstance(total, Tensor)]
        numbers = iter(context.scalars.read(tensors) if tensors else ())
        return [next(numbers) if isinstance(total, Tensor) else total for total in totals]

    def _values(self, context: MergeContext, where: str) -> list[Any]:
        if not callable(self.weight):
            return [self._lookup(self.weight, context, index, where) for index in range(len(context.sizes))]
        if not context.inputs:
            raise MergeError(
                f"{where}: weighted_by(function) needs the arguments of a call, and these parts come from no call.\n"
                f"Write the name of an output: weighted_by('name')."
            )
        return [call_with_accepted(self.weight, shard) for shard in context.inputs]

    def _lookup(self, path: str, context: MergeContext, index: int, where: str) -> Any:
        value = get_by_dotted_path(path, context.outputs[index])
        if value is None and context.inputs:
            value = get_by_dotted_path(path, context.inputs[index])
        if value is None:
            raise MergeError(
                f"{where}: weighted_by({path!r}) names no output and no argument of the call.\n"
                f"Write the name of an output, the name of an argument, or a function of the arguments."
            )
        return value


def weighted_by(weight: str | Callable[..., Any]) -> WeightedBy:
    """A mean over replicas, exact where each shard's value is a mean over something else than its samples.

    `weight` is the path of an output or an argument whose sum is the weight (`weighted_by("mask")`), or a function that
    takes a shard's arguments by name: `weighted_by(lambda labels: (labels != -100).sum())`.
    """
    return WeightedBy(weight)


MergeRule: TypeAlias = str | tuple[str, Any] | WeightedBy | MergeFunction


def call_with_accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function with those arguments that its signature accepts."""
    if isinstance(function, Weight):
        return function(**arguments)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function(**arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})


def _sum_entries(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return value.sum()
    return sum(value) if isinstance(value, (list, tuple)) else value


def get_by_dotted_path(path: str, value: Any) -> Any:
    """The value at a dotted path inside a structure; None if there is none."""
    for key in path.split("."):
        node = flatten_one_level(value)
        if node is None:
            return None
        match = [child for name, child in zip(node.keys, node.children, strict=True) if str(name) == key]
        if not match:
            return None
        value = match[0]
    return value


# Rules for leaves. Given for a container, they apply to every leaf below it.
LEAF_RULES = ("cat", "stack", "mean", "sum", "max", "min", "unique", "pad", "nested")
# Rules for any value, containers included.
VALUE_RULES = ("list", "first", "drop")
_PARAMETRIC_RULES = ("cat", "stack", "pad")
_NUMERIC_RULES = ("mean", "sum", "max", "min")
_OTHER_RULE = "Write another rule, such as 'list', 'first' or 'drop', or a function (parts, sizes) -> value."


def find_rule(rules: Mapping[str, MergeRule], path: Path) -> MergeRule | None:
    """The rule of the first pattern that matches a path; None if none does."""
    where = format_path(path)
    for pattern, rule in rules.items():
        if fnmatchcase(where, pattern):
            return rule
    return None


def check_rule(rule: Any) -> None:
    """Raise `MergeError` for a rule that does not exist."""
    if callable(rule) or isinstance(rule, WeightedBy):
        return
    if isinstance(rule, str) and rule in (*LEAF_RULES, *VALUE_RULES):
        return
    if isinstance(rule, tuple) and len(rule) == 2 and rule[0] in _PARAMETRIC_RULES:
        return
    known = ", ".join((*LEAF_RULES, *VALUE_RULES))
    raise MergeError(
        f"there is no merge rule {rule!r}: write one of {known}, ('pad', value), ('cat', dim), ('stack', dim), "
        f"instep.weighted_by(...) or a function (parts, sizes)."
    )


def _rule_name(rule: MergeRule) -> Any:
    return rule[0] if isinstance(rule, tuple) else rule


def is_leaf_rule(rule: MergeRule) -> bool:
    """Whether a rule that is given for a container applies to the leaves below it."""
    return isinstance(rule, WeightedBy) or _rule_name(rule) in LEAF_RULES


def reduces_samples(rule: MergeRule, values: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether a rule for all outputs would reduce tensors with one row per sample, for which it is not meant.

    A module may return a loss in training, which has the rule, and logits in evaluation mode. `sizes` are the different
    numbers of samples of a trial.
    """
    if not isinstance(rule, WeightedBy) and rule not in _NUMERIC_RULES:
        return False
    shapes = [value.shape if isinstance(value, (Tensor, np.ndarray)) else () for value in values]
    return any(lengths == tuple(sizes) for lengths in zip(*shapes, strict=False))


def applies_to(rule: MergeRule, parts: Sequence[Any]) -> bool:
    """Whether a rule that is given for all outputs (`"*"`) applies to these parts."""
    if rule in ("first", "drop"):
        return True
    if any(flatten_one_level(part) is not None for part in parts):
        return rule == "list" and all(is_sequence(part) for part in parts)
    if not is_leaf_rule(rule):
        return True
    if isinstance(rule, WeightedBy) and not any(map(is_weighable, parts)):
        return False
    if all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return all(handler_for(part) is None for part in parts)
    numbers = all(isinstance(part, (*NUMBER_TYPES, Tensor)) and not isinstance(part, bool) for part in parts)
    return numbers and (isinstance(rule, WeightedBy) or rule in _NUMERIC_RULES)


def apply_rule(rule: MergeRule, parts: Sequence[Any], context: MergeContext, path: Path, dim: int = 0) -> Any:
    """Merge parts by a rule; `dim` is their batch dimension."""
    where = f"cannot merge the output {format_path(path)!r}" if path else "cannot merge the output"
    if isinstance(rule, WeightedBy):
        check_can_be_weighted(parts, where)
        return _weighted_mean(parts, rule.weights(context, where), where)
    name, argument = rule if isinstance(rule, tuple) else (rule, None)
    if not isinstance(name, str):
        return name(list(parts), list(context.sizes))
    if name == "first":
        return parts[0]
    if name == "drop":
        return None
    if name == "list":
        return [item for part in parts for item in part] if all(map(is_sequence, parts)) else list(parts)
    if name == "mean":
        return _weighted_mean(parts, context.sizes, where)
    parts = _promote_numbers(parts)
    if not all(isinstance(part, (Tensor, np.ndarray)) for part in parts):
        return _merge_numbers(name, parts, where)
    try:
        merged = _merge_tensors(name, argument, [torch.as_tensor(part) for part in parts], dim)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = [shape_of(part) for part in parts]
        raise MergeError(
            f"{where}: the rule {name!r} does not apply to tensors of shapes {shapes}: {error}.\n{_OTHER_RULE}"
        ) from error
    return merged.numpy() if isinstance(parts[0], np.ndarray) else merged


def is_weighable(part: Any) -> bool:
    """Whether a value can be a mean: a float or complex number, tensor or array."""
    if isinstance(part, Tensor):
        return part.is_floating_point() or part.is_complex()
    if isinstance(part, (np.ndarray, np.generic)):
        return part.dtype.kind in "fc"
    return isinstance(part, (float, complex))


def check_can_be_weighted(parts: Sequence[Any], where: str) -> None:
    """Raise `MergeError` for values that are no means."""
    if any(map(is_weighable, parts)):  # `loss = 0` on a replica that had nothing to do
        return
    raise MergeError(
        f"{where}: weighted_by(...) computes a mean, which does not apply to a {summarize(parts[0])}.\n"
        f"Write 'sum' for a count, or another rule; convert a mean of integers to float in forward."
    )


def _promote_numbers(parts: Sequence[Any]) -> Sequence[Any]:
    """Convert numbers to tensors if other parts are tensors: `loss = 0.0` on a replica that had nothing to do."""
    like = next((part for part in parts if isinstance(part, Tensor)), None)
    if like is None or not all(isinstance(part, (*NUMBER_TYPES, Tensor)) for part in parts):
        return parts
    return [part if isinstance(part, Tensor) else torch.as_tensor(part).to(like) for part in parts]


def _merge_tensors(name: str, argument: Any, parts: list[Tensor], dim: int) -> Tensor:
    if name == "cat":
        return torch.cat(parts, dim if argument is None else argument)
    if name == "stack":
        return torch.stack(parts, argument or 0)
    if name == "unique":
        unique: Tensor = torch.unique(torch.cat(parts, dim), dim=dim)
        return unique
    if name == "pad":
        return _pad_and_cat(parts, 0 if argument is None else argument, dim)
    if name == "nested":
        rows = [row for part in parts for row in part.unbind(dim)]
        nested: Tensor = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return nested
    _check_same_shape(parts)
    total = parts[0]
    for part in parts[1:]:
        total = _reduce_pair(name, total, part)
    return total


def _reduce_pair(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name == "sum":
        return left + right
    return torch.maximum(left, right) if name == "max" else torch.minimum(left, right)


def _check_same_shape(parts: Sequence[Any]) -> None:
    if len({tuple(part.shape) for part in parts}) > 1:
        raise ValueError("the shapes have to be equal")


def _merge_numbers(name: str, parts: Sequence[Any], where: str) -> Any:
    if name in _NUMERIC_RULES and all(isinstance(part, NUMBER_TYPES) for part in parts):
        return {"sum": sum, "max": max, "min": min}[name](parts)  # type: ignore[operator]
    raise MergeError(f"{where}: the rule {name!r} does not apply to a {summarize(parts[0])}.\n{_OTHER_RULE}")


def _pad_and_cat(parts: list[Tensor], value: Any, dim: int) -> Tensor:
    """Pad every other dimension to the longest, then concatenate along `dim`."""
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


def _weighted_mean(parts: Sequence[Any], weights: Sequence[Any], where: str) -> Any:
    """The weighted mean. Parts of weight 0 are left out, even if they are NaN."""
    parts = _promote_numbers(parts)
    numbers = all(isinstance(part, NUMBER_TYPES) for part in parts)
    dense = all(isinstance(part, Tensor) and not part.is_nested for part in parts)
    if not numbers and not dense and not all(isinstance(part, np.ndarray) for part in parts):
        raise MergeError(f"{where}: a mean does not apply to a {summarize(parts[0])}.\n{_OTHER_RULE}")
    if not numbers and len({tuple(part.shape) for part in parts}) > 1:
        raise MergeError(
            f"{where}: a mean does not apply to tensors of shapes {[list(part.shape) for part in parts]}: the shapes "
            f"have to be equal.\n{_OTHER_RULE}"
        )
    kept = [(part, float(weight)) for part, weight in zip(parts, weights, strict=True) if float(weight) != 0]
    if not kept:  # all weights are 0: return what one device gives for no entries
        return parts[0]
    whole = sum(weight for _, weight in kept)
    merged = kept[0][0] * (kept[0][1] / whole)
    for part, weight in kept[1:]:
        merged = merged + part * (weight / whole)
    return merged


def mean_of_equal_tensors(parts: Sequence[Tensor], context: MergeContext) -> Tensor:
    """The mean of equal tensors, weighted by size: bitwise their value, with the gradient of the mean."""
    first, sizes = parts[0], context.sizes
    whole = sum(sizes)
    if not whole or not context.is_finite(first):
        merged: Tensor = _weighted_mean(parts, sizes, "")
        return merged
    total = first
    for part, size in zip(parts[1:], sizes[1:], strict=True):
        total = total + (part - first) * (size / whole)
    return total
