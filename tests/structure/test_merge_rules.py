"""Every merge rule by name, weights of one's own, functions and patterns."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import instep
from instep.errors import MergeError
from instep.structure.merge import Merger
from instep.structure.merge_rules import check_rule, find_rule, is_leaf_rule, weighted_by

SIZES = [3, 1]


def merged(rule: Any, *parts: Any, sizes: Sequence[int] = SIZES, **options: Any) -> Any:
    """What a rule makes of the parts of the output `it`."""
    outputs = [{"it": part} for part in parts]
    return instep.merge(outputs, sizes, merge={"it": rule}, **options)["it"]


def refused(rule: Any, *parts: Any, **options: Any) -> str:
    with pytest.raises(MergeError) as caught:
        merged(rule, *parts, **options)
    return str(caught.value)


one, five = torch.tensor(1.0), torch.tensor(5.0)


# By name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rules_of_numbers_do_not_apply_to_nested_tensors(layout: torch.layout) -> None:
    parts = [
        torch.nested.nested_tensor([torch.ones(n, 2) for n in sizes], layout=layout) for sizes in ((2, 1, 3), (4,))
    ]
    assert "'it': a mean does not apply to a nested" in refused("mean", *parts)
    for rule in ("sum", "pad"):
        assert f"the rule {rule!r} does not apply to tensors of shapes [[3, '*', " in refused(rule, *parts)
    assert merged("nested", *parts).size(0) == 4


def test_cat() -> None:
    x, y = torch.zeros(2, 3), torch.ones(4, 3)
    assert merged("cat", x, y).shape == (6, 3)
    assert merged(("cat", 1), x, x).shape == (2, 6)
    assert merged("cat", torch.zeros(3, 2), torch.zeros(3, 4), dim=1).shape == (3, 6)
    assert merged("cat", torch.zeros(3, 2), torch.zeros(3, 4), out_dims={"it": 1}).shape == (3, 6)
    assert merged("cat", np.zeros(2), np.ones(1)).tolist() == [0, 0, 1]
    assert "'it': the rule 'cat' does not apply to tensors of shapes [[], []]" in refused("cat", one, five)
    assert "the rule 'cat' does not apply to a str" in refused("cat", "a", "b")


def test_stack() -> None:
    assert merged("stack", one, five).tolist() == [1, 5]
    assert merged(("stack", 1), torch.zeros(3), torch.ones(3)).shape == (3, 2)
    assert "shapes [[2], [3]]" in refused("stack", torch.zeros(2), torch.zeros(3))


def test_mean_is_weighted_by_size() -> None:
    assert merged("mean", one, five) == 2
    assert merged("mean", torch.zeros(2), torch.ones(2)).tolist() == [0.25, 0.25]
    assert merged("mean", np.zeros(2), np.ones(2)).tolist() == [0.25, 0.25]
    assert merged("mean", 1.0, 5.0) == 2
    assert merged("mean", 1, 5) == 2
    assert merged("mean", torch.tensor(1), torch.tensor(5)) == 2
    assert merged("mean", torch.tensor(True), torch.tensor(False)) == 0.75
    assert merged("mean", np.float32(1), np.float32(5)) == 2
    assert "a mean does not apply to tensors of shapes [[2], [3]]" in refused("mean", torch.zeros(2), torch.zeros(3))
    assert "a mean does not apply to a str" in refused("mean", "a", "b")


def test_mean_has_the_gradient_of_the_mean_over_samples() -> None:
    x = torch.randn(4, requires_grad=True)
    merged("mean", x[:3].mean(), x[3:].mean()).backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, torch.full((4,), 0.25))


def test_a_part_of_no_weight_does_not_count_even_where_it_is_nan() -> None:
    assert merged("mean", torch.tensor(math.nan), five, sizes=[0, 2]) == 5
    assert math.isnan(merged("mean", torch.tensor(math.nan), five, sizes=[0, 0]))


def test_sum_max_min() -> None:
    for rule, number, wanted in (("sum", 6, [4, 3]), ("max", 5, [3, 2]), ("min", 1, [1, 1])):
        assert merged(rule, one, five) == number
        assert merged(rule, 1, 5) == number
        assert merged(rule, torch.tensor([1, 2]), torch.tensor([3, 1])).tolist() == wanted
        assert merged(rule, np.array([1, 2]), np.array([3, 1])).tolist() == wanted
        assert "the shapes have to be equal" in refused(rule, torch.zeros(2), torch.zeros(3))
        assert "does not apply to a str" in refused(rule, "a", "b")


def test_a_number_beside_tensors_counts_as_one() -> None:
    x = torch.tensor(4.0, requires_grad=True)
    for rule, wanted in (("mean", 3.0), ("sum", 4.0), ("max", 4.0), ("min", 0.0), (weighted_by("w"), 2.0)):
        outputs = [{"it": x, "w": 2}, {"it": 0.0, "w": 2}]
        found = instep.merge(outputs, SIZES, merge={"it": rule})["it"]
        assert isinstance(found, Tensor)
        assert found == wanted
        assert found.requires_grad


def test_unique() -> None:
    assert merged("unique", torch.tensor([3, 1, 3]), torch.tensor([2, 1])).tolist() == [1, 2, 3]
    assert merged("unique", torch.tensor([[1, 2], [0, 0]]), torch.tensor([[1, 2]])).tolist() == [[0, 0], [1, 2]]


def test_pad() -> None:
    short, long = torch.ones(3, 2, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)
    padded = merged("pad", short, long)
    assert padded.shape == (4, 4)
    assert padded.sum(1).tolist() == [2, 2, 2, 4]
    assert merged(("pad", -100), short, long)[0].tolist() == [1, 1, -100, -100]
    assert merged("pad", torch.ones(2, 1, 3), torch.ones(1, 2, 2)).shape == (3, 2, 3)
    assert merged("pad", torch.ones(2, 3), torch.ones(4, 1), dim=1).shape == (4, 4)
    assert merged(("pad", True), torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.bool)).sum() == 1
    assert merged(("pad", -1), np.ones((1, 2)), np.ones((1, 3))).tolist() == [[1, 1, -1], [1, 1, 1]]
    assert "does not apply to tensors of shapes [[2, 3], [2]]" in refused("pad", torch.zeros(2, 3), torch.zeros(2))


def test_pad_is_differentiable() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    merged("pad", x, torch.ones(1, 4)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1]] * 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested() -> None:
    found = merged("nested", torch.ones(3, 2), torch.ones(1, 4))
    assert found.is_nested
    assert [len(row) for row in found.unbind()] == [2, 2, 2, 4]


def test_list() -> None:
    assert merged("list", one, five) == [one, five]
    assert merged("list", ["a"], ["b", "c"]) == ["a", "b", "c"]
    assert merged("list", (1,), (2, 3)) == [1, 2, 3]
    assert merged("list", {"a": 1}, {"b": 2}) == [{"a": 1}, {"b": 2}]
    assert merged("list", None, one) == [None, one]
    Pair = namedtuple("Pair", ["left", "right"])
    assert merged("list", Pair(1, 2), Pair(3, 4)) == [Pair(1, 2), Pair(3, 4)]


def test_first_and_drop() -> None:
    thing = object()
    assert merged("first", thing, 2) is thing
    assert merged("first", {"a": 1}, {"b": 2}) == {"a": 1}
    assert merged("drop", thing, 2) is None
    assert merged("drop", {"a": 1}, {"b": 2}) is None


def test_a_function_of_parts_and_sizes() -> None:
    calls = []

    def rule(parts: list[Any], sizes: list[int]) -> Any:
        calls.append((parts, sizes))
        return max(parts)

    assert merged(rule, 1, 5) == 5
    assert calls == [([1, 5], [3, 1])]
    assert (
        merged(lambda parts, sizes: sum(p["n"] * s for p, s in zip(parts, sizes, strict=True)), {"n": 1}, {"n": 2}) == 5
    )


# Weights of one's own


def test_weighted_by_an_output() -> None:
    outputs = [{"loss": one, "aux": {"n": torch.tensor([2, 2])}}, {"loss": five, "aux": {"n": torch.tensor([12, 0])}}]
    rules = {"loss": weighted_by("aux.n"), "aux.n": "sum"}
    assert instep.merge(outputs, SIZES, merge=rules)["loss"] == 4
    listed = [{"loss": one, "n": [1, 1]}, {"loss": five, "n": [3, 3]}]
    assert instep.merge(listed, [2, 2], merge={"loss": weighted_by("n")})["loss"] == 4


def merged_with_inputs(rule: Any, inputs: list[dict[str, Any]]) -> Any:
    return Merger.from_options({"loss": rule}).merge([{"loss": one}, {"loss": five}], SIZES, inputs)["loss"]


def test_weighted_by_an_argument() -> None:
    inputs = [{"batch": {"mask": torch.tensor([1, 0, 0])}}, {"batch": {"mask": torch.tensor([1, 1, 1])}}]
    assert merged_with_inputs(weighted_by("batch.mask"), inputs) == 4


def test_weighted_by_a_function_of_the_arguments() -> None:
    inputs = [{"ids": None, "labels": torch.tensor([1, -100])}, {"ids": None, "labels": torch.tensor([1, 2, 3])}]
    valid = weighted_by(lambda labels: (labels != -100).sum())
    assert merged_with_inputs(valid, inputs) == 4
    assert merged_with_inputs(weighted_by(lambda labels, **_: (labels != -100).sum()), inputs) == 4
    assert merged_with_inputs(weighted_by(lambda **kwargs: len(kwargs["labels"])), inputs) == pytest.approx(3.4)


def test_weights_that_are_not_there() -> None:
    with pytest.raises(MergeError, match=r"'loss': weighted_by\('tokens'\) names no output and no argument"):
        instep.merge([{"loss": one}, {"loss": five}], SIZES, merge={"loss": weighted_by("tokens")})
    with pytest.raises(MergeError, match=r"'loss': weighted_by\(function\) needs the arguments"):
        instep.merge([{"loss": one}, {"loss": five}], SIZES, merge={"loss": weighted_by(len)})


def test_weights_belong_to_the_replicas_that_have_a_part() -> None:
    """The second replica has no loss: its weight must not slip to the third."""
    outputs = [{"deep": {"loss": one}, "n": 1}, {"deep": None, "n": 90}, {"deep": {"loss": five}, "n": 3}]
    rules = {"deep.loss": weighted_by("n"), "n": "sum"}
    assert instep.merge(outputs, [2, 2, 2], merge=rules) == {"deep": {"loss": 4}, "n": 94}
    inputs = [{"w": 1}, {"w": 90}, {"w": 3}]
    found = Merger.from_options({"deep.loss": weighted_by(lambda w: w), "n": "sum"}).merge(outputs, [2, 2, 2], inputs)
    assert found["deep"]["loss"] == 4


def test_token_means_are_exact() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 9, requires_grad=True), torch.tensor([1, -100, 3, 4, -100, -100])
    whole = torch.nn.functional.cross_entropy(logits, labels)
    (wanted,) = torch.autograd.grad(whole, logits)
    losses = [torch.nn.functional.cross_entropy(logits[rows], labels[rows]) for rows in (slice(0, 3), slice(3, 6))]
    inputs = [{"labels": labels[:3]}, {"labels": labels[3:]}]
    found = Merger.from_options(weighted_by(lambda labels: (labels != -100).sum())).merge(losses, [3, 3], inputs)
    assert torch.allclose(found, whole)
    assert torch.allclose(torch.autograd.grad(found, logits)[0], wanted)


# Where rules hold


def test_patterns() -> None:
    outputs = [{"aux": {"a": one, "b": one}, "x": torch.zeros(3)}, {"aux": {"a": five, "b": five}, "x": torch.zeros(1)}]
    assert instep.merge(outputs, SIZES, merge={"aux.*": "sum"})["aux"] == {"a": 6, "b": 6}
    assert instep.merge(outputs, SIZES, merge={"aux.a": "max", "aux.?": "min"})["aux"] == {"a": 5, "b": 1}
    assert instep.merge(outputs, SIZES, merge={"*.a": "max", "*.b": "first"})["aux"] == {"a": 5, "b": 1}


def test_a_leaf_rule_for_a_container_holds_below_it() -> None:
    outputs = [{"aux": {"a": one, "deep": (one, [one])}}, {"aux": {"a": five, "deep": (five, [five])}}]
    assert instep.merge(outputs, SIZES, merge={"aux": "mean"})["aux"] == {"a": 2, "deep": (2, [2])}
    assert instep.merge(outputs, SIZES, merge={"aux": "mean", "aux.a": "sum"})["aux"] == {"a": 6, "deep": (2, [2])}


def test_a_leaf_rule_makes_a_list_a_structure() -> None:
    """A loss for each of two layers is not one for each of two samples."""
    outputs = [{"losses": [one, five]}, {"losses": [five, one]}]
    for rules in ({"losses": "mean"}, {"losses.*": "mean"}, "mean"):
        assert instep.merge(outputs, [2, 2], merge=rules)["losses"] == [3, 3]


def test_indices_are_names() -> None:
    assert instep.merge([(one, "a"), (five, "a")], SIZES, merge={"0": "mean"}) == (2, "a")
    assert instep.merge([(one, "a"), (five, "a")], SIZES, merge={0: "mean"}) == (2, "a")


def test_one_rule_for_every_leaf() -> None:
    outputs = [
        {
            "loss": one,
            "n": 3,
            "flag": True,
            "note": "same",
            "names": ["a", "b", "c"],
            "deep": ({"k": one},),
            "no": None,
        },
        {"loss": five, "n": 1, "flag": True, "note": "same", "names": ["d"], "deep": ({"k": five},), "no": None},
    ]
    assert instep.merge(outputs, SIZES, merge="mean") == {
        "loss": 2,
        "n": 2.5,
        "flag": True,
        "note": "same",
        "names": ["a", "b", "c", "d"],
        "deep": ({"k": 2},),
        "no": None,
    }


def test_one_rule_for_every_leaf_leaves_what_it_does_not_fit_to_auto() -> None:
    outputs = [{"y": torch.zeros(3, 2), "n": 4, "d": {"s": "a"}}, {"y": torch.zeros(1, 5), "n": 4, "d": {"s": "a"}}]
    found = instep.merge(outputs, SIZES, merge="pad")
    assert found["y"].shape == (4, 5)
    assert (found["n"], found["d"]) == (4, {"s": "a"})
    # What is named is not left to auto.
    with pytest.raises(MergeError, match=r"'d\.s': a mean does not apply to a str"):
        instep.merge(outputs, SIZES, merge={"d": "mean", "y": "pad"})


def test_one_function_for_every_leaf() -> None:
    outputs = [{"a": one, "b": [1, "x"]}, {"a": five, "b": [2, "y"]}]
    found = instep.merge(outputs, SIZES, merge=lambda parts, sizes: parts[-1])
    assert found == {"a": 5, "b": [2, "y"]}


def test_one_rule_for_the_whole_output() -> None:
    outputs = [{"a": one}, {"b": five}]
    assert instep.merge(outputs, SIZES, merge="first") == {"a": 1}
    assert instep.merge(outputs, SIZES, merge="drop") is None
    assert instep.merge([one, five], SIZES, merge="list") == [one, five]
    assert instep.merge([["a"], ["b"]], SIZES, merge="list") == ["a", "b"]
    assert instep.merge([{"a": [one]}, {"a": [five]}], SIZES, merge="list") == {"a": [one, five]}


def test_the_rule_for_the_rest_gives_way_to_every_other() -> None:
    outputs = [{"a": one, "aux": {"b": one}}, {"a": five, "aux": {"b": five}}]
    for rules in ({"*": "mean", "aux": "sum"}, {"aux": "sum", "*": "mean"}):
        assert instep.merge(outputs, SIZES, merge=rules) == {"a": 2, "aux": {"b": 6}}


def test_auto_among_rules_is_no_rule() -> None:
    assert instep.merge([{"a": one}, {"a": one}], SIZES, merge={"a": "auto"})["a"] == 1


def test_which_rules_there_are() -> None:
    for rule in ("cat", "mean", "drop", ("pad", 0), ("stack", 1), weighted_by("n"), max):
        check_rule(rule)
    for rule in ("mean", ("pad", 3), weighted_by("n")):
        assert is_leaf_rule(rule)
    for rule in ("first", "list", "drop", max):
        assert not is_leaf_rule(rule)
    assert find_rule({"a.*": "sum", "*": "mean"}, ("a", "b")) == "sum"
    assert find_rule({"a": "sum"}, ("b",)) is None
