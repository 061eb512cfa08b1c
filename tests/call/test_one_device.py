"""`explain` shows each reason for running on one device that is known before the call, and changes nothing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep
from instep.call import one_device

DEVICES = ["cpu"] * 2
X = torch.randn(6, 3)


@pytest.fixture(autouse=True)
def no_warnings_about_one_device() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "calls run on one device")
        yield


def reason(model: instep.DataParallel, *args: Any) -> str:
    """The reason in the heading of `explain`; empty if the call runs on all replicas."""
    heading = model.explain(*args).heading
    return heading.partition(" alone: ")[2]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(3, 3), None

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.cell(x, self.hidden)
        return self.hidden  # type: ignore[return-value]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) @ self.embedding.weight.T


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: Any = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * next(self.numbers)


def test_carried_state() -> None:
    with instep.DataParallel(Recurrent(), DEVICES) as model:
        assert reason(model, X) == ""
        model(X)
        assert reason(model, X) == one_device.CARRIED_STATE.name
        model(X)
        assert reason(model, X) == one_device.CARRIED_STATE.name
        model.hidden = None
        assert reason(model, X) == ""


def test_declared_carried_state() -> None:
    with instep.DataParallel(Recurrent(), DEVICES, state={"hidden": "cat"}) as model:
        model.hidden = torch.zeros(6, 3)
        assert reason(model, torch.randn(3, 3)) == ""  # registers no batch dim
        model(X)
        assert reason(model, X) == ""
        assert reason(model, torch.randn(4, 3)) == one_device.CARRIED_STATE.name


def test_shared_max_norm_weight() -> None:
    ids = torch.arange(4)
    with instep.DataParallel(Tied(), DEVICES) as model:
        assert reason(model, ids) == one_device.MAX_NORM_EMBEDDING.name
        model(ids)
        assert reason(model, ids) == one_device.MAX_NORM_EMBEDDING.name


def test_caller_only_object() -> None:
    with instep.DataParallel(Counting(), DEVICES, engine="threads") as model:
        assert reason(model, X) == ""
        model(X)
        assert reason(model, X) == one_device.CALLER_ONLY_OBJECT.name
        assert torch.equal(model(X), 2 * X)
        assert reason(model, X) == one_device.CALLER_ONLY_OBJECT.name
        model.numbers = iter([])
        assert reason(model, X) == ""


def test_func_transform() -> None:
    shown: list[str] = []
    with instep.DataParallel(nn.Linear(3, 2), DEVICES) as model:

        def loss(x: Tensor) -> Tensor:
            shown.append(reason(model, x))
            return model(x).sum()  # type: ignore[no-any-return]

        torch.func.grad(loss)(X)
    assert shown == [one_device.FUNC_TRANSFORM.name]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: model.register_forward_hook, ""),
        (lambda model: model.module[0].register_forward_hook, one_device.USER_HOOKS.name),
    ],
)
def test_user_hook(change: Callable[[Any], Any], expected: str) -> None:
    with instep.DataParallel(nn.Sequential(nn.Linear(3, 2)), DEVICES) as model:
        handle = change(model)(lambda *_: None)
        assert reason(model, X) == expected
        handle.remove()
        assert reason(model, X) == ""


def test_lazy_module() -> None:
    with instep.DataParallel(nn.LazyLinear(2), DEVICES) as model:
        assert reason(model, X) == one_device.LAZY_MODULE.name
        model(X)
        assert reason(model, X) == ""


def test_remembered_reason() -> None:
    class Retaining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)
            output.retain_grad()
            return output

    with instep.DataParallel(Retaining(), DEVICES, engine="threads") as model:
        assert reason(model, X) == ""
        model(X)
        assert reason(model, X) == one_device.RETAIN_GRAD.name
        with torch.no_grad():
            assert reason(model, X) == ""


def test_explain_warns_about_nothing() -> None:
    with instep.DataParallel(Tied(), DEVICES) as model, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.explain(torch.arange(4))
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match="Embedding"):
            model(torch.arange(4))
