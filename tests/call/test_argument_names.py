"""A name that no argument can have: an error at the first call, with the names that there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Weighing(nn.Module):
    """Takes weights that are as many as the samples, and are no part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, class_weights: Tensor, *more: Tensor, scale: float = 1.0) -> Tensor:
        y: Tensor = self.layer(x) * class_weights.sum() * scale
        return y

    def encode(self, tokens: Tensor, table: Tensor) -> Tensor:
        return tokens * table.sum()

    def free(self, x: Tensor, **given: Tensor) -> Tensor:
        return x * given["table"].sum()


X, WEIGHTS = torch.randn(6, 3), torch.arange(6.0)


@pytest.mark.parametrize("option", ["in_dims", "place"])
def test_a_name_that_forward_does_not_have(option: str) -> None:
    table = {"class_weight": "cpu" if option == "place" else None}
    options: dict[str, Any] = {option: table}
    with instep.DataParallel(Weighing(), ["cpu"] * 2, engine="serial", **options) as model:
        for call in (model, model.explain, model):
            with pytest.raises(instep.StructureError, match=option) as error:
                call(X, WEIGHTS)
            assert "names no argument of forward: it has x, class_weights, more, scale" in str(error.value)
            assert "Did you mean 'class_weights'?" in str(error.value)


def test_proposed_names_keep_the_rest_of_the_path() -> None:
    with (
        instep.DataParallel(Weighing(), ["cpu"] * 2, engine="serial", in_dims={"class_weight.a": None}) as model,
        pytest.raises(instep.StructureError, match=r"Did you mean 'class_weights\.a'"),
    ):
        model(X, WEIGHTS)


@pytest.mark.parametrize(
    "in_dims",
    [
        {"class_weights": None},
        {"class*": None, "aux*.b": 0},
        {"*weights": None, "*.deep": 1},
        {"class_weights": None, "more.0": 0, "scale": None},
        {"class_weights": None, "tokens": 0, "x.inner.*": 0},
    ],
    ids=str,
)
def test_names_that_an_argument_can_have(in_dims: dict[str, Any]) -> None:
    net = Weighing()
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", in_dims=in_dims) as model:
        torch.testing.assert_close(model(X, WEIGHTS), net(X, WEIGHTS))


def test_names_of_other_methods() -> None:
    net = Weighing()
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", in_dims={"table": None}) as model:
        torch.testing.assert_close(model.call("encode", X, WEIGHTS), net.encode(X, WEIGHTS))
        torch.testing.assert_close(model.call("free", X, table=WEIGHTS), net.free(X, table=WEIGHTS))
    dims = {"table": None, "other": None, "class_weights": None}
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", in_dims=dims) as model:
        torch.testing.assert_close(model.call("free", X, table=WEIGHTS), net.free(X, table=WEIGHTS))
        with pytest.raises(instep.StructureError, match=r"'other'.*\n.*methods="):
            model(X, WEIGHTS)
    with instep.DataParallel(net, ["cpu"] * 2, engine="serial", in_dims=dims, methods=["free"]) as model:
        torch.testing.assert_close(model.free(X, table=WEIGHTS), net.free(X, table=WEIGHTS))
        torch.testing.assert_close(model(X, WEIGHTS), net(X, WEIGHTS))


def test_the_target_of_a_loss_has_a_name() -> None:
    net, target = nn.Linear(3, 2), torch.randn(6, 2)
    for where, args, kwargs in ((1, (X, target), {}), ("wanted", (X,), {"wanted": target})):
        whole = instep.with_loss(net, nn.MSELoss(), target=where)
        dims = {"wanted" if kwargs else "target": 0}
        with instep.DataParallel(whole, ["cpu"] * 2, engine="serial", in_dims=dims) as model:
            torch.testing.assert_close(model(*args, **kwargs), whole(*args, **kwargs))
    whole = instep.with_loss(net, nn.MSELoss())
    with (
        instep.DataParallel(whole, ["cpu"] * 2, engine="serial", in_dims={"targets": 0}) as model,
        pytest.raises(instep.StructureError, match="Did you mean 'target'"),
    ):
        model(X, target)


def test_explain_says_which_rules_name_no_output() -> None:
    class Outputs(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"loss": x.mean(), "aux": {"rows": x, "top": x.max()}}

    rules = {"loss": "mean", "aux.top": "max", "aux.tops": "max", "*.row": "cat", "aux*": "cat"}
    dims = {"aux.rows": 0, "rowz": 0}
    with instep.DataParallel(Outputs(), ["cpu"] * 2, engine="serial", merge=rules, out_dims=dims) as model:
        assert "names none" not in str(model.explain(X))  # nothing is known yet
        model(X)
        said = str(model.explain(X))
    unused = [line.strip() for line in said.splitlines() if "matches no output" in line]
    expected = ("merge={'aux.tops'", "merge={'*.row'", "out_dims={'rowz'")
    assert unused == [f"{words}: ...}} matches no output" for words in expected]
