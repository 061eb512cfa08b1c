"""Comparison of results with and without replicas: types, order and flags exactly, numbers up to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def assert_same(actual: Any, expected: Any, tolerance: float, path: str = "value") -> None:
    """Assert that two values are equal. The message names the path of the first difference."""
    assert type(actual) is type(expected), f"{path}: {type(actual).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Tensor):
        _assert_same_tensor(actual, expected, tolerance, path)
    elif isinstance(expected, PackedSequence):
        for name in PackedSequence._fields:
            assert_same(getattr(actual, name), getattr(expected, name), tolerance, f"{path}.{name}")
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{path}: keys {list(actual)}, not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], tolerance, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{path}: {len(actual)} entries, not {len(expected)}"
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_same(mine, theirs, tolerance, f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected):
        for item in dataclasses.fields(expected):
            assert_same(getattr(actual, item.name), getattr(expected, item.name), tolerance, f"{path}.{item.name}")
    else:
        assert actual == expected, f"{path}: {actual!r}, not {expected!r}"


def _assert_same_tensor(actual: Tensor, expected: Tensor, tolerance: float, path: str) -> None:
    assert actual.requires_grad == expected.requires_grad, f"{path}: requires_grad is {actual.requires_grad}"
    assert actual.layout == expected.layout, f"{path}: layout {actual.layout}, not {expected.layout}"
    if expected.is_sparse:  # the order of the entries is not defined
        actual, expected = actual.to_dense(), expected.to_dense()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{path}: {text}")


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_same_gradients(both: Any, tolerance: float) -> None:
    """Assert equal gradients of a `Pair`."""
    plain, model = both
    assert_same(gradients(model), gradients(plain), tolerance, "gradient")
