"""Integers and booleans: rounding may turn a few over, other samples may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.probe.independence import substituted_batches
from instep.probe.judge import max_rounding_mismatches

from .helpers import both_engines, probe_of, said


class Marks(nn.Module):
    """Scores, and something that is made of them."""

    def __init__(self, make: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6, dtype=dtype)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        scores = self.layer(x)
        return {"scores": scores, "marks": self.make(scores)}


def hardest(scores: Tensor) -> Tensor:
    """The two largest of the whole batch."""
    marks = torch.zeros(scores.numel(), dtype=torch.bool)
    marks[scores.flatten().topk(2).indices] = True
    return marks.view_as(scores)


MEET = {
    "the hardest of the batch": hardest,
    "the same as integers": lambda scores: hardest(scores).long(),
    "the largest of the batch": lambda scores: scores == scores.max(),
    "batch in dim 1": lambda scores: hardest(scores).T,
    "in an array": lambda scores: hardest(scores).numpy(),
}


@both_engines
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MEET)
def test_marks_that_look_at_other_samples_are_an_error(wrap: Any, engine: str, name: str, dtype: torch.dtype) -> None:
    model = wrap(Marks(MEET[name], dtype), engine=engine)
    for _ in range(2):
        with pytest.raises(instep.MergeError, match=r"the output 'marks': its entries depend on other samples"):
            model(torch.randn(8, 4, dtype=dtype))


@pytest.mark.parametrize("batch", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_mask_in_which_few_entries_differ(wrap: Any, dtype: torch.dtype, batch: int) -> None:
    """One in a thousand: rounding might, if it were not that the marks of a sample change with the other samples."""

    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {"marks": hardest(super().forward(x))}

    with pytest.raises(instep.MergeError, match="they change when the other samples change"):
        wrap(Wide(4, 900, dtype=dtype))(torch.randn(batch, 4, dtype=dtype))


@both_engines
def test_integers_changed_by_rounding_are_no_error(wrap: Any, engine: str) -> None:
    """The threshold moves a little with the number of samples, as sums in short numbers do: one entry turns over."""

    def make(scores: Tensor) -> Tensor:
        return scores.float() > edge + 1e-6 * len(scores)

    net = Marks(make, torch.bfloat16)
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    edge = net.layer(x)[1, 2].float().item() - 2.5e-6
    model = wrap(net, engine=engine)
    out = model(x)
    assert int((out["marks"] != net(x)["marks"]).sum()) <= 1
    assert "marks" in said(model, x)
    assert probe_of(model).last_record.trials.count == 1


@both_engines
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_marks_of_each_sample_alone_are_known(wrap: Any, engine: str, dtype: torch.dtype) -> None:
    def make(scores: Tensor) -> Any:
        return scores.argmax(1), scores > 0, (8 * scores).round().int(), scores.topk(2).indices

    net, x = Marks(make, dtype), torch.randn(7, 4, dtype=dtype)
    for ours, plain in zip(wrap(net, engine=engine)(x)["marks"], net(x)["marks"], strict=True):
        assert float((ours != plain).double().mean()) <= (0.1 if dtype.itemsize == 2 else 0)


def test_how_many_rounding_may_turn_over() -> None:
    assert [max_rounding_mismatches(10**6, tolerance) for tolerance in (1e-8, 3e-4, 3e-3, 5e-2)] == [0, 5e3, 1e5, 1e5]
    assert [max_rounding_mismatches(5, tolerance) < 1 for tolerance in (1e-8, 3e-4, 5e-2)] == [True, True, False]
    runs = list(substituted_batches((1, 2)))
    assert [who for who, kept, factor in runs if kept == [0] and factor == 1] == [[0, 0, 0], [0, 1, 1], [0, 2, 2]]
    assert [who for who, kept, factor in runs if kept == [1, 2] and factor == 1] == [[0, 1, 2], [1, 1, 2], [2, 1, 2]]
    assert [(who, factor) for who, kept, factor in runs if kept == [1, 2] and factor != 1] == [
        ([0, 1, 2], 0.0),
        ([0, 1, 2], 3.0),
    ]


def test_marks_beside_rows_that_are_selected(wrap: Any) -> None:
    """Two divisions are tried because of the rows, and what was seen of the marks is not forgotten by that."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 900)

        def forward(self, x: Tensor) -> Any:
            scores = self.layer(x)
            return {"marks": hardest(scores), "rows": scores[x[:, 0] > 0]}

    x = torch.randn(8, 4)
    x[:, 0] = torch.tensor([1.0, -1.0] * 4)
    with pytest.raises(instep.MergeError, match="they change when the other samples change"):
        wrap(Wide())(x)
