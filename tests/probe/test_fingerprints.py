"""What the probe learned holds for the module and the words of the call as they were."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Mode(enum.Enum):
    MEAN = 1
    SUM = 2


class Config:
    centred = False


class Net(nn.Module):
    """Its output means another thing after each of the changes below."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Identity()
        self.criterion: Any = nn.MSELoss()
        self.adds = False
        self.config = Config()

    def forward(self, x: Tensor, how: Any = None) -> Tensor:
        out = self.layer(x)
        if self.config.centred:
            return out - out.mean(0)
        words = how["mode"] if isinstance(how, dict) else how
        if self.adds or words in ("sum", 1, Mode.SUM, 0.5) or not self.head.training:
            return out.square().sum()
        result: Tensor = self.criterion(out, torch.zeros_like(out))
        return result


@pytest.fixture(params=["serial", "threads", "processes"])
def pair(request: pytest.FixtureRequest) -> Any:
    net = Net().double()
    with instep.DataParallel(net, ["cpu"] * 2, engine=request.param) as model:
        yield net, model


X = torch.randn(7, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "adds", True),
        lambda model: setattr(model, "criterion", nn.MSELoss(reduction="sum")),
        lambda model: model.head.eval(),
    ],
    ids=["a flag", "another criterion", "the mode of a part"],
)
def test_a_module_that_was_changed_is_tried_again(pair: Any, change: Any) -> None:
    net, model = pair
    for _ in range(2):
        torch.testing.assert_close(model(X), net(X))
    change(model)
    for _ in range(2):
        torch.testing.assert_close(model(X), net(X))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "layer", nn.Sequential(model.layer, nn.Softmax(0))),
        lambda model: setattr(model.config, "centred", True),
    ],
    ids=["a layer", "inside an object"],
)
def test_samples_that_meet_after_a_change_are_found(pair: Any, change: Any) -> None:
    _, model = pair
    model(X)
    change(model)
    with pytest.raises(instep.MergeError):
        model(X)


@pytest.mark.parametrize(
    "words",
    [("mean", "sum"), (0, 1), (Mode.MEAN, Mode.SUM), ({"mode": "mean"}, {"mode": "sum"}), (0.0, 0.5), (None, "sum")],
    ids=["words", "numbers", "enums", "inside", "fractions", "None"],
)
def test_values_of_plain_arguments_are_distinguished(pair: Any, words: tuple[Any, Any]) -> None:
    net, model = pair
    for _ in range(2):
        for how in words:
            torch.testing.assert_close(model(X, how), net(X, how))


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        TRIED.append(len(x))
        out: Tensor = self.layer(x)
        return out


TRIED: list[int] = []


def test_state_set_by_forward_does_not_change_the_fingerprint() -> None:
    TRIED.clear()
    with instep.DataParallel(Counts(), ["cpu"] * 2, engine="serial") as model:
        for _ in range(6):
            model(torch.randn(8, 4))
    assert len([size for size in TRIED if size != 4]) <= 6  # two trials at most, of three runs each
    assert model.calls == 6


def test_freezing_and_thawing_is_no_change() -> None:
    TRIED.clear()
    with instep.DataParallel(Counts(), ["cpu"] * 2, engine="serial") as model:
        for step in range(6):
            model.layer.requires_grad_(step % 2 == 0)
            model(torch.randn(8, 4))
    assert len([size for size in TRIED if size != 4]) <= 6
