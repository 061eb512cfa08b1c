"""Every line that the error of a split offers is applied, and gives outputs and gradients of one device.

Where no trial confirmed a line, the message names the choices in words and offers none.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instep

LINE = re.compile(r"^  ((?:in_dims|dim|merge|state|methods)=.*?)(?:   #.*)?$", re.MULTILINE)


class Net(nn.Module):
    def __init__(self, then: Callable[..., Any]) -> None:
        super().__init__()
        self.then, self.layer = then, nn.Linear(3, 3)

    def forward(self, x: Any, other: Any = None) -> Any:
        return self.then(self, x, other)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scaled(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x) * other.sin().sum()


def graph(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x) @ other.to_dense()


def packed(net: Net, x: Tensor, other: Any) -> Tensor:
    return net.layer(x) + other.data.sum()


def stacked(net: Net, x: list[Tensor], other: None) -> Tensor:
    return net.layer(torch.stack(list(x)))


def layers(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x) + other[0] * other[1]


def samples(net: Net, x: Tensor, other: Any) -> Tensor:
    return net.layer(x) + torch.stack([item.sum() for item in other])[:, None]


def mixed(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x).softmax(0).max() * other.flatten().softmax(0).max()


def zeros(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x) * 0 + other.sum() * 0


def gathered(net: Net, x: Tensor, other: Tensor) -> Tensor:
    return net.layer(x) - instep.all_reduce(net.layer(x).mean(0), "mean") + other.sum()


def sparse(size: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that this layout is in beta state
        return randn(size, size).to_sparse_csc()


def sequences(*sizes: int) -> Any:
    return nn.utils.rnn.pack_sequence([randn(size, 3) for size in sizes])


CONFIRMED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "a tensor that belongs to all samples": (scaled, (randn(6, 3), randn(2, 7, 4)), {}),
    "with a batch in dim 1": (
        lambda net, x, other: net.layer(x) + other.sum(),
        (randn(4, 6, 3), randn(5, 2)),
        {"dim": 1},
    ),
    "a layout that cannot be split": (graph, (randn(6, 3), sparse(3)), {}),
    "packed sequences of another batch": (packed, (randn(6, 3), sequences(4, 2)), {}),
    "two readings of a list": (stacked, (list(randn(4, 4, 3)),), {}),
    "a dim that was given": (lambda net, x, other: net.layer(x) * other.sum(), (randn(6, 3), randn(6)), {"other": 1}),
}
WITHOUT_LINES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "samples interact": (mixed, (randn(6, 3), randn(2, 7, 4)), {}),
    "zeros": (zeros, (randn(6, 3), randn(2, 7, 4)), {}),
    "a collective": (gathered, (randn(6, 3), randn(2, 7, 4)), {}),
    "without a probe": (scaled, (randn(6, 3), randn(2, 7, 4)), {"probe": False}),
    "without a probe, layers": (layers, (randn(6, 3), randn(2, 6, 3)), {"probe": False}),
    "without a probe, a list": (stacked, ([randn(4, 3) for _ in range(4)],), {"probe": False}),
}


def options_of(extra: dict[str, Any]) -> dict[str, Any]:
    return {"in_dims": extra} if "other" in extra else extra


def refusal(then: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]) -> str:
    net = Net(then).double()
    with (
        instep.DataParallel(net, ["cpu"] * 2, engine="serial", **options_of(extra)) as model,
        pytest.raises(instep.StructureError) as caught,
    ):
        model(*args)
    return str(caught.value)


@pytest.mark.parametrize(("then", "args", "extra"), CONFIRMED.values(), ids=CONFIRMED.keys())
def test_offered_lines_give_the_outputs_of_one_device(
    then: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]
) -> None:
    message = refusal(then, args, extra)
    lines = LINE.findall(message)
    assert lines, message
    assert "tried on samples of this batch" in message
    for line in lines:
        torch.manual_seed(0)
        plain = Net(then).double()
        net = copy.deepcopy(plain)
        options = {**options_of(extra), **eval(f"dict({line})")}
        with instep.DataParallel(net, ["cpu"] * 2, engine="serial", **options) as model:
            assert "on one device" not in str(model.explain(*args))
            outputs = [each(*args) for each in (model, plain)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
        for output in outputs:
            output.square().sum().backward()
        torch.testing.assert_close(net.layer.weight.grad, plain.layer.weight.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("then", "args", "extra"), WITHOUT_LINES.values(), ids=WITHOUT_LINES.keys())
def test_without_a_confirmed_line_the_choice_is_in_words(
    then: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]
) -> None:
    message = refusal(then, args, extra)
    assert not LINE.findall(message)
    assert "in_dims={" not in message
    refuted, undecided = (f"{start} trial on a few samples" in message for start in ("In a", "A"))
    assert refuted == (then is mixed)
    assert undecided == (then is not mixed and "probe" not in extra)
    assert ("If another dim is the batch, say so with in_dims." if refuted else "Say with in_dims what") in message


def test_a_choice_that_a_trial_refutes_is_not_named() -> None:
    """A sum over samples with a leading dim of zeros: only the whole tensor gives other outputs."""

    def rows(net: Net, x: Tensor, other: Tensor) -> Tensor:
        return (net.layer(x) * 0) + other[0, : len(x)] * 0 + (other.shape[1] == len(x)) * 0

    def checked(net: Net, x: Tensor, other: Tensor) -> Tensor:
        if other.shape[1] != len(x):
            raise ValueError("sizes differ")
        return rows(net, x, other)

    message = refusal(checked, (randn(6, 3), randn(2, 6, 3)), {})
    assert "what 'other' is: 1 if the batch is dim 1" in message
    assert "None" not in message


@pytest.mark.parametrize("probe", [True, False])
def test_state_without_a_trial_has_its_rules_in_words(probe: bool) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = 0.0

        def forward(self, x: Tensor) -> Tensor:
            self.total += float(instep.all_reduce(x.sum()) * 0 + x.sum())
            return x

    with (
        instep.DataParallel(Counts(), ["cpu"] * 2, engine="serial", probe=probe) as model,
        pytest.raises(instep.StateError) as caught,
    ):
        model(randn(6, 3))
    message = str(caught.value)
    assert not LINE.findall(message)
    assert "set a rule for 'total' in state: 'sum'" in message
    assert ("No rule could be tried" in message) == probe
