"""Encoding of plain values without pickle."""

from __future__ import annotations

import collections
import enum
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instep
from instep.engines.plain_values import decode_plain, dump_plain, encode_plain, load_plain

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one is other
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(VALUES)
def test_plain_values_round_trip(value: Any) -> None:
    encoded = encode_plain(value)
    assert encoded is not None
    plain, tensors = encoded
    assert same(decode_plain(load_plain(dump_plain(plain)), tensors), value)


def test_a_tensor_in_two_places_is_sent_once() -> None:
    tensor = torch.ones(2)
    encoded = encode_plain({"a": tensor, "b": [tensor]})
    assert encoded is not None
    assert encoded[1] == [tensor]
    decoded = decode_plain(load_plain(dump_plain(encoded[0])), [tensor])
    assert decoded["a"] is decoded["b"][0]


def test_special_numbers_round_trip() -> None:
    encoded = encode_plain([-0.0, math.inf, math.nan, 2**70, "\ud800", True, 1])
    assert encoded is not None
    decoded = decode_plain(load_plain(dump_plain(encoded[0])), [])
    assert math.copysign(1, decoded[0]) == -1
    assert decoded[1] == math.inf
    assert math.isnan(decoded[2])
    assert decoded[3:] == [2**70, "\ud800", True, 1]
    assert type(decoded[5]) is bool


def a_cycle() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def marked() -> Tensor:
    tensor = torch.ones(2)
    tensor.name_of_it = "mine"  # type: ignore[attr-defined]
    return tensor


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


TWICE: list[int] = [1]


@pytest.mark.parametrize(
    "value",
    [
        1j,
        b"bytes",
        {1, 2},
        object(),
        collections.OrderedDict(a=1),
        torch.Size([1, 2]),
        nn.Parameter(torch.ones(2)),
        torch.ones(2).to_sparse(),
        marked(),
        {(1, 2): 3},
        [TWICE, TWICE],
        a_cycle(),
        deep(40),
        list(range(1000)),
        [[(n,)] for n in range(40)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_not_plain(value: Any) -> None:
    assert encode_plain([value]) is None


def test_a_pickle_is_not_decoded_as_plain() -> None:
    assert load_plain(b"\x80\x05N.") is None


class Named(dict[str, Any]):
    """A class whose instances are pickled."""


class Net(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kind = kind

    def forward(self, x: Tensor, names: Any) -> Any:
        return self.kind(y=self.layer(x), names=names)


@pytest.mark.parametrize("kind", [dict, Named])
def test_a_step_leaves_no_reference_cycles(kind: type) -> None:
    """Tensors in a cycle would keep their memory until the garbage collector runs."""
    with instep.DataParallel(Net(kind), ["cpu"] * 2, engine="processes") as model:
        x, names = torch.randn(5, 3), [Named(n=i) for i in range(5)] if kind is Named else list("abcde")
        for _ in range(3):
            model(x, names)["y"].sum().backward()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                model(x, names)["y"].sum().backward()
            assert gc.collect() == 0
        finally:
            gc.enable()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("fails", [False, True], ids=["", "after-a-failure"])
def test_calls_are_plain_while_graphs_are_retained(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    net = nn.Linear(4, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        kept = [model(torch.randn(6, 4)) for _ in range(2)]
        if fails:
            with pytest.raises(RuntimeError, match="shapes"):
                model(torch.randn(6, 5))
            kept.append(model(torch.randn(6, 4)))
        monkeypatch.setattr("instep.engines.processes.serialization.registry.CodeRegistry.pack_fields", None)
        x = torch.randn(6, 4)
        out = model(x)
        out.sum().backward()
        torch.testing.assert_close(out, net(x))
        assert all(output.requires_grad for output in kept)


@pytest.mark.usefixtures("workers")
def test_calls_of_modules_with_many_parameters_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        x = torch.randn(6, 3)
        model(x).sum().backward()
        monkeypatch.setattr("instep.engines.processes.serialization.registry.CodeRegistry.pack_fields", None)
        net.zero_grad()
        model(x).sum().backward()
        found = [weight.grad for weight in net.parameters()]
        torch.testing.assert_close(found, list(torch.autograd.grad(net(x).sum(), list(net.parameters()))))


class Name(str, enum.Enum):
    """Method names as an enum."""

    ENCODE = "encode"


class Encodes(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return self(x).tanh()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", [Name.ENCODE, np.str_("encode")])
def test_method_names_of_str_subclasses(name: str) -> None:
    net, x = Encodes(3, 2), torch.randn(5, 3)
    with instep.DataParallel(net, ["cpu"] * 2, engine="processes") as model:
        for _ in range(3):
            torch.testing.assert_close(model.call(name, x), net.encode(x))
