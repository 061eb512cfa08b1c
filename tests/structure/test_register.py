"""Types that instep is taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import instep
from instep.errors import MergeError, StructureError
from instep.structure import types
from instep.structure.tree import clear_type_cache, map_tensors, tensors_in


class Points:
    def __init__(self, xyz: Tensor, name: str = "") -> None:
        self.xyz, self.name = xyz, name


def register_points(cls: Any = Points, **options: Any) -> None:
    def split(points: Points, sizes: Sequence[int]) -> list[Points]:
        return [cls(xyz, points.name) for xyz in points.xyz.split(list(sizes))]

    def merge(parts: Sequence[Points]) -> Points:
        return cls(torch.cat([part.xyz for part in parts]), parts[0].name)

    instep.register(cls, **{"size": lambda p: len(p.xyz), "split": split, "merge": merge, **options})


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = dict(types._handlers_by_type)
    yield
    types._handlers_by_type.clear()
    types._handlers_by_type.update(before)
    types._handler_cache.clear()
    clear_type_cache()


def test_a_type_is_refused_until_it_is_taught() -> None:
    value = {"points": Points(torch.arange(5.0), "cloud")}
    with pytest.raises(StructureError, match=r"instep.register\(Points, size="):
        instep.split(value, 2)
    register_points()
    parts = instep.split(value, 2)
    assert parts.sizes == (3, 2)
    assert [part["points"].xyz.tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    merged = instep.merge(parts)["points"]
    assert (merged.name, merged.xyz.tolist()) == ("cloud", [0, 1, 2, 3, 4])


def test_it_is_merged_as_an_output() -> None:
    outputs = [Points(torch.zeros(3)), Points(torch.ones(2))]
    with pytest.raises(MergeError, match=r"instep.register\(Points, size="):
        instep.merge(outputs, [3, 2])
    register_points()
    assert instep.merge(outputs).xyz.tolist() == [0, 0, 0, 1, 1]
    with pytest.raises(MergeError, match=r"Points of \[3, 2\] samples, from shards of \[1, 1\]"):
        instep.merge(outputs, [1, 1])


def test_its_size_must_fit() -> None:
    register_points()
    with pytest.raises(StructureError, match=r"'p' \(Points\) for a batch of 4: it holds 5 samples"):
        instep.split({"x": torch.zeros(4), "p": Points(torch.zeros(5))}, 2)


def test_a_value_that_is_no_batch_is_whole() -> None:
    register_points(size=lambda points: None)
    points = Points(torch.zeros(5))
    assert all(part["p"] is points for part in instep.split({"x": torch.zeros(4), "p": points}, 2))


def test_a_split_that_loses_parts_is_refused() -> None:
    register_points(split=lambda points, sizes: [points])
    with pytest.raises(StructureError, match="the split function of Points returned 1 part"):
        instep.split(Points(torch.zeros(4)), 2)


def test_children_of_a_taught_type_are_taught() -> None:
    class Named(Points):
        pass

    register_points()
    assert instep.split(Named(torch.zeros(4)), 2).sizes == (2, 2)


def test_a_list_of_taught_values_is_a_column() -> None:
    register_points()
    clouds = [Points(torch.zeros(n)) for n in (3, 5, 7)]
    parts = instep.split({"x": torch.zeros(3), "clouds": clouds}, 2)
    assert [len(part["clouds"]) for part in parts] == [2, 1]


def test_a_container_can_be_taught() -> None:
    class Bag(dict[str, Any]):
        pass

    instep.register(
        Bag, size=lambda bag: 4, split=lambda bag, sizes: [Bag(n=n) for n in sizes], merge=lambda parts: Bag(n=4)
    )
    assert instep.split(Bag(n=4), 2) == [{"n": 2}, {"n": 2}]


def test_tensors_and_arrays_can_be_taught() -> None:
    class Ragged(Tensor):
        pass

    class Table(np.ndarray[Any, Any]):
        pass

    for cls, value in ((Ragged, torch.zeros(6).as_subclass(Ragged)), (Table, np.zeros(6).view(Table))):
        instep.register(
            cls,
            size=lambda rows: len(rows) // 2,
            split=lambda rows, sizes: [rows[:2] for _ in sizes],
            merge=lambda parts: "merged",
        )
        parts = instep.split({"x": torch.zeros(3), "rows": value}, 3)
        assert [len(part["rows"]) for part in parts] == [2, 2, 2]
        assert instep.merge(list(parts), [1, 1, 1])["rows"] == "merged"


def test_attributes_are_mapped() -> None:
    register_points()

    class Slotted(Points):
        __slots__ = ("more",)

    value = Slotted(torch.zeros(2), "kept")
    value.more = [torch.ones(2), {"deep": torch.ones(1)}]
    value.me = value  # type: ignore[attr-defined]
    doubled = map_tensors(lambda tensor: tensor + 1, value)
    assert type(doubled) is Slotted
    assert doubled.name == "kept"
    assert [tensor.tolist() for tensor in tensors_in(doubled)] == [[1, 1], [2, 2], [2]]
    assert doubled.me is doubled
    assert value.xyz.tolist() == [0, 0]


def test_a_mapping_of_ones_own() -> None:
    register_points(map=lambda fn, points: Points(fn(points.xyz), "mapped"))
    assert map_tensors(torch.neg, Points(torch.ones(2))).name == "mapped"
