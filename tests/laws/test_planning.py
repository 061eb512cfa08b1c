"""Planning reads no data, is deterministic, and names the leaf that does not fit."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import StructureError
from instep.structure.plan import Planner, SplitPlan
from instep.structure.split import split
from instep.structure.tree import map_tensors

from .strategies import Blueprint, Frozen, Pair, Plain, assert_same, blueprints, leaves

batches = st.integers(2, 7)


class NoOperations(TorchDispatchMode):
    """Raises when any operation runs on a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"planning ran {func}")


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Blueprint]:
    batch = draw(batches)
    return batch, draw(blueprints(batch))


def plan(planner: Planner, value: Any) -> SplitPlan:
    return planner.plan(("batch",), (value,))


@given(case=cases(), parts=st.integers(1, 5))
def test_planning_runs_no_operation(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    value = blueprint(slice(0, batch))
    planner = Planner(parts)
    with NoOperations():
        first = plan(planner, value)
        assert plan(planner, value) is first
    assert first.batch_size == batch


class OnlyCpuMetadata(NoOperations):
    """Allows operations on the CPU metadata of a packed sequence."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(a.dtype is torch.long and a.device.type == "cpu" for a in args if isinstance(a, Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [NoOperations, OnlyCpuMetadata])
def test_packed_sequences_are_planned_from_cpu_metadata(mode: Any) -> None:
    """A packed sequence without `sorted_indices` has its number of samples only in `batch_sizes`."""
    in_order = mode is OnlyCpuMetadata
    lengths = range(6, 0, -1) if in_order else (2, 6, 1, 3, 5, 4)
    packed = pack_sequence([torch.zeros(n, 2) for n in lengths], enforce_sorted=in_order)
    with mode():
        assert plan(Planner(2), packed).batch_size == 6


@given(case=cases(), parts=st.integers(1, 5))
def test_meta_tensors_have_the_same_plan(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    value = blueprint(slice(0, batch))
    bare = map_tensors(lambda tensor: tensor.to("meta"), value)
    assert plan(Planner(parts), bare) == plan(Planner(parts), value)


@given(case=cases(), parts=st.integers(1, 5))
def test_the_same_structure_has_the_same_plan(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    planner = Planner(parts)
    first = plan(planner, blueprint(slice(0, batch)))
    copies = map_tensors(torch.clone, blueprint(slice(0, batch)))
    assert plan(planner, copies) is first
    assert plan(Planner(parts), copies) == first


@given(batch=batches, length=st.integers(1, 9), other=st.integers(1, 9))
def test_other_dims_than_the_batch_share_a_plan(batch: int, length: int, other: int) -> None:
    planner = Planner(2)
    first = plan(planner, {"ids": torch.zeros(batch, length), "mask": torch.ones(batch, length, length)})
    assert plan(planner, {"ids": torch.zeros(batch, other), "mask": torch.ones(batch, other, other)}) is first


@given(batch=batches, data=st.data())
def test_lists_of_samples_of_any_shape_share_a_plan(batch: int, data: st.DataObject) -> None:
    lengths = st.lists(st.integers(batch + 1, 30), min_size=batch, max_size=batch)
    planner = Planner(2)
    plans = [
        plan(planner, {"y": torch.zeros(batch), "images": [torch.zeros(size, 3) for size in data.draw(lengths)]})
        for _ in range(3)
    ]
    assert plans[0] is plans[1] is plans[2]


# Leaves that do not fit

Wrap = Callable[[Any, Any], tuple[Any, Any]]
"""Builds a container with a value and something else; returns it and the key of the value."""

WRAPS: list[Wrap] = [
    lambda value, other: ({"odd": value, "even": other}, "odd"),
    lambda value, other: ({"even": other, 7: value}, 7),
    lambda value, other: ((other, value), 1),
    lambda value, other: (Pair(value, other), "left"),
    lambda value, other: (Plain(other, value), "right"),
    lambda value, other: (Frozen(value, other), "left"),
    lambda value, other: ([value], 0),
]


def _nested(size: int, width: int, layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this is a prototype
        return torch.nested.nested_tensor([torch.zeros(1 + row % 3, width) for row in range(size)], layout=layout)


ODD: list[Callable[[int, int], Tensor]] = [
    torch.zeros,
    lambda size, width: _nested(size, width, torch.strided),
    lambda size, width: _nested(max(size, 1), width, torch.jagged),  # torch has no empty ones
    lambda size, width: torch.zeros(size, width).to_sparse(),
]
"""Tensors of every layout that can be split."""


@st.composite
def misfits(draw: st.DrawFn) -> tuple[dict[str, Any], str, Tensor]:
    """A structure with one leaf that does not fit, its path, and the leaf."""
    batch = draw(batches)
    size = draw(st.integers(0, 12).filter(lambda size: size not in (1, batch)))
    odd = draw(st.sampled_from(ODD))(size, draw(st.integers(0, 3).filter(lambda width: width != batch)))
    value: Any = odd
    keys: list[Any] = []
    for wrap in draw(st.lists(st.sampled_from(WRAPS), max_size=4)):
        other = draw(leaves(batch))(slice(0, batch))
        assume(not isinstance(other, list) or len(other) != size)  # two leaves of that size could be the batch
        value, key = wrap(value, other)
        keys.insert(0, key)
    return {"x": torch.zeros(batch, 2), "more": value}, ".".join(map(str, ["more", *keys])), odd


@given(case=misfits(), parts=st.integers(2, 4))
def test_the_error_names_the_leaf_that_does_not_fit(case: tuple[dict[str, Any], str, Tensor], parts: int) -> None:
    value, path, odd = case
    with pytest.raises(StructureError) as caught:
        split(value, parts)
    message = str(caught.value)
    size = odd.size(0)
    what = f"nested {type(odd).__name__} of {size}" if odd.is_nested else f"Tensor {list(odd.shape)}"
    assert f"{path!r} ({what})" in message
    assert f"for a batch of {len(value['x'])}" in message
    dense = odd.layout is torch.strided and not odd.is_nested
    assert (f"dim 0 has size {size}" if dense else f"it holds {size} samples") in message
    assert re.search(rf"what {path!r} is: None if|None for {path!r} if", message)


@given(case=misfits(), parts=st.integers(2, 4))
def test_the_suggested_in_dims_work(case: tuple[dict[str, Any], str, Tensor], parts: int) -> None:
    value, path, odd = case
    found = split(value, parts, in_dims={path: None})
    for part in found:
        unsplit = [tensor for tensor in _tensors(part["more"]) if tensor is odd]
        assert unsplit == [odd]


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


@given(case=cases(), parts=st.integers(2, 4), size=st.integers(8, 12))
def test_a_declared_list_of_samples_determines_the_batch_size(
    case: tuple[int, Blueprint], parts: int, size: int
) -> None:
    batch, blueprint = case
    value = {**blueprint(slice(0, batch)), "names": [f"{index}" for index in range(size)]}
    assert split(value, parts)[0]["names"] is value["names"]
    with pytest.raises(StructureError, match=f"(?s)for a batch of {size}.*'names': list of {size}"):
        split(value, parts, in_dims={"names": "samples"})


def test_equal_structures_compare_equal_and_others_do_not() -> None:
    assert_same({"a": [torch.ones(2)]}, {"a": [torch.ones(2)]})
    for other in ({"a": (torch.ones(2),)}, {"a": [torch.zeros(2)]}, {"a": [torch.ones(2, requires_grad=True)]}):
        with pytest.raises(AssertionError):
            assert_same({"a": [torch.ones(2)]}, other)
