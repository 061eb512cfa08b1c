"""Predicates on tensor shapes and dtypes, and short descriptions of values for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is strided, neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor is dense and not of a subclass."""
    return type(tensor) is Tensor and is_dense(tensor)


def is_integer(part: Tensor) -> bool:
    """Whether a tensor has an integer dtype. Booleans do not count."""
    return not (part.is_floating_point() or part.is_complex() or part.dtype is torch.bool)


def has_batch_dim(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], rank: int, dim: int) -> bool:
    """Whether a dim has the shard's size in every shape."""
    return all(len(shape) == rank and shape[dim] == size for shape, size in zip(shapes, sizes, strict=True))


def can_cat_plain_tensors(parts: Sequence[Any], sizes: Sequence[int], rank: int, dim: int) -> bool:
    """Whether the parts are distinct dense tensors that can be concatenated along the batch dim `dim`."""
    for part in parts:
        if type(part) is not Tensor or part.layout is not torch.strided or part.is_nested:
            return False
    return parts[0] is not parts[-1] and can_cat([part.shape for part in parts], sizes, rank, dim)


def can_cat(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], rank: int, dim: int) -> bool:
    """Whether tensors of these shapes have the shards' sizes in `dim` and equal sizes in the other dims."""
    first = shapes[0]
    for shape, size in zip(shapes, sizes, strict=True):
        if len(shape) != rank or shape[dim] != size:
            return False
        if shape != first and shape[:dim] + shape[dim + 1 :] != first[:dim] + first[dim + 1 :]:
            return False
    return True


def tensors_equal(parts: Sequence[Tensor]) -> bool:
    """Whether tensors of one shape are bitwise equal, or all NaN."""
    first = parts[0]
    return all(part.dtype == first.dtype and torch.equal(part, first) for part in parts) or all(
        part.dtype == first.dtype and bool(torch.isnan(part).all()) for part in parts
    )


def equal_values(left: Any, right: Any) -> bool:
    """Whether two numbers or arrays are equal, or both all NaN."""
    return bool(np.all(left == right)) or bool(np.all(left != left) and np.all(right != right))


def format_values(parts: Sequence[Any]) -> str:
    """The first scalar values, for a message."""
    shown = [repr(part.item()) if isinstance(part, Tensor) else repr(part) for part in parts[:4]]
    return ", ".join(shown) + (", ..." if len(parts) > 4 else "")


def summarize_values(values: Sequence[Any]) -> str:
    """The first values, for a message. Large tensors are shown by shape, long values are truncated."""
    return " and ".join(map(_summarize_value, values[:4])) + (", ..." if len(values) > 4 else "")


def _summarize_value(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        small = not getattr(value, "is_nested", False) and np.prod(value.shape) <= 8
        return repr(value.tolist()) if small else f"a {type(value).__name__} of shape {shape_of(value)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def shape_of(value: Any) -> list[Any]:
    """The shape of a tensor, for a message. Ragged dims of a nested tensor are `*`."""
    if getattr(value, "is_nested", False):
        sizes = ["*"] * value.dim() if value.layout is torch.strided else value.shape  # strided: no shape
        return [value.size(0), *[size if isinstance(size, int) else "*" for size in sizes[1:]]]
    return list(getattr(value, "shape", ()))


def layout_of(value: Tensor) -> str:
    """The class and layout of a tensor, for a message."""
    return f"{type(value).__name__}, {value.layout}{', nested' if value.is_nested else ''}"
