"""What was merged once is merged again without looking; whatever is different is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.errors import MergeError
from instep.structure.merge import Merger

SIZES = (2, 1)


def parts(**changed: Any) -> list[dict[str, Any]]:
    made = [
        {"x": torch.arange(float(size)), "pair": (torch.ones(size, 2), torch.ones(3, size)), "names": ["a"] * size}
        for size in SIZES
    ]
    for index, part in enumerate(made):
        part.update({key: values[index] for key, values in changed.items()})
    return made


def warm() -> Merger:
    merger = Merger.from_options()
    for _ in range(2):
        merger.merge(parts(), SIZES)
    assert merger._cache
    return merger


def test_the_second_merge_gives_what_the_first_gave() -> None:
    merger = Merger.from_options()
    first, seen = merger.merge(parts(), SIZES), merger.actions
    merger.merge([torch.ones(1), torch.ones(2)], (1, 2))
    again = merger.merge(parts(), SIZES)
    assert torch.equal(again["x"], first["x"])
    assert [part.shape for part in again["pair"]] == [(3, 2), (3, 3)]
    assert type(again["pair"]) is tuple
    assert again["names"] == ["a", "a", "a"]
    assert merger.actions == seen


@pytest.mark.parametrize(
    "changed",
    [
        {"x": (None, torch.ones(1))},
        {"x": (torch.ones(2, 4), torch.ones(1, 4))},
        {"x": (torch.ones(2).to_sparse(), torch.ones(1).to_sparse())},
        {"x": ([0.5, 0.5], [0.5])},
        {"more": (torch.ones(2), torch.ones(1))},
        {"pair": ([torch.ones(2)], [torch.ones(1)])},
        {"names": (("a", "a"), ("a",))},
        {"names": ([torch.ones(1), torch.ones(2)], [torch.ones(3)])},
    ],
)
def test_parts_that_differ_are_looked_at_again(changed: dict[str, Any]) -> None:
    new, warmed = Merger.from_options().merge(parts(**changed), SIZES), warm().merge(parts(**changed), SIZES)
    assert str(warmed) == str(new)


def test_what_every_replica_gave_alike_is_not_joined() -> None:
    one = torch.ones(2)
    merger = Merger.from_options()
    merger.merge([torch.ones(2), torch.zeros(2)], (2, 2))
    assert merger.merge([one, one], (2, 2)) is one
    names = ["a", "b"]
    merger = Merger.from_options()
    merger.merge([["a", "b"], ["c", "d"]], (2, 2))
    assert merger.merge([names, names], (2, 2)) is names


@pytest.mark.parametrize(
    "x", [(torch.ones(2, 3), torch.ones(1, 4)), (torch.ones(3), torch.ones(3)), (torch.tensor(1), torch.tensor(2))]
)
def test_what_no_longer_fits_is_named(x: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(MergeError, match="'x'"):
        warm().merge(parts(x=x), SIZES)


def test_recipes_do_not_grow_with_the_sizes_of_batches() -> None:
    merger = Merger.from_options()
    for size in range(1, 300):
        merger.merge([torch.ones(size), torch.ones(size + 1)], (size, size + 1))
    assert len(merger._cache) <= 64


@pytest.mark.parametrize(
    "second",
    [
        {"sum": torch.tensor(2.5), "divisor": torch.tensor(3)},
        {"sum": torch.tensor(2.5), "divisor": 3},
        {"sum": torch.tensor(2.5, dtype=torch.float64), "divisor": torch.tensor(3)},
        {"divisor": torch.tensor(3), "sum": torch.tensor(2.5)},
        {"sum": torch.ones(3).to_sparse(), "divisor": torch.tensor(3)},
        {"sum": torch.ones(2, 3), "divisor": torch.tensor(3)},
        {"sum": torch.tensor(2.5)},
        (torch.tensor(2.5), torch.tensor(3)),
    ],
)
def test_a_cached_sum_gives_what_the_rule_gives(second: Any) -> None:
    """Also its errors."""
    first = {"sum": torch.tensor(1.5), "divisor": torch.tensor(4)}
    outcomes = []
    for repeats in (1, 3):
        merger = Merger.from_options("sum")
        for _ in range(repeats - 1):
            merger.merge([first, dict(first)], SIZES)
        assert bool(merger._cache) is (repeats > 1)
        assert merger.merge([first, first], SIZES) is first
        try:
            merged = merger.merge([first, second], SIZES)
            outcomes.append([(key, value, getattr(value, "dtype", None)) for key, value in merged.items()])
        except MergeError as error:
            outcomes.append(str(error))
        assert merger.actions == {("sum",): "rule sum", ("divisor",): "rule sum"} or isinstance(outcomes[-1], str)
    assert outcomes[0] == outcomes[1]
