"""What the tests of planning share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.errors import StructureError
from instep.structure.placements import Placement
from instep.structure.plan import Planner, SplitPlan

B = 6
x = torch.zeros(B, 2)


def plan(planner: Planner | None = None, /, **arguments: Any) -> SplitPlan:
    planner = planner or Planner(2)
    return planner.plan(tuple(arguments), tuple(arguments.values()))


def role_of(value: Any, **options: Any) -> Placement:
    """The role of a value beside a tensor of six samples."""
    return plan(Planner(2, **options), x=x, value=value).placements[1]


def refusal(planner: Planner | None = None, /, **arguments: Any) -> str:
    with pytest.raises(StructureError) as caught:
        plan(planner, **arguments)
    return str(caught.value)
