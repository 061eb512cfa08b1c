"""Arguments that `forward` writes to: a part is the caller's own memory, and what all replicas hold is not touched."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.structure.spec import Whole

from ..probe.helpers import both_engines


class Settings:
    def __init__(self) -> None:
        self.step = 0
        self.history: dict[str, Any] = {"steps": []}

    def __repr__(self) -> str:
        return f"step {self.step} {self.history}"

    @functools.cached_property
    def scale(self) -> float:
        return 2.0


class Writes(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.write = write

    def forward(self, x: Tensor, given: Any) -> Tensor:
        out: Tensor = self.layer(x) * self.write(given)
        return out


def add(given: Any) -> Any:
    given += 1
    return given


def silently(given: Tensor) -> Tensor:
    given.data.add_(1)
    return given


def step(given: Any) -> float:
    held = given["settings"] if isinstance(given, dict) else given
    held.step += 1
    return float(held.step)


def log(given: Any) -> float:
    given.append(len(given))
    return 1.0


def log_inside(given: Any) -> float:
    return log(given.history["steps"])


CASES: dict[str, tuple[Any, Any, str]] = {
    "a row": (lambda: torch.tensor([[0.0, float("nan"), 1.0]]), add, "given"),
    "a number": (lambda: torch.tensor(1.0), add, "given"),
    "a row, unseen": (lambda: torch.zeros(1, 3), silently, "given"),
    "an array": (lambda: np.zeros((), dtype=np.float32)[None], lambda array: float(add(array)[0]), "given"),
    "whole": (lambda: instep.whole(torch.zeros(3)), add, "given"),
    "an object": (Settings, step, "given"),
    "an object inside": (lambda: {"settings": Settings()}, step, "given.settings"),
    "a list in an object": (Settings, log_inside, "given.history.steps"),
    "a list": (lambda: instep.whole([1, 2]), log, "given"),
}


def shown(given: Any) -> str:
    return repr(given.value if isinstance(given, Whole) else given)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("probe", [True, False])
@both_engines
@pytest.mark.parametrize("case", CASES)
def test_shared_arguments_are_not_written(wrap: Any, case: str, engine: str, probe: bool, grad: bool) -> None:
    make, write, name = CASES[case]
    given = make()
    before = shown(given)
    model = wrap(Writes(write), 3, engine=engine, probe=probe)
    for _ in range(2):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(instep.StructureError, match=f"forward changes argument '{name}'"),
        ):
            model(torch.randn(6, 4), given)
        assert shown(given) == before


@both_engines
def test_shared_arguments_that_are_only_read_are_no_error(wrap: Any, engine: str) -> None:
    net, x, settings = Writes(lambda given: given.scale), torch.randn(6, 4), Settings()
    model = wrap(net, 3, engine=engine)
    for _ in range(2):
        torch.testing.assert_close(model(x, settings), net(x, settings))
    assert vars(settings) == {"step": 0, "history": {"steps": []}, "scale": 2.0}
    weight = torch.full((1, 3), float("nan"))
    assert bool(model.module.layer(x).isfinite().all())
    read = wrap(Writes(lambda given: given), 2, engine=engine)
    assert bool(read(x, weight).isnan().all())


@pytest.mark.parametrize("grad", [True, False])
@both_engines
def test_parts_are_the_callers_own_memory(wrap: Any, engine: str, grad: bool) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x.mul_(2))
            return out

    net, x = Doubles(), torch.randn(5, 4)
    mine, plain = x.clone(), x.clone()
    model = wrap(net, 2, engine=engine)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(mine), net(plain))
        torch.testing.assert_close(mine, plain)
        torch.testing.assert_close(model(mine), net(plain))
    torch.testing.assert_close(mine, plain)


class WritesToOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, again: Tensor) -> Tensor:
        x.mul_(2)
        out: Tensor = self.layer(again)
        return out


@both_engines
def test_a_batch_that_is_given_twice_is_one_memory(engine: str) -> None:
    net, x, other = WritesToOne(), torch.randn(5, 4), torch.randn(5, 4)
    model = instep.DataParallel(net, ["cpu"] * 2, engine=engine)
    for _ in range(2):
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(model(mine, mine), net(theirs, theirs))
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(model(x.clone(), other), net(x.clone(), other))
