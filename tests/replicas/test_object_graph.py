"""When two values of replicas are the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from instep.replicas.object_graph import tensors_equal, values_equal

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
def test_tensors(left: Tensor, right: Tensor, same: bool) -> None:
    assert tensors_equal(left, right) == tensors_equal(right, left) == values_equal(left, right) == same


def test_a_tensor_that_needs_a_gradient_equals_only_itself() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert values_equal(weight, weight)
    assert not values_equal(weight, torch.ones(2))
    assert tensors_equal(weight, torch.ones(2))
    assert not tensors_equal(weight, torch.full((2,), NAN))
