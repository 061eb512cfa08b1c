"""`in_dims`: by position, by name, nested, and by pattern."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from instep.errors import StructureError
from instep.structure.placements import Nested, PerSample, Placement, Replicate, Shard
from instep.structure.plan import Planner
from instep.structure.spec import collect_dims, dims_by_name, validate_dims
from instep.structure.split import split

WHOLE = Replicate("in_dims is None")


def roles(in_dims: Any, dim: int = 0, /, **arguments: Any) -> tuple[Placement, ...]:
    return Planner(2, dim, in_dims).plan(tuple(arguments), tuple(arguments.values())).placements


def test_one_dim_for_every_argument() -> None:
    assert roles(1, x=torch.zeros(3, 4), y=torch.zeros(2, 4)) == (Shard(1), Shard(1))
    assert roles(-1, x=torch.zeros(3, 4), y=torch.zeros(4)) == (Shard(1), Shard(0))
    assert roles(0, x=torch.zeros(3, 4), n=5, s="text") == (Shard(0), Replicate("int"), Replicate("str"))


def test_the_usual_dim_for_every_argument() -> None:
    assert roles("auto", 1, x=torch.zeros(3, 4), scale=torch.zeros(())) == (Shard(1), Replicate("0-d"))
    with pytest.raises(StructureError, match="it has no dim 1"):
        roles("auto", 1, x=torch.zeros(3, 4), y=torch.zeros(4))


def test_none_for_every_argument() -> None:
    assert roles(None, x=torch.zeros(3), y=torch.zeros(4)) == (WHOLE, WHOLE)


def test_by_position() -> None:
    assert roles((0, None, 1), x=torch.zeros(3), w=torch.zeros(9), h=torch.zeros(2, 3)) == (Shard(0), WHOLE, Shard(1))
    assert roles([1], h=torch.zeros(2, 3), x=torch.zeros(3)) == (Shard(1), Shard(0))
    with pytest.raises(StructureError, match="in_dims has 3 entries for a call with 1 argument"):
        roles((0, 0, 0), x=torch.zeros(3))


def test_by_name() -> None:
    assert roles({"w": None, "h": 1}, x=torch.zeros(3), w=torch.zeros(9), h=torch.zeros(2, 3)) == (
        Shard(0),
        WHOLE,
        Shard(1),
    )


def test_nested() -> None:
    batch = {"x": torch.zeros(3), "aux": (torch.zeros(9), torch.zeros(2, 3), torch.zeros(3))}
    wanted = (Nested(("x", "aux"), (Shard(0), Nested((0, 1, 2), (WHOLE, Shard(1), Shard(0))))),)
    assert roles({"batch": {"aux": (None, 1)}}, batch=batch) == wanted
    assert roles(({"aux": (None, 1, "auto")},), batch=batch) == wanted
    assert roles({"batch": {"aux": {0: None, "1": 1}}}, batch=batch) == wanted


def test_nested_over_records_by_name_and_by_position() -> None:
    Pair = namedtuple("Pair", ["left", "right"])

    @dataclass
    class Record:
        left: Any
        right: Any

    wanted = Nested(("left", "right"), (WHOLE, Shard(1)))
    for make in (Pair, Record):
        value = make(torch.zeros(9), torch.zeros(2, 3))
        for spec in ((None, 1), {"left": None, "right": 1}, make(None, 1)):
            assert roles({"v": spec}, x=torch.zeros(3), v=value)[1] == wanted


def test_too_many_dims_for_a_structure() -> None:
    with pytest.raises(StructureError, match="3 dims are given for 'v', which has 1 entries"):
        roles({"v": (0, 0, 0)}, v=(torch.zeros(3),))


def test_a_structure_of_dims_for_a_tensor() -> None:
    with pytest.raises(StructureError, match=r"in_dims has \(0, 1\) for argument 'x', which is a Tensor \[3\]"):
        roles({"x": (0, 1)}, x=torch.zeros(3))


def test_dotted_paths_and_patterns() -> None:
    batch = {"x": torch.zeros(3), "aux": {"w1": torch.zeros(9), "w2": torch.zeros(8), "h": torch.zeros(2, 3)}}
    wanted = (Nested(("x", "aux"), (Shard(0), Nested(("w1", "w2", "h"), (WHOLE, WHOLE, Shard(1))))),)
    assert roles({"batch.aux.w1": None, "batch.aux.w2": None, "batch.aux.h": 1}, batch=batch) == wanted
    assert roles({"*.w?": None, "batch.aux.h": 1}, batch=batch) == wanted
    assert roles({"batch.aux.h": 1, "batch.aux.*": None}, batch=batch) == wanted


def test_the_pattern_for_the_rest_comes_last_wherever_it_is_written() -> None:
    assert roles({"*": 0, "w": None}, x=torch.zeros(3), w=torch.zeros(9)) == (Shard(0), WHOLE)


def test_a_path_inside_a_declared_container_has_the_last_word() -> None:
    batch = {"x": torch.zeros(2, 3), "w": torch.zeros(9)}
    assert roles({"batch": 1, "batch.w": None}, batch=batch) == (Nested(("x", "w"), (Shard(1), WHOLE)),)


def test_a_dim_for_a_list_of_words_means_its_entries() -> None:
    assert roles({"names": 0}, x=torch.zeros(3), names=list("abc")) == (Shard(0), PerSample())
    assert roles({"names": 0}, x=torch.zeros(3), names=tuple("abc")) == (Shard(0), PerSample())
    assert roles({"names": 0}, names=list("abc")) == (PerSample(),)
    with pytest.raises(StructureError, match=r"'names' \(list of 2\) for a batch of 3: it has 2 entries"):
        roles({"names": 0}, x=torch.zeros(3), names=["a", "b"])


def test_a_dim_for_a_container_leaves_small_things_whole() -> None:
    batch = {"h": torch.zeros(2, 3), "names": list("abc"), "size": [2, 2], "t": torch.tensor(1.0)}
    (role,) = roles({"batch": 1}, batch=batch)
    assert isinstance(role, Nested)
    assert role.placements == (Shard(1), PerSample(), Replicate("a list of 2, no tensors"), Replicate("0-d"))


def test_a_declared_dim_is_held_to() -> None:
    for value in (torch.zeros(1), torch.zeros(()), torch.zeros(4)):
        with pytest.raises(StructureError, match="'w'"):
            roles({"w": 0}, x=torch.zeros(3), w=value)


def test_samples() -> None:
    images = (torch.zeros(3, 4), torch.zeros(3, 5))
    assert roles({"images": "samples"}, images=images) == (PerSample(),)
    with pytest.raises(StructureError, match="'images'"):
        roles({"images": "samples"}, x=torch.zeros(3), images=images)


@pytest.mark.parametrize("spec", ["all", True, 1.5, {"x": "first"}, (0, "b"), object()])
def test_a_declaration_that_means_nothing_is_refused_when_it_is_given(spec: Any) -> None:
    with pytest.raises(StructureError, match="in_dims contains"):
        Planner(2, in_dims=spec)
    with pytest.raises(StructureError, match="out_dims contains"):
        validate_dims(spec, "out_dims")


def test_positions_become_names() -> None:
    assert dims_by_name((0, None), ["x", "weight", "bias"]) == {"x": 0, "weight": None}
    assert dims_by_name([0, None, 1], ["x"], "rest") == {"x": 0, "rest.0": None, "rest.1": 1}
    assert dims_by_name({"x": 0}, ["x"]) == {"x": 0}
    assert dims_by_name("auto", ["x"]) == "auto"
    # A keyword means the same wherever it is written.
    spec = dims_by_name((0, None), ["x", "weight"])
    assert roles(spec, weight=torch.zeros(9), x=torch.zeros(3)) == (WHOLE, Shard(0))


def test_every_declared_dim_is_found() -> None:
    assert collect_dims({"a": 1, "b": (None, -1, {"c": 2}), "d": "samples"}) == {1, -1, 2}
    assert collect_dims("auto") == set()


def test_split_takes_dims_of_what_is_inside() -> None:
    value = {"x": torch.zeros(3), "deep": {"h": torch.zeros(2, 3), "w": torch.zeros(9)}}
    for spec in ({"deep": {"h": 1, "w": None}}, {"deep.h": 1, "deep.w": None}):
        parts = split(value, 2, in_dims=spec)
        assert [part["deep"]["h"].shape[1] for part in parts] == [2, 1]
        assert parts[0]["deep"]["w"] is value["deep"]["w"]
    first, second = split((torch.zeros(3), torch.zeros(9)), 2, in_dims=(0, None))
    assert (len(first[0]), len(second[0]), len(second[1])) == (2, 1, 9)
    assert split(torch.zeros(2, 3), 2, in_dims=1).sizes == (2, 1)
    assert split(torch.zeros(2, 3), 2, in_dims=None).sizes == (0,)
