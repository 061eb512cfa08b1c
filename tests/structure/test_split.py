"""Acting on a plan: parts are views that keep types, order and gradients; marks are taken off."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import instep
from instep.errors import MergeError, StructureError
from instep.structure.merge import merge
from instep.structure.plan import Planner
from instep.structure.spec import Shards, strip_marks, whole
from instep.structure.split import Parts, apply_plan, plan_value, split, undo_plan

Pair = namedtuple("Pair", ["left", "right"])


class Titled(list[Any]):
    title = ""


def test_parts_are_views() -> None:
    x, a = torch.zeros(5, 2), np.zeros(5)
    parts = split({"x": x, "a": a}, 2)
    parts[1]["x"].fill_(1)
    parts[1]["a"][:] = 1
    assert x[:, 0].tolist() == [0, 0, 0, 1, 1]
    assert a.tolist() == [0, 0, 0, 1, 1]


def test_gradients_flow_through_parts() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    parts = split({"x": x}, 2)
    sum((index + 1) * part["x"].sum() for index, part in enumerate(parts)).backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_a_parameter_is_split_and_gets_its_gradient() -> None:
    weight = nn.Parameter(torch.zeros(4))
    merge(split(weight, 2)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1] * 4


def test_columns_keep_their_class() -> None:
    names = Titled("abcde")
    names.title = "names"
    parts = split({"x": torch.zeros(5), "names": names, "ids": ("1", "2", "3", "4", "5")}, 2)
    assert [list(part["names"]) for part in parts] == [["a", "b", "c"], ["d", "e"]]
    assert all(type(part["names"]) is Titled and part["names"].title == "names" for part in parts)
    assert [part["ids"] for part in parts] == [("1", "2", "3"), ("4", "5")]
    merged = merge(parts)
    assert (type(merged["names"]), merged["names"], merged["ids"]) == (Titled, names, ("1", "2", "3", "4", "5"))


def test_what_is_whole_is_the_same_object_everywhere() -> None:
    value = {"x": torch.zeros(4), "w": torch.zeros(1, 3), "size": [224, 224], "f": len, "pair": (1, "a")}
    parts = split(value, 2)
    for name in ("w", "size", "f", "pair"):
        assert all(part[name] is value[name] for part in parts)


def test_empty_containers_are_kept() -> None:
    parts = split({"x": torch.zeros(4), "a": {}, "b": (), "c": []}, 2)
    assert [part["a"] for part in parts] == [{}, {}]
    assert [part["b"] for part in parts] == [(), ()]
    assert [part["c"] for part in parts] == [[], []]


def test_whole_is_taken_off() -> None:
    weights = torch.ones(4)
    parts = split({"x": torch.zeros(4), "w": instep.whole(weights), "deep": (whole("a"), [whole(weights)])}, 2)
    for part in parts:
        assert part["w"] is weights
        assert part["deep"][0] == "a"
        assert part["deep"][1][0] is weights
    assert merge(parts)["w"] is weights


def test_shards_are_handed_out() -> None:
    parts = split({"x": torch.arange(5), "s": instep.Shards(["a", "b"])}, 2)
    assert [part["s"] for part in parts] == ["a", "b"]
    assert merge(parts)["s"].parts == ["a", "b"]
    uneven = split({"x": torch.arange(5), "s": Shards([torch.zeros(1), torch.zeros(4)])}, 2)
    assert uneven.sizes == (1, 4)
    assert uneven[0]["x"].tolist() == [0]


def test_marks_come_off_where_nothing_is_split() -> None:
    kept = {"a": 1}
    assert strip_marks(kept) is kept
    assert strip_marks({"w": whole(3), "s": Shards([4]), "l": [1]}) == {"w": 3, "s": 4, "l": [1]}
    with pytest.raises(StructureError, match="Shards has 2 entries"):
        strip_marks((Shards([1, 2]),))


def test_a_plan_is_undone() -> None:
    names, values = ("x", "pair"), (torch.arange(5), Pair(list("abcde"), torch.zeros(5, 2)))
    plan = Planner(3).plan(names, values)
    parts = apply_plan(plan, values)
    assert len(parts) == 3
    assert [part[1].left for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    x, pair = undo_plan(plan, parts)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert type(pair) is Pair
    assert pair.left == list("abcde")


def test_parts_of_another_structure_are_not_joined() -> None:
    parts = split({"x": torch.zeros(4), "deep": {"a": torch.zeros(4)}}, 2)
    parts[1] = {"x": torch.zeros(2), "deep": {"b": torch.zeros(2)}}
    with pytest.raises(MergeError, match="'deep' does not have the structure that was split"):
        merge(parts)


def test_parts_know_their_sizes() -> None:
    parts = split(torch.zeros(7), 3)
    assert isinstance(parts, Parts)
    assert parts.sizes == (3, 2, 2)
    assert split(torch.zeros(7), 3, min_shard=3).sizes == (4, 3)
    assert split("nothing batched", 3) == ["nothing batched"]
    assert plan_value(torch.zeros(2, 7), 2, 1).sizes == (4, 3)


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (
            {"x": torch.zeros(4), "w": torch.zeros(9)},
            ["'w' (Tensor [9])", "Say with in_dims what 'w' is: None if every replica gets all of it"],
        ),
        (
            [torch.zeros(2), torch.zeros(2)],
            ["what the structure is: 'samples' if it has one entry", "0 if every entry has the batch"],
        ),
    ],
)
def test_the_choice_is_in_words(value: Any, lines: list[str]) -> None:
    with pytest.raises(StructureError) as caught:
        split(value, 2)
    for line in lines:
        assert line in str(caught.value)


def test_those_lines_work() -> None:
    assert split({"x": torch.zeros(4), "w": torch.zeros(9)}, 2, in_dims={"w": None}).sizes == (2, 2)
    pair = [torch.zeros(2), torch.zeros(2)]
    assert [len(part) for part in split(pair, 2, in_dims="samples")] == [1, 1]
    assert [len(part) for part in split(pair, 2, in_dims=0)] == [2, 2]


def test_several_dims_of_one_structure() -> None:
    value = {"x": torch.randn(4, 2), "h": torch.randn(3, 4), "w": torch.randn(4)}
    parts = split(value, 2, in_dims={"h": 1, "w": None})
    assert [part["h"].shape for part in parts] == [(3, 2), (3, 2)]
    merged = merge(parts)
    assert all(torch.equal(merged[name], value[name]) for name in value)
