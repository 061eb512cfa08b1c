"""A module twice: as it is, and on three replicas of every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import instep

from ..replica_helpers import ENGINE_MEMORY


@pytest.fixture(autouse=True)
def one_core_an_operation() -> Iterator[None]:
    """Operations on a handful of numbers spend their time waiting for each other's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Pair(NamedTuple):
    """The oracle and the module under test, alike in every weight."""

    plain: Any
    model: Any


@dataclass
class Maker:
    """Makes pairs whose wrappers are closed when the test ends."""

    engine: str
    private: bool
    stack: ExitStack

    def wrap(self, module: nn.Module, replicas: int = 3, **options: Any) -> Any:
        made = instep.DataParallel(
            module, ["cpu"] * replicas, engine=self.engine, private_copies=self.private, **options
        )
        return self.stack.enter_context(made)

    def __call__(self, build: Callable[[], nn.Module], replicas: int = 3, **options: Any) -> Pair:
        built = []
        for _ in range(2):
            torch.default_generator.manual_seed(7)
            built.append(build().double())
        return Pair(built[0], self.wrap(built[1], replicas, **options))


def _maker(kind: str) -> Iterator[Maker]:
    engine, private = ENGINE_MEMORY[kind]
    with ExitStack() as stack:
        yield Maker(engine, private, stack)


@pytest.fixture(params=ENGINE_MEMORY)
def pair(request: pytest.FixtureRequest) -> Iterator[Maker]:
    """Pairs on every engine, with shared and with private memory."""
    yield from _maker(request.param)


@pytest.fixture(params=[kind for kind in ENGINE_MEMORY if kind.startswith("serial")])
def serial_pair(request: pytest.FixtureRequest) -> Iterator[Maker]:
    yield from _maker(request.param)


@pytest.fixture(params=[kind for kind in ENGINE_MEMORY if kind.startswith("threads")])
def threads_pair(request: pytest.FixtureRequest) -> Iterator[Maker]:
    yield from _maker(request.param)
