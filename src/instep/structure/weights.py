"""What a mean can be a mean over, besides samples: labels that count, and places that a mask leaves.

Each is a hypothesis. It is taken only where the numbers of unequal parts bear it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from instep.structure.tree import Path, is_sequence, open_node, show_path

LABELS = ("labels", "label", "targets", "target")
MASKS = ("attention_mask", "mask", "masks")

_TESTS = {"valid": ">= 0", "positive": "> 0", "kept": "!= 0"}


@dataclass(frozen=True)
class Count:
    """How many entries of an argument count: a weight that `weighted_by` takes.

    `valid` labels are not negative (-100 and -1 are what losses ignore), `positive` ones are not 0 either (0 as
    padding); what is `kept` by a mask is not 0. `shifted` leaves out the first place, as language models do.
    """

    path: Path
    test: str
    shifted: bool

    def __call__(self, **inputs: Any) -> float:
        found = _look_up(self.path, inputs)
        return float(self.of(found).sum()) if isinstance(found, Tensor) else 0.0

    def of(self, value: Tensor) -> Tensor:
        """True where an entry counts."""
        if self.shifted:
            value = value[..., 1:]
        if self.test == "kept":
            return value != 0
        return value >= 0 if self.test == "valid" else value > 0

    def __str__(self) -> str:
        place = show_path(self.path) + ("[..., 1:]" if self.shifted else "")
        return f"{place} {_TESTS[self.test]}"

    @property
    def line(self) -> str:
        """The rule as a user writes it."""
        name = str(self.path[-1])
        place = f"{name}[..., 1:]" if self.shifted else name
        return f"instep.weighted_by(lambda {name}: ({place} {_TESTS[self.test]}).sum())"


def counts_in(inputs: Mapping[str, Any], size: int) -> list[Count]:
    """Everything in the arguments that a mean may be over, of arguments that hold `size` samples."""
    found: list[Count] = []
    for path, value in _tensors(inputs, ()):
        name = str(path[-1])
        if not _has_rows(value, size):
            continue
        shifts = (False, True) if value.ndim > 1 else (False,)
        if (name in LABELS or name.endswith("_labels")) and not value.is_floating_point():
            found += [Count(path, test, shifted) for test in ("valid", "positive") for shifted in shifts]
        elif name in MASKS or name.endswith("_mask"):
            found += [Count(path, "kept", shifted) for shifted in shifts]
    return found


def _has_rows(value: Tensor, size: int) -> bool:
    """Whether the first dim of an ordinary tensor holds so many samples; a nested one has no sizes to ask for."""
    return not value.is_nested and value.layout is torch.strided and value.ndim > 0 and value.shape[0] == size


def best_window(inputs: Mapping[str, Any], batch: int, sizes: Sequence[int], rivals: Sequence[Any] = ()) -> int:
    """The first sample of the stretch in which parts of these sizes tell best what a mean is over.

    `rivals` are counts that are to be told apart, besides samples; by default all that the arguments offer. Where no
    stretch tells anything the first one will do.
    """
    a, n = sizes[0], sum(sizes)
    counts = [count for count in (rivals or counts_in(inputs, batch)) if isinstance(count, Count)]
    if not counts or batch <= n:
        return 0
    shares = [torch.full((batch - n + 1,), a / n, dtype=torch.float64)]
    for count in counts:
        value = _look_up(count.path, inputs)
        if not isinstance(value, Tensor) or not _has_rows(value, batch):
            return 0
        total = torch.zeros(batch + 1, dtype=torch.float64)
        total[1:] = count.of(value).reshape(batch, -1).sum(1).cumsum(0)
        part, whole = total[a : batch - n + a + 1] - total[: batch - n + 1], total[n:] - total[: batch - n + 1]
        shares.append(part / whole.clamp(min=1))
    pairs = [(one - two).abs() for index, one in enumerate(shares) for two in shares[index + 1 :]]
    told = torch.stack(pairs)
    score = (told > 1e-6).sum(0) + told.clamp(max=0.5).mean(0)
    return int(score.argmax())


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    node = open_node(value)
    if node is None or is_sequence(value):
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _tensors(child, (*path, key))


def _look_up(path: Path, value: Any) -> Any:
    for key in path:
        if type(value) is dict:
            value = value.get(key)
            continue
        node = open_node(value)
        if node is None:
            return None
        value = dict(zip(node.keys, node.children, strict=True)).get(key)
    return value
