"""A part equals the structure built from its samples, and merge undoes split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instep.errors import MergeError
from instep.structure.merge import Merger, merge
from instep.structure.sizes import balanced_sizes
from instep.structure.split import split

from .strategies import Blueprint, anchors, assert_same, blueprints, pairs_of_tensors, slices

batches = st.integers(2, 7)


@st.composite
def cases(draw: st.DrawFn, lists: bool = True) -> tuple[int, Blueprint]:
    batch = draw(batches)
    return batch, draw(blueprints(batch, lists))


@given(case=cases(), parts=st.integers(1, 5))
def test_a_part_equals_the_structure_of_its_samples(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    found = split(blueprint(slice(0, batch)), parts)
    assert sum(found.sizes) == batch
    assert len(found) == len(found.sizes) == min(batch, parts)
    for part, rows in zip(found, slices(found.sizes), strict=True):
        assert_same(part, blueprint(rows))


@given(case=cases(), parts=st.integers(1, 5))
def test_merge_undoes_split(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    value = blueprint(slice(0, batch))
    assert_same(merge(split(value, parts)), value)


@given(case=cases(), parts=st.integers(1, 5))
def test_split_does_not_change_the_value(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    value, again = blueprint(slice(0, batch)), blueprint(slice(0, batch))
    merge(split(value, parts))
    assert_same(value, again)


@given(case=cases(), parts=st.integers(2, 5))
def test_gradients_flow_through_split_and_merge(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    value = blueprint(slice(0, batch))
    merged = merge(split(value, parts))
    for original, joined in pairs_of_tensors(value, merged):
        if original.requires_grad:
            weight = torch.arange(original.numel()).reshape(original.shape).to(original.dtype)
            (gradient,) = torch.autograd.grad((joined * weight).sum().real, original)
            assert torch.equal(gradient, weight)


@given(case=cases(lists=False), parts=st.integers(2, 5))
def test_outputs_are_merged_to_the_whole_or_raise(case: tuple[int, Blueprint], parts: int) -> None:
    """Outputs come without the plan of a split. The merger must return the whole value or raise."""
    batch, blueprint = case
    value = blueprint(slice(0, batch))
    found = split(value, parts)
    try:
        merged = Merger.from_options().merge(list(found), found.sizes)
    except MergeError:
        return
    assert_same(merged, value)


@given(case=cases(), parts=st.integers(2, 5))
def test_merging_is_deterministic(case: tuple[int, Blueprint], parts: int) -> None:
    batch, blueprint = case
    found = split(blueprint(slice(0, batch)), parts)
    merger = Merger.from_options()

    def outcome(merger: Merger) -> Any:
        try:
            return merger.merge(list(found), found.sizes)
        except MergeError as error:
            return str(error)

    first, again = outcome(merger), outcome(merger)
    assert_same(first, again)
    assert_same(first, outcome(Merger.from_options()))


@given(batch=batches, parts=st.integers(1, 5), dim=st.integers(-2, 2), names=st.booleans(), data=st.data())
def test_any_dim_can_be_the_batch_dim(batch: int, parts: int, dim: int, names: bool, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    shape.insert(dim % 3, batch)
    value: Any = {"x": torch.randn(shape), "y": (torch.randn(shape, dtype=torch.float64),)}
    if names:
        value["names"] = [f"sample {index}" for index in range(batch)]
    found = split(value, parts, dim)
    for part, rows in zip(found, slices(found.sizes), strict=True):
        assert torch.equal(part["x"], value["x"].movedim(dim, 0)[rows].movedim(0, dim))
        assert not names or part["names"] == value["names"][rows]
    assert_same(merge(found), value)
    assert_same(merge(list(found), found.sizes, dim=dim, out_dims={"x": dim, "y": dim}), value)


@given(batch=st.integers(0, 200), replicas=st.integers(1, 20), least=st.integers(1, 9))
def test_sizes_are_balanced(batch: int, replicas: int, least: int) -> None:
    sizes = balanced_sizes(batch, replicas, least)
    assert sum(sizes) == batch
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert 1 <= len(sizes) <= replicas
    assert len(sizes) == 1 or min(sizes) >= least
    assert len(sizes) == replicas or (len(sizes) + 1) * least > batch


@pytest.mark.parametrize("batch", [0, 1])
@given(data=st.data(), parts=st.integers(1, 5))
def test_batches_of_zero_and_one_sample_give_one_part(batch: int, data: st.DataObject, parts: int) -> None:
    tensor: Tensor = data.draw(anchors(batch))(slice(0, batch))
    value = {"x": tensor, "names": ["a"] * batch, "scale": 2.0}
    found = split(value, parts)
    assert found.sizes == (batch,)
    assert_same(found[0], value)
    assert_same(merge(found), value)
