"""Every error gives the path, both sides, and what to decide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import instep
from instep.errors import MergeError, StructureError
from instep.structure.plan import Planner
from instep.structure.split_messages import summarize


def split_error(in_dims: Any = "auto", /, **arguments: Any) -> str:
    with pytest.raises(StructureError) as caught:
        Planner(2, in_dims=in_dims).plan(tuple(arguments), tuple(arguments.values()))
    return str(caught.value)


def merge_error(parts: list[Any], sizes: list[int], **options: Any) -> str:
    with pytest.raises(MergeError) as caught:
        instep.merge(parts, sizes, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), "Tensor [2, 3]"),
        (np.zeros(4), "ndarray [4]"),
        ([1, 2], "list of 2"),
        ((1,), "tuple of 1"),
        ({}, "dict of 0"),
        ("text", "str"),
    ],
)
def test_a_value_in_a_few_words(value: Any, words: str) -> None:
    assert summarize(value) == words


def test_a_misfit_word_for_word() -> None:
    message = split_error(x=torch.zeros(8, 3), batch={"h": torch.zeros(2, 8), "y": [1, 2, 3]})
    assert message.splitlines() == [
        "cannot split argument 'batch.h' (Tensor [2, 8]) for a batch of 8: dim 0 has size 2.",
        "Sizes found: 'x': size 8 along dim 0; 'batch.h': size 2 along dim 0; 'batch.y': list of 3.",
        "Say with in_dims what 'batch.h' is: None if every replica gets all of it (or pass instep.whole(...)), 1 if "
        "the batch is dim 1, which has size 8.",
    ]


def test_the_leaf_that_stands_out_is_named_not_the_many() -> None:
    many = {f"x{index}": torch.zeros(8) for index in range(3)}
    assert "'odd' (Tensor [5])" in split_error(odd=torch.zeros(5), **many)
    assert "'w' (Tensor [3])" in split_error(x=torch.zeros(8), w=torch.zeros(3))
    assert "'w' (Tensor [3])" in split_error(pos=torch.zeros(1, 5), x=torch.zeros(8), w=torch.zeros(3))


def test_a_tuple_of_samples_gets_a_hint() -> None:
    images = tuple(torch.zeros(3, 8, 8) for _ in range(4))
    targets = tuple({"boxes": torch.zeros(n, 4)} for n in (1, 2, 5, 6))
    message = split_error(images=images, targets=targets)
    assert "'samples' for 'targets' if it has one entry per sample" in message
    message = split_error({"targets": "samples"}, images=images, targets=targets)
    assert "'samples' for 'images' if it has one entry per sample" in message
    plan = Planner(2, in_dims={"targets": "samples", "images": "samples"}).plan(
        ("images", "targets"), (images, targets)
    )
    assert plan.batch_size == 4


def test_a_long_list_of_sizes_is_cut_short() -> None:
    message = split_error(x=[torch.zeros(n) for n in range(2, 40)], y=torch.zeros(50), z=torch.zeros(51))
    assert "and 29 more" in message
    assert len(message) < 1500


def test_readings_word_for_word() -> None:
    assert split_error(f=[torch.zeros(2, 3), torch.zeros(2, 5)]).splitlines() == [
        "cannot determine how to split argument 'f' (list of 2): it may have one entry per sample or be a structure of "
        "batched leaves.",
        "Say with in_dims what 'f' is: 'samples' if it has one entry per sample, 0 if every entry has the batch in dim "
        "0.",
    ]


def test_sizes_in_doubt_word_for_word() -> None:
    assert split_error(a=["x", "y"], b=["x", "y", "z"]).splitlines() == [
        "cannot determine the batch size: 2 and 3 both match every argument.",
        "Say with in_dims which it is: 'samples' for 'a' if the batch has 2 samples (list of 2), 'samples' for 'b' if "
        "the batch has 3 samples (list of 3).",
    ]
    assert "2 and 3 and 4 all match" in split_error(a=["x"] * 2, b=["x"] * 3, c=["x"] * 4)


def test_message_for_a_loss() -> None:
    parts = [{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(2.0)}]
    assert merge_error(parts, [3, 2]).splitlines() == [
        "cannot merge the output 'loss': a 0-d tensor that differs between replicas (1.0, 2.0), from shards of [3, 2] "
        "samples.",
        "Set a rule:  merge={'loss': ...}  with 'mean', 'sum', 'max', 'min', 'stack', 'list', 'first', 'drop',",
        "  instep.weighted_by(...) for a mean over other things than samples, or a function (parts, sizes) -> value.",
    ]


def test_an_output_without_a_name() -> None:
    message = merge_error([torch.tensor(1.0), torch.tensor(2.0)], [3, 2])
    assert message.startswith("cannot merge the output: a 0-d tensor")
    assert "merge=...  with 'mean'" in message


def test_shapes_are_shown() -> None:
    message = merge_error([{"y": torch.zeros(3, 4)}, {"y": torch.zeros(2, 5)}], [3, 2])
    assert "the output 'y': tensors of shapes [[3, 4], [2, 5]], from shards of [3, 2] samples" in message
    assert "merge={'y': ...}  with 'cat', 'pad', 'nested', 'list'" in message
    assert "all_gather" not in message


def test_message_for_two_batch_dims() -> None:
    message = merge_error([{"sim": torch.zeros(3, 3)}, {"sim": torch.zeros(2, 2)}], [3, 2])
    assert "compute it outside forward" in message


def test_message_for_different_keys() -> None:
    parts = [{"out": {"a": 1, "b": 2}}, {"out": {"a": 1, "c": 2}}]
    assert merge_error(parts, [3, 2]).splitlines() == [
        "cannot merge the output 'out': the first replica has the entries ['a', 'b'], replica 1 has no ['b'] and "
        "also has ['c'], from shards of [3, 2] samples.",
        "Always return the same entries, with None for missing values, or set a rule:",
        "  merge={'out': ...}  with 'list', 'first', 'drop' or a function (parts, sizes) -> value.",
    ]


def test_message_for_an_ambiguous_list() -> None:
    parts = [{"f": [torch.zeros(2, 3), torch.zeros(2, 3)]}, {"f": [torch.zeros(2, 3), torch.zeros(2, 3)]}]
    assert merge_error(parts, [2, 2]).splitlines() == [
        "cannot determine how to merge the output 'f': on each replica, both the list and its entries have the size of "
        "the shard.",
        "Set a merge rule: 'list' for the output 'f' if it has one entry per sample, or 'cat' for its entries ('f.*') "
        "if they are batched in dim 0.",
    ]
    assert len(instep.merge(parts, [2, 2], merge={"f": "list"})["f"]) == 4
    assert [len(t) for t in instep.merge(parts, [2, 2], merge={"f.*": "cat"})["f"]] == [4, 4]


def test_lists_without_sizes() -> None:
    parts = [[torch.zeros(3, 2), torch.zeros(3)], [torch.zeros(2, 2), torch.zeros(2)]]
    with pytest.raises(MergeError) as caught:
        instep.merge(parts)
    assert "merge(parts, [2, 2])   # one entry per sample" in str(caught.value)
    assert "merge(parts, [3, 2])   # a structure of batched tensors" in str(caught.value)
    assert [len(tensor) for tensor in instep.merge(parts, [3, 2])] == [5, 5]
    assert len(instep.merge(parts, [2, 2], merge="list")) == 4


def test_an_unknown_type() -> None:
    class Thing:
        pass

    message = merge_error([{"it": Thing()}, {"it": Thing()}], [1, 1])
    assert "the output 'it': Thing is not a registered type" in message
    assert "instep.register(Thing, size=" in message
    assert "merge={'it': ...}  with 'first'" in message


def test_different_types() -> None:
    message = merge_error([{"y": torch.zeros(2)}, {"y": "none"}], [2, 2])
    assert "'y': the replicas returned different types, ['Tensor', 'str']" in message


@pytest.mark.parametrize("rule", ["avg", "", None, 3, ("pad",), ("mean", 2), ("pad", 1, 2), {"a": "mean"}, ["mean"]])
def test_an_unknown_rule_is_refused_when_it_is_given(rule: Any) -> None:
    with pytest.raises(MergeError, match="there is no merge rule"):
        instep.merge([torch.zeros(1)], [1], merge={"loss": rule})
