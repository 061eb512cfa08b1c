"""Errors of rules of state and of what replicas do together: what they say, and that the call changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

from .test_errors import ENGINES, Net, assert_fails


def leaves(value: Callable[[Tensor], Any]) -> Callable[[Net, Tensor], Tensor]:
    """Sets the attribute `note`."""

    def then(net: Net, y: Tensor) -> Tensor:
        net.note = value(y)
        return y

    return then


RULES: dict[str, tuple[Callable[[Net, Tensor], Any], Any, list[str]]] = {
    "a sum of words": (
        leaves(lambda y: f"saw {float(y.detach().sum())}"),
        {"note": "sum"},
        ["state={'note': 'sum'} cannot be applied", "a str", "Write another rule, or a function"],
    ),
    "a mean of lists": (
        leaves(lambda y: [str(float(y.detach().sum()))]),
        {"note": "mean"},
        ["state={'note': 'mean'} cannot be applied", "a list", "a function (old, new, sizes) -> value"],
    ),
    "the largest complex number": (
        leaves(lambda y: complex(float(y.detach().sum()), 1)),
        {"note": "max"},
        ["state={'note': 'max'} cannot be applied", "a complex"],
    ),
    "a sum of what was not there": (
        lambda net, y: (setattr(net, "fresh", float(y.detach().sum())), y)[1],
        {"fresh": "sum"},
        ["state={'fresh': 'sum'} needs a value from before the call", "set it in __init__"],
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "state", "words"), RULES.values(), ids=RULES.keys())
def test_a_rule_that_does_not_fit(
    engine: str, then: Callable[[Net, Tensor], Any], state: Any, words: list[str]
) -> None:
    net = Net(then)
    assert_fails(instep.StateError, words, net, torch.randn(5, 3), engine=engine, options={"state": state})
    assert not hasattr(net, "fresh")


TOGETHER: dict[str, tuple[Callable[[Net, Tensor], Any], list[str]]] = {
    "a sum of bools": (
        lambda net, y: instep.all_reduce(y > 0),
        ["all_reduce: a sum of bools", "op='max' for any, 'min' for all"],
    ),
    "a mean of integers": (
        lambda net, y: instep.all_reduce(y.long(), "mean"),
        ["all_reduce: a mean of torch.int64", "op='sum', or x.float()"],
    ),
    "another operation": (lambda net, y: instep.all_reduce(y, "median"), ["op='median'", "sum, mean, max, min"]),
    "words that differ": (
        lambda net, y: instep.all_gather({"n": str(len(y)), "y": y}),
        [
            "all_gather: the leaf 'n' is '3' on replica 0 and '2' on replica 1",
            "put what belongs to a sample",
        ],
    ),
    "words in a sum": (
        lambda net, y: instep.all_reduce({"n": str(len(y))}),
        ["all_reduce: the leaf 'n' is '3' on replica 0 and '2' on replica 1", "give numbers or tensors"],
    ),
    "a sparse tensor": (
        lambda net, y: instep.all_gather(y.detach().to_sparse()),
        ["all_gather: the argument is a Tensor of a layout of its own", "give the plain tensors in it"],
    ),
    "another structure": (
        lambda net, y: instep.all_gather({f"k{len(y)}": y}),
        ["different operations", "all_gather(dim=0) of dict(k", "Every replica has to make the same calls"],
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("then", "words"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_replicas_cannot_do_together(engine: str, then: Callable[[Net, Tensor], Any], words: list[str]) -> None:
    assert_fails(instep.CollectiveError, words, Net(then), torch.randn(5, 3), engine=engine)


def test_a_module_that_is_wrapped_already() -> None:
    with pytest.raises(instep.WrapError, match=r"wrapped by DataParallel already.*DataParallel\(model\.module\)"):
        instep.DataParallel(nn.DataParallel(nn.Linear(2, 2)), ["cpu"] * 2)


def test_what_to_do_with_unmerged_state_is_one_of_two_words() -> None:
    with pytest.raises(instep.WrapError, match=r"on_unmerged_state='ignore': write 'error' or 'warn'"):
        instep.DataParallel(nn.Linear(2, 2), ["cpu"] * 2, on_unmerged_state="ignore")
