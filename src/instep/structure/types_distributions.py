"""Type handler for `torch.distributions`, split and merged along the first batch dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform
from torch.distributions.transforms import _InverseTransform

from instep.errors import MergeError
from instep.structure.tree import SCALARS, shallow_copy
from instep.structure.types import TensorFn, TypeHandler

VisitFn = Callable[[str, Any, int], Any]
"""Called with the name of a child, the child, and its number of dims if it has the batch dim. Returns the new child."""

_EXTRA_EVENT_DIMS = {"_capacitance_tril": 2}
_UNBROADCASTED_PREFIX = "_unbroadcasted_"


def _batch_size(value: Distribution) -> int | None:
    return value.batch_shape[0] if value.batch_shape else None


def _event_dims(value: Distribution, name: str) -> int:
    """The number of dims of a parameter that belong to one sample; 0 if the class does not declare it."""
    try:
        constraint = value.arg_constraints.get(name.removeprefix(_UNBROADCASTED_PREFIX))
        return _EXTRA_EVENT_DIMS.get(name, 0) if constraint is None else constraint.event_dim
    except NotImplementedError:
        return 0


def _batched_ndim(owner: Any, name: str, child: Any, inherited: int) -> int:
    if not isinstance(owner, Distribution):
        return inherited
    batch_dims = len(owner.batch_shape)
    if isinstance(child, Tensor):
        return batch_dims + _event_dims(owner, name)
    if isinstance(child, Distribution):
        return batch_dims
    # The tensors of a transform broadcast against samples.
    return batch_dims + len(owner.event_shape)


def _is_rebuildable(value: Any) -> bool:
    return isinstance(value, (Distribution, Transform)) and not isinstance(value, nn.Module)


def _rebuild(value: Any, visit: VisitFn, inherited: int) -> Any:
    """Copy a distribution, transform or list, with `visit` applied to each child that may hold tensors."""
    if isinstance(value, (list, tuple)):
        return type(value)(visit(str(index), child, inherited) for index, child in enumerate(value))
    new = shallow_copy(value)
    for name, child in vars(value).items():
        if name == "_inv" and not isinstance(value, _InverseTransform):
            new.__dict__[name] = None  # the cached inverse of a transform
        elif name == "_cached_x_y":
            new.__dict__[name] = (None, None)
        elif isinstance(child, Tensor) or _is_rebuildable(child) or type(child) is list:
            new.__dict__[name] = visit(name, child, _batched_ndim(value, name, child, inherited))
    return new


def _has_batch_dim(value: Any, batched_ndim: int, size: int) -> bool:
    shape = value.shape if isinstance(value, Tensor) else value.batch_shape
    return len(shape) >= batched_ndim and len(shape) > 0 and shape[0] == size


def _all_have_batch_dim(parts: Sequence[Any], sizes: Sequence[int], batched_ndim: int) -> bool:
    return all(_has_batch_dim(part, batched_ndim, size) for part, size in zip(parts, sizes, strict=True))


def _set_batch_size(value: Distribution, size: int) -> Distribution:
    value._batch_shape = torch.Size((size, *value.batch_shape[1:]))
    return value


def _narrow(value: Any, start: int, length: int, size: int, batched_ndim: int, seen: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if not _has_batch_dim(value, batched_ndim, size):
            return value
        # A tensor that is in two attributes (`probs` and `_param`) stays one tensor.
        if id(value) not in seen:
            seen[id(value)] = value.narrow(0, start, length)
        return seen[id(value)]
    if isinstance(value, Distribution) and not _has_batch_dim(value, batched_ndim, size):
        return value
    if not (_is_rebuildable(value) or isinstance(value, list)):
        return value

    def visit(_: str, child: Any, batched_ndim: int) -> Any:
        return _narrow(child, start, length, size, batched_ndim, seen)

    new = _rebuild(value, visit, batched_ndim)
    return _set_batch_size(new, length) if isinstance(value, Distribution) else new


def _split(value: Distribution, sizes: Sequence[int]) -> list[Distribution]:
    size = sum(sizes)
    starts = accumulate(sizes[:-1], initial=0)
    return [_narrow(value, start, length, size, 0, {}) for start, length in zip(starts, sizes, strict=True)]


def _merge(parts: Sequence[Distribution]) -> Distribution:
    if len({(part.batch_shape[1:], part.event_shape) for part in parts}) > 1:
        shapes = [(list(part.batch_shape), list(part.event_shape)) for part in parts]
        raise MergeError(f"the distributions have different batch and event shapes: {shapes}")
    merged: Distribution = _merge_values(parts, [part.batch_shape[0] for part in parts], 0, type(parts[0]).__name__, {})
    return merged


def _merge_values(
    parts: Sequence[Any], sizes: Sequence[int], batched_ndim: int, path: str, seen: dict[tuple[int, ...], Tensor]
) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise MergeError(f"{path} is of different types: {[type(part).__name__ for part in parts]}")
    if isinstance(first, Tensor):
        key = tuple(id(part) for part in parts)
        if key not in seen:
            seen[key] = _merge_tensors(parts, sizes, batched_ndim)
        return seen[key]
    if isinstance(first, Distribution) and not _all_have_batch_dim(parts, sizes, batched_ndim):
        if _share_tensors(parts):
            return first
        parts = [_expand_distribution(part, batched_ndim, size) for part, size in zip(parts, sizes, strict=True)]
        first = parts[0]
    if not (_is_rebuildable(first) or isinstance(first, list)):
        return first
    if isinstance(first, list) and any(len(part) != len(first) for part in parts):
        raise MergeError(f"{path} has different lengths in the parts: {[len(part) for part in parts]}")

    def visit(name: str, _: Any, batched_ndim: int) -> Any:
        children = _children_by_name(parts, name)
        return None if children is None else _merge_values(children, sizes, batched_ndim, f"{path}.{name}", seen)

    new = _rebuild(first, visit, batched_ndim)
    if isinstance(first, list):
        return new
    _reconcile_attributes(new, parts, path)
    return _set_batch_size(new, sum(sizes)) if isinstance(first, Distribution) else new


def _children_by_name(parts: Sequence[Any], name: str) -> list[Any] | None:
    """The child of each part; None for a lazy attribute that is not computed in every part."""
    if isinstance(parts[0], list):
        return [part[int(name)] for part in parts]
    return [vars(part)[name] for part in parts] if all(name in vars(part) for part in parts) else None


def _reconcile_attributes(new: Any, parts: Sequence[Any], path: str) -> None:
    """Delete lazy attributes that not every part has. Raise `MergeError` for settings that differ."""
    for name in list(vars(new)):
        values = _children_by_name(parts, name)
        if values is None:
            del new.__dict__[name]
        elif all(isinstance(value, SCALARS) for value in values) and any(value != values[0] for value in values):
            raise MergeError(f"{path}.{name} differs between the parts: {values}")


def _merge_tensors(parts: Sequence[Tensor], sizes: Sequence[int], batched_ndim: int) -> Tensor:
    if _all_have_batch_dim(parts, sizes, batched_ndim):
        return torch.cat(list(parts))
    if _is_same_tensor(parts):
        return parts[0]
    # All samples of a part share the tensor. Expanding it is right whether or not the parts have equal values.
    return torch.cat([_expand_tensor(part, batched_ndim, size) for part, size in zip(parts, sizes, strict=True)])


def _expand_tensor(part: Tensor, batched_ndim: int, size: int) -> Tensor:
    part = part.reshape((1,) * (batched_ndim - part.dim()) + part.shape)
    return part.expand(size, *part.shape[1:]) if part.shape[0] == 1 else part


def _expand_distribution(part: Distribution, batched_ndim: int, size: int) -> Distribution:
    shape = (1,) * (batched_ndim - len(part.batch_shape)) + tuple(part.batch_shape)
    expanded: Distribution = part.expand(torch.Size((size, *shape[1:])))
    return expanded


def _is_same_tensor(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    return all(
        part is first
        or (part.data_ptr() == first.data_ptr() != 0 and part.shape == first.shape and part.stride() == first.stride())
        for part in parts
    )


def _share_tensors(parts: Sequence[Distribution]) -> bool:
    found: list[list[Tensor]] = []
    for part in parts:
        found.append([])
        _map(found[-1].append, part)  # type: ignore[arg-type]
    return all(_is_same_tensor(column) for column in zip(*found, strict=True))


def _map(fn: TensorFn, value: Distribution) -> Distribution:
    seen: dict[int, Tensor] = {}

    def visit(_: str, child: Any, batched_ndim: int) -> Any:
        if isinstance(child, Tensor):
            if id(child) not in seen:
                seen[id(child)] = fn(child)
            return seen[id(child)]
        return _rebuild(child, visit, batched_ndim) if _is_rebuildable(child) or isinstance(child, list) else child

    new: Distribution = _rebuild(value, visit, 0)
    return new


DISTRIBUTION = TypeHandler(_batch_size, _split, _merge, _map)
