"""What the tests of replicas share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import instep

from ..replica_helpers import ENGINE_MEMORY


@pytest.fixture(params=ENGINE_MEMORY.values(), ids=ENGINE_MEMORY.keys())
def wrap(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Wraps a module on every engine, with shared and private memory; wrappers are closed when the test ends."""
    engine, private = request.param
    made = []

    def make(module: nn.Module, replicas: int = 2, **options: Any) -> Any:
        made.append(instep.DataParallel(module, ["cpu"] * replicas, engine=engine, private_copies=private, **options))
        return made[-1]

    yield make
    for model in made:
        model.close()
