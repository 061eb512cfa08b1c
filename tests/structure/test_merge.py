"""The merging table, row by row: joined where the batch can be seen, refused where it would be a guess."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import instep
from instep.errors import MergeError, StructureError
from instep.structure.merge import Merger, merge

from .merge_helpers import SIZES, refused

# Tensors and arrays


def test_tensors_are_joined_along_the_batch() -> None:
    x, y = torch.randn(3, 4), torch.randn(2, 4)
    assert torch.equal(merge([x, y], SIZES), torch.cat([x, y]))
    assert torch.equal(merge([x, y]), torch.cat([x, y]))
    a, b = np.zeros((3, 4)), np.ones((2, 4))
    assert np.array_equal(merge([a, b], SIZES), np.concatenate([a, b]))


def test_the_dim_whose_size_is_the_shards() -> None:
    assert merge([torch.zeros(7, 3, 4), torch.zeros(7, 2, 4)], SIZES).shape == (7, 5, 4)
    assert merge([np.zeros((7, 3)), np.zeros((7, 2))], SIZES).shape == (7, 5)
    assert merge([torch.zeros(2, 7), torch.zeros(2, 7)], [2, 2]).shape == (4, 7)
    assert "two dims" not in refused([torch.zeros(7, 4), torch.zeros(7, 4)])


def test_the_usual_dim_comes_first() -> None:
    assert merge([torch.zeros(2, 2), torch.zeros(2, 2)], [2, 2]).shape == (4, 2)
    assert merge([torch.zeros(2, 2), torch.zeros(2, 2)], [2, 2], dim=1).shape == (2, 4)
    assert merge([torch.zeros(2, 2), torch.zeros(2, 2)], [2, 2], dim=-1).shape == (2, 4)
    assert merge([torch.zeros(4, 3), torch.zeros(4, 2)], SIZES, dim=-1).shape == (4, 5)


def test_the_dim_that_was_seen_decides_when_two_fit() -> None:
    merger = Merger.from_options()
    assert merger.merge([torch.zeros(7, 3), torch.zeros(7, 2)], SIZES).shape == (7, 5)
    assert merger.merge([torch.zeros(3, 3), torch.zeros(3, 2)], SIZES).shape == (3, 5)
    assert merger.merge([torch.zeros(2, 2), torch.zeros(2, 2)], [2, 2]).shape == (2, 4)
    assert merger.merge([torch.zeros(2, 9), torch.zeros(2, 9)], [2, 2]).shape == (4, 9)


def test_declared_dims() -> None:
    parts = [{"h": torch.zeros(2, 2, 9), "y": torch.zeros(2)} for _ in range(2)]
    assert merge(parts, [2, 2], out_dims={"h": 1})["h"].shape == (2, 4, 9)
    assert merge(parts, [2, 2], out_dims={"h": -2})["h"].shape == (2, 4, 9)
    assert merge(parts, [2, 2], out_dims={"h": None})["h"] is parts[0]["h"]
    tuples = [tuple(part.values()) for part in parts]
    assert merge(tuples, [2, 2], out_dims=(1, 0))[0].shape == (2, 4, 9)
    assert merge(tuples, [2, 2], out_dims={0: 1})[0].shape == (2, 4, 9)
    assert merge([{"d": part} for part in parts], [2, 2], out_dims={"d.h": 1})["d"]["h"].shape == (2, 4, 9)
    assert merge([{"d": part} for part in parts], [2, 2], out_dims={"d": {"h": 1}})["d"]["h"].shape == (2, 4, 9)
    assert merge([torch.zeros(3, 2), torch.zeros(3, 2)], [2, 2], out_dims=1).shape == (3, 4)
    with pytest.raises(StructureError, match="out_dims contains 'last'"):
        merge(parts, [2, 2], out_dims={"h": "last"})


def test_a_declared_dim_that_is_not_there() -> None:
    message = refused([{"h": torch.zeros(2, 3)}, {"h": torch.zeros(2, 4)}], [2, 2], out_dims={"h": 0})
    assert "'h': tensors of shapes [[2, 3], [2, 4]] cannot be concatenated along dim 0" in message
    assert "cannot be concatenated" in refused([torch.zeros(2), torch.zeros(2)], [2, 2], out_dims=1)
    assert "cannot be concatenated" in refused([torch.zeros(2), torch.zeros(2, 1)], [2, 2], out_dims=0)


def test_a_declared_dim_leaves_words_joined() -> None:
    parts = [{"y": torch.zeros(2, 3), "names": ["a", "b"]}, {"y": torch.zeros(2, 3), "names": ["c", "d"]}]
    assert merge(parts, [2, 2], out_dims=0)["names"] == ["a", "b", "c", "d"]


def test_gradients_flow() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    merge([x[:3] * 2, x[3:] * 3], SIZES).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [2, 2, 2, 3, 3]


def test_shapes_that_do_not_fit() -> None:
    assert "[[3, 4], [2, 5]]" in refused([torch.zeros(3, 4), torch.zeros(2, 5)])
    assert "[[3], [2, 1]]" in refused([torch.zeros(3), torch.zeros(2, 1)])
    assert "[[], [1]]" in refused([torch.zeros(()), torch.zeros(1)])


def test_two_dims_that_follow_the_batch() -> None:
    assert "compute it outside forward" in refused([torch.zeros(3, 3), torch.zeros(2, 2)])


def test_the_same_object_is_one_value() -> None:
    weights, size = torch.zeros(2, 3), [224, 224]
    found = merge([{"w": weights, "size": size}, {"w": weights, "size": size}], [2, 2])
    assert found["w"] is weights
    assert found["size"] is size


# Scalars


def test_an_equal_scalar_is_a_constant() -> None:
    first = torch.tensor(True)
    assert merge([first, torch.tensor(True)], SIZES) is first
    assert merge([torch.tensor(2.5), torch.tensor(2.5)], SIZES) == 2.5
    assert math.isnan(merge([torch.tensor(math.nan), torch.tensor(math.nan)], SIZES))
    assert merge([torch.tensor(math.inf), torch.tensor(math.inf)], SIZES) == math.inf


def test_equal_integers_prove_nothing() -> None:
    assert "a constant or a count, which is equal here (2, 2)" in refused([torch.tensor(2), torch.tensor(2)])
    assert "a constant or the number of samples (3, 2)" in refused([3, 2])
    assert "a constant or the number of samples (2, 2)" in refused([2, 2], [2, 2])
    assert merge([7, 7], SIZES) == 7
    assert merge([torch.tensor(2), torch.tensor(2)], SIZES, merge="sum") == 4
    assert "hold the size of a shard" in refused([torch.Size([3, 4]), torch.Size([2, 4])])
    assert merge([torch.Size([5, 4]), torch.Size([5, 4])], SIZES) == torch.Size([5, 4])


def test_an_unequal_scalar_is_refused() -> None:
    assert "differs between replicas (1.0, 2.0)" in refused([torch.tensor(1.0), torch.tensor(2.0)])
    assert "differs between replicas (2, 2.0)" in refused([torch.tensor(2), torch.tensor(2.0)])
    assert "(0, 1, 2, 3, ...)" in refused([torch.tensor(n) for n in range(5)], [1] * 5)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e30, math.inf])
def test_an_equal_scalar_has_the_gradient_of_a_mean_and_of_a_constant(value: float) -> None:
    parts = [torch.tensor(value, requires_grad=True) for _ in range(3)]
    found = merge(parts, [4, 3, 3])
    assert found == value
    gradients = torch.autograd.grad(found, parts)
    assert [round(float(gradient), 6) for gradient in gradients] == [0.4, 0.3, 0.3]


def test_a_scalar_that_some_replicas_detached() -> None:
    part = torch.tensor(2.0, requires_grad=True)
    merge([torch.tensor(2.0), part], SIZES).backward()
    assert part.grad is not None
    assert float(part.grad) == pytest.approx(0.4)


# Numbers, strings, None


@pytest.mark.parametrize("value", [3, 2.5, True, "text", b"text", 1j, np.float32(2), np.int64(2), math.nan])
def test_equal_values(value: Any) -> None:
    found = merge([{"v": value}, {"v": value}], SIZES)["v"]
    assert found is value
    other = type(value)(value)
    assert type(merge([(value,), (other,)], SIZES)[0]) is type(value)


def test_unequal_values_are_refused() -> None:
    assert "'v': a value that differs between replicas (1, 2)" in refused([{"v": 1}, {"v": 2}])
    assert "'v': a value that differs between replicas ('a', 'b')" in refused([{"v": "a"}, {"v": "b"}])
    assert "differs" in refused([np.array(1), np.array(2)])
    assert merge([np.array(1), np.array(1)], SIZES) == 1
    assert merge([1, 1.0], SIZES) == 1


def test_none_on_some_replicas_is_merged_from_the_rest() -> None:
    parts = [{"y": None, "s": None, "all": None}, {"y": torch.zeros(2, 4), "s": "a", "all": None}]
    found = merge(parts, SIZES)
    assert found["y"].shape == (2, 4)
    assert (found["s"], found["all"]) == ("a", None)
    three = [{"y": torch.zeros(3)}, {"y": None}, {"y": torch.zeros(1)}]
    assert merge(three, [3, 2, 1])["y"].shape == (4,)
    assert merge([{"l": None}, {"l": torch.tensor(2.0)}], SIZES, merge={"l": "mean"})["l"] == 2
    losses = [{"l": torch.tensor(1.0)}, {"l": None}, {"l": torch.tensor(5.0)}]
    assert merge(losses, [3, 9, 1], merge={"l": "mean"})["l"] == 2
    assert merge([None, None], SIZES) is None


def test_one_part_is_itself() -> None:
    output = {"loss": torch.tensor(1.0), "thing": object()}
    assert merge([output], [4]) is output


# Lists and tuples


def test_a_list_as_long_as_its_shard_is_joined() -> None:
    assert merge([["a", "b", "c"], ["d", "e"]], SIZES) == ["a", "b", "c", "d", "e"]
    assert merge([("a", "b", "c"), ("d", "e")], SIZES) == ("a", "b", "c", "d", "e")
    assert merge([[1, 2], [3, 4]], [2, 2]) == [1, 2, 3, 4]
    boxes = [[{"boxes": torch.zeros(n, 4)} for n in counts] for counts in ((5, 0, 2), (1, 7))]
    assert [len(found["boxes"]) for found in merge(boxes, SIZES)] == [5, 0, 2, 1, 7]
    assert merge([[], []], [0, 0]) == []


def test_a_list_of_another_length_is_a_structure() -> None:
    found = merge([[torch.zeros(3), torch.zeros(3)], [torch.ones(2), torch.ones(2)]], SIZES)
    assert [tensor.tolist() for tensor in found] == [[0, 0, 0, 1, 1]] * 2
    assert merge([[1, "a"], [1, "a"]], SIZES) == [1, "a"]
    assert "lists of [4, 3] entries" in refused([["a"] * 4, ["b"] * 3])


def test_a_tuple_with_tensors_is_a_structure() -> None:
    """As many layers as samples, a tuple of keys and values each: cut and joined by layer."""
    parts = [tuple((torch.zeros(2, 4), torch.zeros(2, 4)) for _ in range(2)) for _ in range(2)]
    found = merge(parts, [2, 2])
    assert [[tensor.shape for tensor in layer] for layer in found] == [[(4, 4), (4, 4)]] * 2


def test_a_list_that_fits_both_ways_is_refused() -> None:
    layers = [[torch.zeros(2, 9), torch.zeros(2, 9)] for _ in range(2)]
    message = refused([{"f": part} for part in layers], [2, 2])
    assert "'list' for the output 'f' if it has one entry per sample" in message
    assert "'cat' for its entries ('f.*')" in message
    for inner in (lambda t: {"k": t}, lambda t: (t, "text"), lambda t: [t]):
        parts = [[inner(tensor) for tensor in part] for part in layers]
        assert "one entry per sample" in refused(parts, [2, 2])
    assert "one entry per sample" in refused([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], [2, 2])


def test_a_reading_stays() -> None:
    merger = Merger.from_options()
    layers = [[torch.zeros(n, 9), torch.zeros(n, 9)] for n in (3, 3)]
    assert len(merger.merge(layers, [3, 3])) == 2
    assert len(merger.merge([[torch.zeros(2, 9)] * 2, [torch.zeros(2, 9)] * 2], [2, 2])) == 2
    merger = Merger.from_options()
    assert len(merger.merge([[torch.zeros(5), torch.zeros(7)], [torch.zeros(8)]], [2, 1])) == 3
    assert len(merger.merge([[torch.zeros(2)] * 2, [torch.zeros(2)] * 2], [2, 2])) == 4
    with pytest.raises(MergeError, match="read before as one entry per sample"):
        merger.merge([[torch.zeros(3)] * 2, [torch.zeros(3)] * 2], [3, 3])


def test_out_dims_choose_a_reading() -> None:
    layers = [{"f": [torch.zeros(2, 9), torch.zeros(2, 9)]} for _ in range(2)]
    assert len(merge(layers, [2, 2], out_dims={"f": "samples"})["f"]) == 4
    assert [len(tensor) for tensor in merge(layers, [2, 2], out_dims={"f": 0})["f"]] == [4, 4]
    assert [len(tensor) for tensor in merge(layers, [2, 2], out_dims={"f.*": 0})["f"]] == [4, 4]


def test_rules_for_other_outputs_leave_a_list_a_column() -> None:
    assert merge([["a", "b"], ["c", "d"]], [2, 2], merge={"loss": "mean"}) == ["a", "b", "c", "d"]


# The merger


def test_the_merger_reports_what_it_did_at_each_path() -> None:
    merger = Merger.from_options({"loss": "mean", "top": max})
    outputs: list[dict[str, Any]] = [
        {"loss": torch.tensor(1.0), "top": 1, "y": torch.zeros(n, 2), "names": ["a"] * n, "k": 3.0 + 0 * n}
        for n in SIZES
    ]
    merger.merge(outputs, SIZES)
    assert {path[0]: what for path, what in merger.actions.items()} == {
        "loss": "rule mean",
        "top": "rule max",
        "y": "concatenated along dim 0",
        "names": "concatenated, one entry per sample",
        "k": "equal on every replica",
    }
    merger.merge([torch.zeros(3), torch.zeros(2)], SIZES)
    assert list(merger.actions) == [()]


def test_parts_and_sizes_must_match() -> None:
    assert "2 parts and 3 sizes" in refused([1, 1], [1, 1, 1])
    with pytest.raises(MergeError, match="no parts"):
        merge([])


def test_sizes_are_seen_where_they_can_be() -> None:
    assert merge([{"id": ["a", "b"]}, {"id": ["c"]}]) == {"id": ["a", "b", "c"]}
    found = merge([{"n": 1, "f": [torch.zeros(4), torch.zeros(5)]}, {"n": 1, "f": [torch.zeros(6)]}])
    assert len(found["f"]) == 3
    with_tensor = [{"f": [torch.zeros(3, 1), torch.zeros(3, 2)], "y": torch.zeros(3)} for _ in range(2)]
    assert [len(tensor) for tensor in merge(with_tensor)["f"]] == [6, 6]
    assert merge(["a", "a"]) == "a"


def test_lists_as_long_as_their_tensors_have_two_different_rules() -> None:
    parts = [[torch.zeros(2), torch.ones(2)] for _ in range(2)]
    with pytest.raises(instep.MergeError) as caught:
        instep.merge(parts)
    assert "'list' for the output if it has one entry per sample, or 'cat' for its entries ('*')" in str(caught.value)
    assert len(instep.merge(parts, merge="list")) == 4
    assert [entry.tolist() for entry in instep.merge(parts, merge={"*": "cat"})] == [[0.0] * 4, [1.0] * 4]


def test_merging_what_was_split_takes_rules_too() -> None:
    parts = instep.split({"x": torch.arange(5), "n": 2}, 2)
    found = instep.merge(parts, merge={"n": "sum"})
    assert (found["x"].tolist(), found["n"]) == ([0, 1, 2, 3, 4], 4)


def test_meta_tensors_are_joined_by_shape_alone() -> None:
    parts = [torch.zeros(3, 2, device="meta"), torch.zeros(2, 2, device="meta")]
    found: Tensor = merge(parts, SIZES)
    assert found.is_meta
    assert found.shape == (5, 2)
