"""Candidate weights for a mean: valid labels, unmasked positions, class weights of a criterion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from instep.structure.shapes import is_dense
from instep.structure.tree import Path, flatten_one_level, format_path, is_sequence

LABEL_NAMES = ("labels", "label", "targets", "target")
MASK_NAMES = ("attention_mask", "mask", "masks")

_COMPARISONS = {"valid": ">= 0", "positive": "> 0", "kept": "!= 0", "left": "== 0"}


class Weight(ABC):
    """What entries of an argument weigh, as `weighted_by` takes it."""

    path: Path

    def __call__(self, **inputs: Any) -> float:
        found = _get_by_path(self.path, inputs)
        return float(self.entry_weights(found).sum()) if isinstance(found, Tensor) else 0.0

    @abstractmethod
    def entry_weights(self, value: Tensor) -> Tensor:
        """What each entry weighs, or whether it counts."""


@dataclass(frozen=True)
class EntryCount(Weight):
    """How many entries of an argument count.

    `valid` labels are not negative (-100 and -1 are what losses ignore), `positive` ones are not 0 either (0 as
    padding); what is `kept` by a mask is not 0, what is `left` by one of padding is. `shifted` leaves out the first
    place, as language models do.
    """

    path: Path
    test: str
    shifted: bool

    def entry_weights(self, value: Tensor) -> Tensor:
        """True where an entry counts."""
        if self.shifted:
            value = value[..., 1:]
        if self.test in ("kept", "left"):
            return (value != 0) == (self.test == "kept")
        return value >= 0 if self.test == "valid" else value > 0

    def __str__(self) -> str:
        place = format_path(self.path) + ("[..., 1:]" if self.shifted else "")
        return f"{place} {_COMPARISONS[self.test]}"

    @property
    def code(self) -> str:
        """The rule as a user writes it."""
        name = str(self.path[-1])
        place = f"{name}[..., 1:]" if self.shifted else name
        return f"instep.weighted_by(lambda {name}: ({place} {_COMPARISONS[self.test]}).sum())"


@dataclass(frozen=True)
class CriterionWeight(Weight):
    """What a loss of the module divides its mean by, if an argument is its target: the weights of the classes.

    Those that it ignores do not count. The values are the criterion's own, read when they are needed.
    """

    path: Path
    name: str
    criterion: nn.Module
    shifted: bool

    def entry_weights(self, value: Tensor) -> Tensor:
        """The weight of each entry."""
        target = value[..., 1:] if self.shifted else value
        ignored, weight = _ignored_and_weight(self.criterion)
        counted = target != ignored
        if weight is None:
            return counted
        inside = counted & (target >= 0) & (target < len(weight))
        classes = target.where(inside, torch.zeros_like(target)).long()
        return weight.detach().to(target.device)[classes] * inside

    def __str__(self) -> str:
        place = format_path(self.path) + ("[..., 1:]" if self.shifted else "")
        return f"what {self.name!r} divides by if {place} is its target"


def find_weighted_criteria(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The losses inside a module whose mean is one over weights; others of torch.nn divide by numbers of entries."""
    found: list[tuple[str, nn.Module]] = []
    for name, inner in module.named_modules():
        if not isinstance(inner, (nn.CrossEntropyLoss, nn.NLLLoss)) or inner.reduction != "mean":
            continue
        if not any(_has_same_divisor(inner, other) for _, other in found):
            found.append((name, inner))
    return found


def _ignored_and_weight(criterion: nn.Module) -> tuple[int, Tensor | None]:
    """The class that a criterion ignores, and the weights of all."""
    return getattr(criterion, "ignore_index", -100), getattr(criterion, "weight", None)


def _has_same_divisor(one: nn.Module, two: nn.Module) -> bool:
    (ignored, weight), (other, others) = _ignored_and_weight(one), _ignored_and_weight(two)
    if weight is None or others is None:
        return ignored == other and weight is others
    return ignored == other and weight.device == others.device and torch.equal(weight, others)


def candidate_weights(
    inputs: Sequence[Mapping[str, Any]], sizes: Sequence[int], criteria: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[Weight, float, float]]:
    """Everything that a mean may be over, besides samples, with what both parts of a trial weigh by it.

    Labels and masks are known by their names. What a loss of the module would divide by is there for any integers, but
    only where it differs from samples: else it is not known to be the target.
    """
    whole, size = inputs[2], sizes[2]
    counts = candidate_counts(whole, size)
    for count in counts:
        one, two = count(**inputs[0]), count(**inputs[1])
        if one + two:
            yield count, one, two
    for path, value in named_tensors(whole) if criteria else ():
        if not has_batch_size(value, size) or value.is_floating_point() or value.dtype is torch.bool:
            continue
        for name, criterion in criteria:
            ignored, held = _ignored_and_weight(criterion)
            if held is None and ignored < 0 and any(count.path == path and count.test == "valid" for count in counts):
                continue  # the same by its name
            for shifted in (False, True) if value.ndim > 1 else (False,):
                weight = CriterionWeight(path, name, criterion, shifted)
                one, two = weight(**inputs[0]), weight(**inputs[1])
                if one + two and abs(one / (one + two) - sizes[0] / size) > 1e-9:
                    yield weight, one, two


def candidate_counts(inputs: Mapping[str, Any], size: int) -> list[EntryCount]:
    """Everything in the arguments that a mean may be over, of arguments that hold `size` samples."""
    found: list[EntryCount] = []
    for path, value in named_tensors(inputs):
        name = str(path[-1])
        if not has_batch_size(value, size):
            continue
        shifts = (False, True) if value.ndim > 1 else (False,)
        if (name in LABEL_NAMES or name.endswith("_labels")) and not value.is_floating_point():
            found += [EntryCount(path, test, shifted) for test in ("valid", "positive") for shifted in shifts]
        elif name in MASK_NAMES or name.endswith("_mask"):
            found += [EntryCount(path, test, shifted) for test in ("kept", "left") for shifted in shifts]
    return found


def has_batch_size(value: Tensor, size: int) -> bool:
    """Whether the first dim of an ordinary tensor holds so many samples; a nested one has no sizes to ask for."""
    return is_dense(value) and value.ndim > 0 and value.shape[0] == size


def find_weight_window(inputs: Mapping[str, Any], batch: int, sizes: Sequence[int], rivals: Sequence[Any] = ()) -> int:
    """The first sample of the stretch in which parts of these sizes tell best what a mean is over.

    `rivals` are counts that are to be told apart, besides samples; by default all that the arguments offer. Where no
    stretch tells anything the first one will do.
    """
    a, n = sizes[0], sum(sizes)
    counts = [count for count in (rivals or candidate_counts(inputs, batch)) if isinstance(count, Weight)]
    if not counts or batch <= n:
        return 0
    shares = [torch.full((batch - n + 1,), a / n, dtype=torch.float64)]
    for count in counts:
        value = _get_by_path(count.path, inputs)
        if not isinstance(value, Tensor) or not has_batch_size(value, batch):
            return 0
        total = torch.zeros(batch + 1, dtype=torch.float64)
        total[1:] = count.entry_weights(value).reshape(batch, -1).sum(1).cumsum(0)
        part, whole = total[a : batch - n + a + 1] - total[: batch - n + 1], total[n:] - total[: batch - n + 1]
        shares.append(torch.where(whole > 1e-9, part / whole.clamp(min=1e-9), a / n))
    pairs = [(one - two).abs() for index, one in enumerate(shares) for two in shares[index + 1 :]]
    told = torch.stack(pairs)
    score = (told > 1e-6).sum(0) + told.clamp(max=0.5).mean(0)
    return int(score.argmax())


def named_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors of a structure; those in lists have no name, and may be samples."""
    if isinstance(value, Tensor):
        yield path, value
        return
    node = flatten_one_level(value)
    if node is None or is_sequence(value):
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from named_tensors(child, (*path, key))


def _get_by_path(path: Path, value: Any) -> Any:
    for key in path:
        if type(value) is dict:
            value = value.get(key)
            continue
        node = flatten_one_level(value)
        if node is None:
            return None
        value = dict(zip(node.keys, node.children, strict=True)).get(key)
    return value
