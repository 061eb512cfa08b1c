"""Equality of values, and walks of object graphs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from instep.replicas.object_graph import tensors_equal, values_equal, walk

NAN = math.nan


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1.0, NAN]), torch.tensor([2.0, NAN]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), False),
        (torch.tensor([complex(1, NAN)]), torch.tensor([complex(1, NAN)]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), True),
        (torch.tensor([NAN, 0.0]).to_sparse(), torch.tensor([NAN, 0.0]).to_sparse(), True),
        (torch.tensor([1.0, 0.0]).to_sparse(), torch.tensor([1.0, 0.0]), False),
        (torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous(), True),
    ],
)
def test_equality_of_tensors(left: Tensor, right: Tensor, same: bool) -> None:
    assert tensors_equal(left, right) == tensors_equal(right, left) == values_equal(left, right) == same


def test_a_tensor_that_needs_a_gradient_equals_only_itself() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert values_equal(weight, weight)
    assert not values_equal(weight, torch.ones(2))
    assert tensors_equal(weight, torch.ones(2))
    assert not tensors_equal(weight, torch.full((2,), NAN))


class Holder:
    def __init__(self, value: object) -> None:
        self.value = value


def test_walk_visits_each_object_once_with_its_shortest_path() -> None:
    shared = [1, "text"]
    roots = {"deep": Holder({"list": shared}), "flat": shared}
    visits = {visit.path: visit.value for visit in walk(roots.items())}
    assert visits[("flat",)] is shared
    assert ("deep", "value", "list") not in visits
    assert set(visits) == {("deep",), ("flat",), ("deep", "value")}


def test_walk_follows_closures_cycles_and_attributes() -> None:
    class Row(tuple[int, ...]):
        note: object

    target, row = Holder(None), Row((1, 2))
    row.note = target
    cycle: list[object] = [lambda: row]
    cycle.append(cycle)
    paths = {visit.path for visit in walk([("root", cycle)])}
    assert ("root", 0, "row", "__dict__", "note") in paths


def test_walk_stops_at_tensors_modules_and_the_limit() -> None:
    layer = torch.nn.Linear(2, 2)
    assert [visit.value for visit in walk([("", layer)])] == [layer]
    assert len(list(walk([("", [[] for _ in range(9)])], limit=4))) == 4
