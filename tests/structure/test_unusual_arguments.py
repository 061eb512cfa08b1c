"""Arguments of the functions that mean nothing are refused by name, before anything is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
    with pytest.raises(ValueError, match="2 modules and 1 devices"):
        instep.parallel_apply([nn.Linear(2, 2)] * 2, [torch.zeros(1, 2)] * 2, devices=["cpu"])
