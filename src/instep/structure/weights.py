"""Possible weights of a mean: valid labels, unmasked positions, class weights of a criterion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from instep.structure.host_scalars import Scalar, ScalarTransfer
from instep.structure.shapes import is_dense
from instep.structure.tree import Path, flatten_one_level, format_path, get_by_path, is_sequence
from instep.structure.types import handler_for_type

LABEL_NAMES = ("labels", "label", "targets", "target")
MASK_NAMES = ("attention_mask", "mask", "masks")

_LABEL_COMPARISONS = (">= 0", "> 0")
"""Losses ignore -100 or -1, or 0 is padding."""
_MASK_COMPARISONS = ("!= 0", "== 0")
"""Masks of the positions that count, and padding masks."""
COMPARISON_OPERATORS = {">=": torch.ge, ">": torch.gt, "!=": torch.ne, "==": torch.eq}


class Weight(ABC):
    """The total weight of the entries of an argument, as a function for `weighted_by`."""

    path: Path

    def __call__(self, **inputs: Any) -> Tensor:
        """The total as a 0-d tensor on the argument's device. Does not synchronize."""
        value = get_by_path(self.path, inputs)
        return self.entry_weights(value).sum() if isinstance(value, Tensor) else torch.zeros(())

    @abstractmethod
    def entry_weights(self, value: Tensor) -> Tensor:
        """The weight of each entry, or a mask of the entries that count."""


@dataclass(frozen=True)
class EntryCount(Weight):
    """The number of entries of an argument for which a comparison holds, e.g. `"!= -100"`.

    `shifted` skips the first position, as language models do. The text of a count is the source code of its entries.
    """

    path: Path
    comparison: str
    shifted: bool

    def entry_weights(self, value: Tensor) -> Tensor:
        """A mask of the entries that count."""
        operator, number = self.comparison.split()
        return COMPARISON_OPERATORS[operator](value[..., 1:] if self.shifted else value, int(number))

    def __str__(self) -> str:
        return f"{format_path(self.path)}{'[..., 1:]' if self.shifted else ''} {self.comparison}"


@dataclass(frozen=True)
class CriterionWeight(Weight):
    """The divisor of a criterion's mean if an argument is its target: the sum of the class weights.

    Entries equal to `ignore_index` do not count. `weight` and `ignore_index` are read from the criterion at each call.
    """

    path: Path
    name: str
    criterion: nn.Module
    shifted: bool

    def entry_weights(self, value: Tensor) -> Tensor:
        """The weight of each entry."""
        target = value[..., 1:] if self.shifted else value
        ignore_index, weight = _ignored_and_weight(self.criterion)
        if weight is not None and target.device.type == "cpu":  # the other way round, the host would wait for a device
            target = target.to(weight.device, non_blocking=True)
        counted = target != ignore_index
        if weight is None:
            return counted
        has_weight = counted & (target >= 0) & (target < len(weight))
        classes = target.where(has_weight, torch.zeros_like(target)).long()
        return weight.detach().to(target.device)[classes] * has_weight

    def __str__(self) -> str:
        target = format_path(self.path) + ("[..., 1:]" if self.shifted else "")
        return f"what {self.name!r} divides by if {target} is its target"


class WeightTransfer:
    """A transfer to the host of the weights that the shards of a call have (see `ScalarTransfer`)."""

    def __init__(self, weights: Sequence[Weight], inputs: Sequence[Mapping[str, Any]]) -> None:
        self._weights, self._num_shards = list(weights), len(inputs)
        self._transfer = ScalarTransfer([weight(**shard) for weight in weights for shard in inputs])

    def wait(self) -> dict[Weight, list[Scalar]]:
        """The weights of the shards."""
        numbers = iter(self._transfer.wait())
        return {weight: list(islice(numbers, self._num_shards)) for weight in self._weights}


def find_weighted_criteria(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Submodules that compute a mean weighted by class, by name. Other losses of `torch.nn` divide by a count."""
    criteria: list[tuple[str, nn.Module]] = []
    for name, submodule in module.named_modules():
        if not isinstance(submodule, (nn.CrossEntropyLoss, nn.NLLLoss)) or submodule.reduction != "mean":
            continue
        if not any(_has_same_divisor(submodule, other) for _, other in criteria):
            criteria.append((name, submodule))
    return criteria


def _ignored_and_weight(criterion: nn.Module) -> tuple[int, Tensor | None]:
    """The `ignore_index` and the class weights of a criterion."""
    return getattr(criterion, "ignore_index", -100), getattr(criterion, "weight", None)


def _has_same_divisor(left: nn.Module, right: nn.Module) -> bool:
    (left_ignored, left_weight), (right_ignored, right_weight) = _ignored_and_weight(left), _ignored_and_weight(right)
    if left_weight is None or right_weight is None:
        return left_ignored == right_ignored and left_weight is right_weight
    return (
        left_ignored == right_ignored
        and left_weight.device == right_weight.device
        and torch.equal(left_weight, right_weight)
    )


def possible_weights(
    inputs: Sequence[Mapping[str, Any]], sizes: Sequence[int], criteria: Sequence[tuple[str, nn.Module]]
) -> list[tuple[Weight, float, float]]:
    """Possible weights of a mean, other than the number of samples, with their values for both parts of a trial.

    Labels and masks are recognized by name. Any integer argument may be the target of a criterion of the module, if
    its weights differ from the numbers of samples.
    """
    counts = label_and_mask_counts(inputs[2], sizes[2])
    weights: list[Weight] = [*counts, *_criterion_weights(inputs[2], sizes[2], criteria, counts)]
    possible = []
    for weight, totals in WeightTransfer(weights, inputs[:2]).wait().items():
        first, second = [float(total.real) for total in totals]
        total = first + second
        is_count = isinstance(weight, EntryCount)
        if total and (is_count or abs(first / total - sizes[0] / sizes[2]) > 1e-9):
            possible.append((weight, first, second))
    return possible


def _criterion_weights(
    inputs: Mapping[str, Any], size: int, criteria: Sequence[tuple[str, nn.Module]], counts: Sequence[EntryCount]
) -> Iterator[CriterionWeight]:
    """Every criterion with every integer argument as its target, except for those that `counts` already has."""
    valid_counts = {count.path for count in counts if count.comparison == ">= 0"}
    for path, value in named_tensors(inputs) if criteria else ():
        if not _is_batched(value, size) or value.is_floating_point() or value.dtype is torch.bool:
            continue
        for name, criterion in criteria:
            ignore_index, class_weights = _ignored_and_weight(criterion)
            if class_weights is None and ignore_index < 0 and path in valid_counts:
                continue
            for shifted in (False, True) if value.ndim > 1 and is_batch_first(value, size) else (False,):
                yield CriterionWeight(path, name, criterion, shifted)


def label_and_mask_counts(inputs: Mapping[str, Any], size: int) -> list[EntryCount]:
    """Possible counts for a mean: labels and masks, by name, among the arguments with `size` samples."""
    counts: list[EntryCount] = []
    for path, value in named_tensors(inputs):
        name = str(path[-1])
        if not _is_batched(value, size):
            continue
        shifts = (False, True) if value.ndim > 1 and is_batch_first(value, size) else (False,)
        if (name in LABEL_NAMES or name.endswith("_labels")) and not value.is_floating_point():
            counts += [EntryCount(path, test, shifted) for test in _LABEL_COMPARISONS for shifted in shifts]
        elif name in MASK_NAMES or name.endswith("_mask"):
            counts += [EntryCount(path, test, shifted) for test in _MASK_COMPARISONS for shifted in shifts]
    return counts


def is_batch_first(value: Tensor, size: int) -> bool:
    """Whether a tensor is dense and its first dim has this size. Nested tensors have no fixed sizes."""
    return is_dense(value) and value.ndim > 0 and value.shape[0] == size


def _is_batched(value: Tensor, size: int) -> bool:
    """Whether the first or the second dim of a tensor has this size."""
    return is_batch_first(value, size) or (is_dense(value) and value.ndim > 1 and value.shape[1] == size)


def find_weight_window(inputs: Mapping[str, Any], batch: int, sizes: Sequence[int], weights: Sequence[Any] = ()) -> int:
    """The start of the window of samples in which weights differ most between the two parts.

    `weights` are those to distinguish from each other and from the number of samples, by default the counts of labels
    and masks. Returns 0 if no window distinguishes them.
    """
    first_size, num_samples = sizes[0], sum(sizes)
    counts = [count for count in (weights or label_and_mask_counts(inputs, batch)) if isinstance(count, Weight)]
    if not counts or batch <= num_samples:
        return 0
    shares = [torch.full((batch - num_samples + 1,), first_size / num_samples, dtype=torch.float64)]
    for count in counts:
        value = get_by_path(count.path, inputs)
        if not isinstance(value, Tensor) or not is_batch_first(value, batch):
            return 0
        total = torch.zeros(batch + 1, dtype=torch.float64)
        total[1:] = count.entry_weights(value).reshape(batch, -1).sum(1).cumsum(0)
        part, whole = (
            total[first_size : batch - num_samples + first_size + 1] - total[: batch - num_samples + 1],
            total[num_samples:] - total[: batch - num_samples + 1],
        )
        shares.append(torch.where(whole > 1e-9, part / whole.clamp(min=1e-9), first_size / num_samples))
    pairs = [(left - right).abs() for index, left in enumerate(shares) for right in shares[index + 1 :]]
    differences = torch.stack(pairs)
    score = (differences > 1e-6).sum(0) + differences.clamp(max=0.5).mean(0)
    return int(score.argmax())


def named_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a structure by path. Lists are skipped: their entries have no names and may be samples."""
    if isinstance(value, Tensor):
        yield path, value
        return
    node = flatten_one_level(value)
    if node is None or is_sequence(value):
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from named_tensors(child, (*path, key))


def sample_sizes(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The sizes of the samples, on the CPU, of values whose type handler gives them, by path."""
    handler = handler_for_type(type(value))
    if handler is not None:
        sizes = None if handler.sample_sizes is None else handler.sample_sizes(value)
        if sizes is not None:
            yield path, sizes.cpu()
        return
    node = None if is_sequence(value) else flatten_one_level(value)
    for key, child in zip(node.keys, node.children, strict=True) if node is not None else ():
        yield from sample_sizes(child, (*path, key))
