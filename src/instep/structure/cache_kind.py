"""How Hugging Face caches of keys and values are cut and joined.

Their attributes changed with almost every release, so a cache is walked as what it is: objects, lists and dictionaries
around tensors. Keys, values and states have at least three dimensions, the batch first; counters and flags have fewer.
Every part gets counters and containers of its own, because `forward` writes to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.tree import SCALARS, Path, shallow_copy, show_path
from instep.structure.types import Kind, TensorMap

_BATCH_DIMS = {"indexer_position_ids": 1}
_COUNTS = ("batch_size", "max_batch_size", "_max_batch_size")
_QUANTIZED = ("_quantized_keys", "_quantized_values", "_quantized_key_cache", "_quantized_value_cache")
_CLASSES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")

Visit = Callable[[str, Any], Any]
Seen = dict[tuple[int, ...], Tensor]


def _is_open(value: Any) -> bool:
    """Whether a value is a cache or one layer of it, rather than a setting that it refers to."""
    module = sys.modules.get("transformers.cache_utils")
    return isinstance(value, tuple(getattr(module, name) for name in _CLASSES if hasattr(module, name)))


def _batch_dim(name: str, value: Tensor) -> int | None:
    return _BATCH_DIMS.get(name, 0) if value.dim() >= 3 else None


def _rebuild(name: str, value: Any, visit: Visit) -> Any:
    """The value around what `visit` gives for each leaf, in containers of its own."""
    if isinstance(value, dict):
        return type(value)((key, _rebuild(name, child, visit)) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(_rebuild(name, child, visit) for child in value)
    if not _is_open(value):
        return visit(name, value)
    new = shallow_copy(value)
    for key, child in vars(value).items():
        new.__dict__[key] = _rebuild(key, child, visit)
    return new


def _leaves(name: str, value: Any, path: Path = ()) -> Iterator[tuple[str, Any, Path]]:
    """Every leaf of a cache: the name of the attribute it is in, itself, and the way to it."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(name, child, (*path, key))
    elif type(value) in (list, tuple):
        for index, child in enumerate(value):
            yield from _leaves(name, child, (*path, index))
    elif _is_open(value):
        for key, child in vars(value).items():
            yield from _leaves(key, child, (*path, key))
    else:
        yield name, value, path


def _size(value: Any) -> int | None:
    _refuse_quantized(value, StructureError)
    sizes: dict[int, Path] = {}
    for name, leaf, path in _leaves("", value):
        dim = _batch_dim(name, leaf) if isinstance(leaf, Tensor) else None
        if dim is not None:
            sizes.setdefault(leaf.shape[dim], path)
    if len(sizes) > 1:
        said = ", ".join(f"{size} samples in {show_path(path)}" for size, path in sizes.items())
        raise StructureError(
            f"a {type(value).__name__} holds batches of different sizes ({said}); fill every layer with the same "
            "samples, or take the same ones out of every layer"
        )
    return next(iter(sizes), None)


def _refuse_quantized(value: Any, error: type[Exception]) -> None:
    for name, leaf, path in _leaves("", value):
        if name in _QUANTIZED and leaf is not None:
            where = show_path(path[: path.index(name) + 1])
            raise error(
                f"a quantized {type(value).__name__} ({where}) is neither split nor joined; use a DynamicCache instead"
            )


def _split(value: Any, sizes: Sequence[int]) -> list[Any]:
    _refuse_quantized(value, StructureError)
    whole = sum(sizes)

    def cut(start: int, size: int) -> Visit:
        # One tensor may have two names (a list's item that is also a buffer): it stays one tensor.
        seen: dict[int, Tensor] = {}

        def visit(name: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                dim = _batch_dim(name, leaf)
                if id(leaf) not in seen:
                    seen[id(leaf)] = leaf.clone() if dim is None else leaf.narrow(dim, start, size)
                return seen[id(leaf)]
            return size if name in _COUNTS and leaf == whole else leaf

        return visit

    starts = accumulate(sizes[:-1], initial=0)
    return [_rebuild("", value, cut(start, size)) for start, size in zip(starts, sizes, strict=True)]


def _merge(parts: Sequence[Any]) -> Any:
    _refuse_quantized(parts[0], MergeError)
    return _join("", parts, [_size(part) or 0 for part in parts], type(parts[0]).__name__, {})


def _join(name: str, parts: Sequence[Any], sizes: Sequence[int], path: str, seen: Seen) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise MergeError(f"{path} is of different types: {[type(part).__name__ for part in parts]}")
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise MergeError(f"{path} has different keys in the parts: {[list(part) for part in parts]}")
        return type(first)(
            (key, _join(name, [part[key] for part in parts], sizes, f"{path}.{key}", seen)) for key in first
        )
    if type(first) in (list, tuple):
        if any(len(part) != len(first) for part in parts):
            raise MergeError(f"{path} has different lengths in the parts: {[len(part) for part in parts]}")
        return type(first)(
            _join(name, column, sizes, f"{path}.{i}", seen) for i, column in enumerate(zip(*parts, strict=True))
        )
    if _is_open(first):
        if any(vars(part).keys() != vars(first).keys() for part in parts):
            raise MergeError(f"{path} has different attributes in the parts: {[list(vars(part)) for part in parts]}")
        new = shallow_copy(first)
        for key in vars(first):
            new.__dict__[key] = _join(key, [vars(part)[key] for part in parts], sizes, f"{path}.{key}", seen)
        return new
    if not isinstance(first, Tensor):
        return _join_settings(name, parts, sizes, path)
    same = tuple(id(part) for part in parts)
    if same not in seen:
        seen[same] = _join_tensors(name, parts, path)
    return seen[same]


def _join_tensors(name: str, parts: Sequence[Tensor], path: str) -> Tensor:
    first, dim = parts[0], _batch_dim(name, parts[0])
    if dim is not None:
        return _cat(parts, dim, path)
    # Counters are read: a cache whose parts stand at different positions has no whole.
    if not all(torch.equal(first, part.to(first.device)) for part in parts[1:]):
        raise MergeError(f"{path} differs between the parts: {[part.tolist() for part in parts]}")
    return first.clone()


def _join_settings(name: str, parts: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    if name in _COUNTS and list(parts) == list(sizes):
        return sum(sizes)
    if isinstance(parts[0], SCALARS) and any(part != parts[0] for part in parts):
        raise MergeError(f"{path} differs between the parts: {list(parts)}")
    return parts[0]


def _cat(parts: Sequence[Tensor], dim: int, path: str) -> Tensor:
    shapes = {tuple(part.shape[:dim] + part.shape[dim + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise MergeError(
            f"{path} has different lengths in the parts: {[tuple(part.shape) for part in parts]}; "
            "pad the inputs to one length, or leave the cache out of the outputs"
        )
    return torch.cat(list(parts), dim)


def _map(fn: TensorMap, value: Any) -> Any:
    seen: dict[int, Tensor] = {}
    changes: dict[Any, Any] = {}

    def visit(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in seen:
            new = seen[id(leaf)] = fn(leaf)
            if leaf.dim() > 0:
                changes.setdefault(leaf.device, new.device)
                changes.setdefault(leaf.dtype, new.dtype)
        return seen[id(leaf)]

    new = _rebuild("", value, visit)
    if all(old == now for old, now in changes.items()):
        return new
    # A layer also remembers where its tensors are, and of what type.
    return _rebuild(
        "", new, lambda _, leaf: changes.get(leaf, leaf) if type(leaf) in (torch.device, torch.dtype) else leaf
    )


def _move(value: Any, device: Any) -> Any:
    """The cache on a device. Counters are copied even if they are there already: `forward` writes to them."""
    return _map(lambda tensor: tensor.to(device, copy=tensor.dim() == 0), value)


CACHE = Kind(_size, _split, _merge, _map, _move)
