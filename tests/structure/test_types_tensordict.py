"""TensorDict and tensorclass: cut, joined, and differentiated through both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from instep.errors import MergeError
from instep.structure import types_hf, types_torch
from instep.structure.merge import merge
from instep.structure.tree import map_tensors, tensors_in

from .type_helpers import assert_same, kind_for, sizes_of_seven


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    types_torch.register_torch_types()
    types_hf.register_optional_types()


# TensorDict


def tensor_dict(device: str | None = None) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict(
        {
            "x": torch.randn(7, 3, requires_grad=True),
            "inner": {"y": torch.arange(7), "z": torch.randn(7, 2, 2).half()},
            "name": "seven",
        },
        batch_size=[7],
        device=device,
    )


def tensor_class() -> Any:
    tensordict = pytest.importorskip("tensordict")

    @tensordict.tensorclass
    class Sample:
        x: Tensor
        name: str

    return Sample(x=torch.randn(7, 3, requires_grad=True), name="seven", batch_size=[7])


@sizes_of_seven
@pytest.mark.parametrize("make", [tensor_dict, tensor_class])
def test_tensor_dicts_round_trip_and_are_differentiable(make: Callable[[], Any], sizes: tuple[int, ...]) -> None:
    value = make()
    kind = kind_for(value)
    assert kind.size(value) == 7
    parts = kind.split(value, sizes)
    assert [kind.size(part) for part in parts] == list(sizes)
    merged = kind.merge(parts)
    assert type(merged) is type(value)
    assert merged.batch_size == value.batch_size
    assert (merged["name"] if make is tensor_dict else merged.name) == "seven"
    for one, other in zip(tensors_in(merged), tensors_in(value), strict=True):
        assert_same(one, other)
    wanted = torch.autograd.grad(value.get("x").square().sum(), value.get("x"))
    found = torch.autograd.grad(merged.get("x").square().sum(), value.get("x"))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_mapping_a_tensor_dict_leaves_it_alone(device: str | None) -> None:
    value = tensor_dict(device)
    new = map_tensors(lambda tensor: tensor.detach().to("meta"), value)
    assert type(new) is type(value)
    assert (new.device, value.device) == (
        (None, None) if device is None else (torch.device("meta"), torch.device("cpu"))
    )
    assert {tensor.device.type for tensor in tensors_in(value)} == {"cpu"}
    assert [tensor.device.type for tensor in tensors_in(new)] == ["meta"] * 3
    assert new["name"] == "seven"


def test_a_tensor_class_is_mapped_and_a_tensor_dict_without_batch_is_not_one() -> None:
    value = tensor_class()
    new = map_tensors(lambda tensor: tensor * 2, value)
    assert type(new) is type(value)
    torch.testing.assert_close(new.x, value.x * 2)
    empty = pytest.importorskip("tensordict").TensorDict({"x": torch.zeros(3)}, batch_size=[])
    assert kind_for(empty).size(empty) is None


def test_one_without_a_batch_is_an_error_that_says_what_to_return() -> None:
    tensordict = pytest.importorskip("tensordict")
    parts = [{"losses": tensordict.TensorDict({"actor": torch.tensor(float(i))}, batch_size=[])} for i in range(2)]
    with pytest.raises(MergeError, match=r"'losses': a TensorDict without a batch size(.|\n)*to_dict"):
        merge(parts, [2, 1])
