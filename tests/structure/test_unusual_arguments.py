"""Arguments of the functions that mean nothing are refused by name, before anything is split."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep


class Mine:
    pass


def test_split_and_scatter_need_somewhere_to_put_the_samples() -> None:
    for parts in (0, -1):
        with pytest.raises(instep.StructureError, match="at least 1"):
            instep.split(torch.arange(3), parts)
    with pytest.raises(instep.StructureError, match="no devices"):
        instep.scatter(torch.arange(3), [])
    with pytest.raises(instep.StructureError, match="one entry per replica"):
        instep.Shards([])


@pytest.mark.parametrize("rules", [{"size": None}, {"split": 3}, {"merge": "cat"}])
def test_rules_of_a_type_are_functions(rules: dict[str, Any]) -> None:
    given: dict[str, Any] = {"size": len, "split": lambda v, sizes: [], "merge": lambda parts: parts[0], **rules}
    with pytest.raises(instep.StructureError, match=r"is not callable. Write instep.register\(MyBatch"):
        instep.register(Mine, **given)
    with pytest.raises(instep.StructureError, match="built-in split and merge rules"):
        instep.register(int, size=len, split=lambda v, sizes: [], merge=lambda parts: parts[0])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("device_ids", "cpu"),
        ("device_ids", 2),
        ("methods", "encode"),
        ("shares", 2),
        ("state", "sum"),
        ("place", "cpu"),
    ],
)
def test_options_that_take_several_values(option: str, value: Any) -> None:
    with pytest.raises(instep.WrapError, match=f"{option}={value!r}: write a"):
        instep.DataParallel(nn.Linear(2, 2), **{"device_ids": ["cpu"] * 2, option: value})


def test_methods_are_there() -> None:
    with pytest.raises(instep.WrapError, match=r"methods=\['extra_repr', 'encode'\]: Linear has no method 'encode'\."):
        instep.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, methods=("extra_repr", "encode"))


def test_gather_has_a_tensor_as_often_as_it_is_given() -> None:
    x = torch.arange(3.0)
    assert instep.gather([{"x": x}, {"x": x}], "cpu")["x"].tolist() == [0, 1, 2, 0, 1, 2]


def test_parallel_apply_takes_a_device_for_each_module() -> None:
    with pytest.raises(ValueError, match="2 modules and 1 entries in devices"):
        instep.parallel_apply([nn.Linear(2, 2)] * 2, [torch.zeros(1, 2)] * 2, devices=["cpu"])


@pytest.mark.parametrize("make", [lambda x: {x}, lambda x: frozenset([x]), lambda x: {"x": x}.values()])
def test_sets_and_views_of_tensors_are_refused(make: Any) -> None:
    """They have no positions. Every replica would get all of their tensors."""
    with pytest.raises(instep.StructureError, match=r"'b' is a \w+ of tensors, which has no positions .*\nPass a list"):
        instep.split({"a": torch.zeros(3), "b": {"c": make(torch.zeros(3))}["c"]}, 2)
    parts = instep.split({"a": torch.zeros(3), "b": {"x", "y"}, "c": {"x": 1}.keys()}, 2)
    assert parts[0]["b"] == {"x", "y"}


@pytest.mark.parametrize("cls", [SimpleNamespace, Namespace])
def test_namespaces_are_structures(cls: Any) -> None:
    class Fields(nn.Module):
        def forward(self, batch: Any) -> Any:
            return cls(out=batch.x * batch.scale, names=batch.names)

    x: Tensor = torch.randn(5, 2)
    with instep.DataParallel(Fields(), ["cpu"] * 2) as model:
        merged = model(cls(x=x, scale=2.0, names=list("abcde")))
    assert type(merged) is cls
    assert torch.equal(merged.out, x * 2)
    assert merged.names == list("abcde")
