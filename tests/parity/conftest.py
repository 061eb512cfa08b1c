"""Fixtures that build pairs of a plain module and a wrapped copy, on every engine."""

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
def one_thread() -> Iterator[None]:
    """Run torch on one thread: small operations are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Pair(NamedTuple):
    """A plain module and a wrapped module with equal weights."""

    plain: Any
    model: Any


@dataclass
class PairFactory:
    """Builds pairs and closes their wrappers when the test ends."""

    engine: str
    private: bool
    stack: ExitStack

    def wrap(self, module: nn.Module, replicas: int = 3, **options: Any) -> Any:
        model = instep.DataParallel(
            module, ["cpu"] * replicas, engine=self.engine, private_copies=self.private, **options
        )
        return self.stack.enter_context(model)

    def __call__(self, build: Callable[[], nn.Module], replicas: int = 3, **options: Any) -> Pair:
        built = []
        for _ in range(2):
            torch.default_generator.manual_seed(7)
            built.append(build().double())
        return Pair(built[0], self.wrap(built[1], replicas, **options))


def _factory(name: str) -> Iterator[PairFactory]:
    engine, private = ENGINE_MEMORY[name]
    with ExitStack() as stack:
        yield PairFactory(engine, private, stack)


@pytest.fixture(params=ENGINE_MEMORY)
def pair(request: pytest.FixtureRequest) -> Iterator[PairFactory]:
    """Pairs on every engine, with shared parameters and with private copies."""
    yield from _factory(request.param)


@pytest.fixture(params=[name for name in ENGINE_MEMORY if name.startswith("serial")])
def serial_pair(request: pytest.FixtureRequest) -> Iterator[PairFactory]:
    yield from _factory(request.param)


@pytest.fixture(params=[name for name in ENGINE_MEMORY if name.startswith("threads")])
def threads_pair(request: pytest.FixtureRequest) -> Iterator[PairFactory]:
    yield from _factory(request.param)
