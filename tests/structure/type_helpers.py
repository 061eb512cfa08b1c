"""What the tests of kinds share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from instep.structure.types import TypeHandler, handler_for_type
from instep.structure.types_hf import CACHE

SIZES = [(3, 2, 2), (7,), (1,) * 7, (1, 6)]
sizes_of_seven = pytest.mark.parametrize("sizes", SIZES, ids=str)


def kind_for(value: Any) -> TypeHandler:
    kind = handler_for_type(type(value))
    assert kind is not None
    return kind


def assert_same(one: Any, other: Any) -> None:
    """Equal in type, in every tensor and in every other leaf, through objects, lists and dictionaries."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif handler_for_type(type(one)) is CACHE or type(one).__module__ == "transformers.cache_utils":
        assert_same(vars(one), vars(other))
    else:
        assert one == other
