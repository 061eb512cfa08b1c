"""Type handlers for Hugging Face caches and encodings, and for TensorDict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.shapes import summarize_values
from instep.structure.tree import SCALARS, Path, format_path, map_tensors, shallow_copy
from instep.structure.types import TensorFn, TypeHandler, add_handler, add_handler_if
from instep.structure.types_pyg import GRAPH, GRAPH_BATCH

_CACHE_BATCH_DIMS = {"indexer_position_ids": 1}
_BATCH_SIZE_ATTRIBUTES = ("batch_size", "max_batch_size", "_max_batch_size")
_QUANTIZED_ATTRIBUTES = ("_quantized_keys", "_quantized_values", "_quantized_key_cache", "_quantized_value_cache")
_CACHE_CLASSES = ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin")

VisitFn = Callable[[str, Any], Any]
MergedTensors = dict[tuple[int, ...], Tensor]


def _is_cache(value: Any) -> bool:
    """Whether a value is a cache or one layer of it, rather than a setting that it refers to."""
    module = sys.modules.get("transformers.cache_utils")
    return isinstance(value, tuple(getattr(module, name) for name in _CACHE_CLASSES if hasattr(module, name)))


def _cache_batch_dim(name: str, value: Tensor) -> int | None:
    return _CACHE_BATCH_DIMS.get(name, 0) if value.dim() >= 3 else None


def _rebuild_cache(name: str, value: Any, visit: VisitFn) -> Any:
    """The value around what `visit` gives for each leaf, in containers of its own."""
    if isinstance(value, dict):
        return type(value)((key, _rebuild_cache(name, child, visit)) for key, child in value.items())
    if type(value) in (list, tuple):
        return type(value)(_rebuild_cache(name, child, visit) for child in value)
    if not _is_cache(value):
        return visit(name, value)
    new = shallow_copy(value)
    for key, child in vars(value).items():
        new.__dict__[key] = _rebuild_cache(key, child, visit)
    return new


def _cache_leaves(name: str, value: Any, path: Path = ()) -> Iterator[tuple[str, Any, Path]]:
    """Every leaf of a cache: the name of the attribute it is in, itself, and the way to it."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _cache_leaves(name, child, (*path, key))
    elif type(value) in (list, tuple):
        for index, child in enumerate(value):
            yield from _cache_leaves(name, child, (*path, index))
    elif _is_cache(value):
        for key, child in vars(value).items():
            yield from _cache_leaves(key, child, (*path, key))
    else:
        yield name, value, path


def _cache_batch_size(value: Any) -> int | None:
    _check_not_quantized(value, StructureError)
    sizes: dict[int, Path] = {}
    for name, leaf, path in _cache_leaves("", value):
        dim = _cache_batch_dim(name, leaf) if isinstance(leaf, Tensor) else None
        if dim is not None:
            sizes.setdefault(leaf.shape[dim], path)
    if len(sizes) > 1:
        said = ", ".join(f"{size} samples in {format_path(path)}" for size, path in sizes.items())
        raise StructureError(
            f"a {type(value).__name__} holds batches of different sizes ({said}); fill every layer with the same "
            "samples, or take the same ones out of every layer"
        )
    return next(iter(sizes), None)


def _check_not_quantized(value: Any, error: type[Exception]) -> None:
    for name, leaf, path in _cache_leaves("", value):
        if name in _QUANTIZED_ATTRIBUTES and leaf is not None:
            where = format_path(path[: path.index(name) + 1])
            raise error(
                f"a quantized {type(value).__name__} ({where}) is neither split nor joined; use a DynamicCache instead"
            )


def _split_cache(value: Any, sizes: Sequence[int]) -> list[Any]:
    _check_not_quantized(value, StructureError)
    whole = sum(sizes)

    def cut(start: int, size: int) -> VisitFn:
        # One tensor may have two names (a list's item that is also a buffer): it stays one tensor.
        seen: dict[int, Tensor] = {}

        def visit(name: str, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                dim = _cache_batch_dim(name, leaf)
                if id(leaf) not in seen:
                    seen[id(leaf)] = leaf.clone() if dim is None else leaf.narrow(dim, start, size)
                return seen[id(leaf)]
            return size if name in _BATCH_SIZE_ATTRIBUTES and leaf == whole else leaf

        return visit

    starts = accumulate(sizes[:-1], initial=0)
    return [_rebuild_cache("", value, cut(start, size)) for start, size in zip(starts, sizes, strict=True)]


def _merge_caches(parts: Sequence[Any]) -> Any:
    _check_not_quantized(parts[0], MergeError)
    return _merge_cache_values("", parts, [_cache_batch_size(part) or 0 for part in parts], type(parts[0]).__name__, {})


def _merge_cache_values(name: str, parts: Sequence[Any], sizes: Sequence[int], path: str, seen: MergedTensors) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise MergeError(f"{path} is of different types: {[type(part).__name__ for part in parts]}")
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise MergeError(f"{path} has different keys in the parts: {[list(part) for part in parts]}")
        return type(first)(
            (key, _merge_cache_values(name, [part[key] for part in parts], sizes, f"{path}.{key}", seen))
            for key in first
        )
    if type(first) in (list, tuple):
        if any(len(part) != len(first) for part in parts):
            raise MergeError(f"{path} has different lengths in the parts: {[len(part) for part in parts]}")
        return type(first)(
            _merge_cache_values(name, column, sizes, f"{path}.{i}", seen)
            for i, column in enumerate(zip(*parts, strict=True))
        )
    if _is_cache(first):
        if any(vars(part).keys() != vars(first).keys() for part in parts):
            raise MergeError(f"{path} has different attributes in the parts: {[list(vars(part)) for part in parts]}")
        new = shallow_copy(first)
        for key in vars(first):
            new.__dict__[key] = _merge_cache_values(
                key, [vars(part)[key] for part in parts], sizes, f"{path}.{key}", seen
            )
        return new
    if not isinstance(first, Tensor):
        return _merge_cache_settings(name, parts, sizes, path)
    same = tuple(id(part) for part in parts)
    if same not in seen:
        seen[same] = _merge_cache_tensors(name, parts, path)
    return seen[same]


def _merge_cache_tensors(name: str, parts: Sequence[Tensor], path: str) -> Tensor:
    first, dim = parts[0], _cache_batch_dim(name, parts[0])
    if dim is not None:
        return _cat_cache_tensors(parts, dim, path)
    # Counters are read: a cache whose parts stand at different positions has no whole.
    if not all(torch.equal(first, part.to(first.device)) for part in parts[1:]):
        raise MergeError(f"{path} differs between the parts: {[part.tolist() for part in parts]}")
    return first.clone()


def _merge_cache_settings(name: str, parts: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    if name in _BATCH_SIZE_ATTRIBUTES and list(parts) == list(sizes):
        return sum(sizes)
    if isinstance(parts[0], SCALARS) and any(part != parts[0] for part in parts):
        raise MergeError(f"{path} differs between the parts: {list(parts)}")
    return parts[0]


def _cat_cache_tensors(parts: Sequence[Tensor], dim: int, path: str) -> Tensor:
    shapes = {tuple(part.shape[:dim] + part.shape[dim + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise MergeError(
            f"{path} has different lengths in the parts: {[tuple(part.shape) for part in parts]}; "
            "pad the inputs to one length, or leave the cache out of the outputs"
        )
    return torch.cat(list(parts), dim)


def _map_cache(fn: TensorFn, value: Any) -> Any:
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

    new = _rebuild_cache("", value, visit)
    if all(old == now for old, now in changes.items()):
        return new
    # A layer also remembers where its tensors are, and of what type.
    return _rebuild_cache(
        "", new, lambda _, leaf: changes.get(leaf, leaf) if type(leaf) in (torch.device, torch.dtype) else leaf
    )


def _move_cache(value: Any, device: Any) -> Any:
    """The cache on a device. Counters are copied even if they are there already: `forward` writes to them."""
    return _map_cache(lambda tensor: tensor.to(device, copy=tensor.dim() == 0), value)


CACHE = TypeHandler(_cache_batch_size, _split_cache, _merge_caches, _map_cache, _move_cache)

# Hugging Face's BatchEncoding: a dictionary of tensors, arrays or lists of samples, and what a fast tokenizer knows of
# each sample.


def _num_samples(value: Any) -> int | None:
    """How many samples an item tells of, or None for one that belongs to no sample in particular."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, bool)):
        return len(value)
    return None


def _is_per_sample(value: Any, size: int | None) -> bool:
    """Whether an item has one entry for each of so many samples; a list of numbers may, but does not tell how many."""
    return (len(value) if isinstance(value, list) else _num_samples(value)) == size


def _encoding_size(encoding: Any) -> int | None:
    lengths = {key: length for key, value in encoding.data.items() if (length := _num_samples(value)) is not None}
    sizes = set(lengths.values()) - {1}
    if len(sizes) > 1:
        raise StructureError(
            f"the items of a {type(encoding).__name__} have different sizes: {lengths}; "
            "pass them as arguments of their own, with `in_dims` for each"
        )
    return next(iter(sizes), 1) if lengths else None


def _split_encoding(encoding: Any, sizes: Sequence[int]) -> list[Any]:
    whole = sum(sizes)
    starts = list(accumulate(sizes[:-1], initial=0))
    return [_narrow_encoding(encoding, start, start + size, whole) for start, size in zip(starts, sizes, strict=True)]


def _narrow_encoding(encoding: Any, start: int, stop: int, whole: int) -> Any:
    new = shallow_copy(encoding)
    new.data = {
        key: value[start:stop] if _is_per_sample(value, whole) else value for key, value in encoding.data.items()
    }
    tokens = vars(encoding).get("_encodings")
    if tokens is not None and len(tokens) == whole:
        new._encodings = list(tokens[start:stop])
    return new


def _merge_encodings(parts: Sequence[Any]) -> Any:
    sizes = [_encoding_size(part) for part in parts]
    first = parts[0]
    if any(part.data.keys() != first.data.keys() for part in parts):
        raise MergeError(f"the items of the parts differ: {[list(part.data) for part in parts]}")
    new = shallow_copy(first)
    new.data = {key: _merge_encoding_items(key, [part.data[key] for part in parts], sizes) for key in first.data}
    tokens = [vars(part).get("_encodings") for part in parts]
    if all(some is not None and len(some) == size for some, size in zip(tokens, sizes, strict=True)):
        new._encodings = [one for some in tokens for one in some]
    return new


def _merge_encoding_items(key: str, items: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    first = items[0]
    if all(item is first for item in items):
        return first
    if not all(_is_per_sample(item, size) for item, size in zip(items, sizes, strict=True)):
        if all(_items_equal(first, item) for item in items[1:]):
            return first
        raise MergeError(f"`{key}` differs between the parts ({summarize_values(items)}) and does not follow the batch")
    if isinstance(first, Tensor):
        return torch.cat(list(items))
    if isinstance(first, np.ndarray):
        return np.concatenate(items)
    return [sample for item in items for sample in item]


def _items_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _map_encoding(fn: TensorFn, encoding: Any) -> Any:
    new = shallow_copy(encoding)
    new.data = map_tensors(fn, encoding.data)
    return new


BATCH_ENCODING = TypeHandler(_encoding_size, _split_encoding, _merge_encodings, _map_encoding)


# TensorDict and tensorclass know their batch and cut themselves.


def _tensordict_size(value: Any) -> int | None:
    return int(value.batch_size[0]) if len(value.batch_size) else None


def _split_tensordict(value: Any, sizes: Sequence[int]) -> list[Any]:
    return list(value.split(list(sizes), 0))


def _merge_tensordicts(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts), 0)


def _map_tensordict(fn: TensorFn, value: Any) -> Any:
    mapped: list[Tensor] = []
    value.apply(lambda tensor: mapped.append(fn(tensor)))
    # A TensorDict that declares a device moves every tensor there, so it must be told the new one first.
    devices = {tensor.device for tensor in mapped}
    device = devices.pop() if len(devices) == 1 and value.device is not None else None
    tensors = iter(mapped)
    return value.apply(lambda _: next(tensors), device=device)


TENSOR_DICT = TypeHandler(_tensordict_size, _split_tensordict, _merge_tensordicts, _map_tensordict)


def _is_tensorclass(cls: type) -> bool:
    return bool(getattr(cls, "_is_tensorclass", False))


def register_optional_types() -> None:
    """Teach the structure layer the optional packages' types, by name."""
    add_handler("transformers.tokenization_utils_base.BatchEncoding", BATCH_ENCODING)
    add_handler("transformers.cache_utils.Cache", CACHE)
    add_handler("tensordict.base.TensorDictBase", TENSOR_DICT)
    # A class decorated with `@tensorclass` has no parent that could be named.
    add_handler_if(_is_tensorclass, TENSOR_DICT)
    add_handler("torch_geometric.data.batch.Batch", GRAPH_BATCH)
    add_handler("torch_geometric.data.data.Data", GRAPH)
    add_handler("torch_geometric.data.hetero_data.HeteroData", GRAPH)
