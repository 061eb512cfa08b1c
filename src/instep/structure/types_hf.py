"""Type handlers for Hugging Face caches and for TensorDict, and the registration of all optional types."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.tree import SCALARS, Path, format_path, shallow_copy
from instep.structure.types import TensorFn, TypeHandler, add_handler, add_handler_if
from instep.structure.types_pyg import GRAPH, GRAPH_BATCH

# A cache is an object with layers, which are objects with tensors. Tensors with 3 or more dims hold samples; others
# are counters.

_REFORMER = "transformers.models.reformer.modeling_reformer"
_CACHE_CLASSES = {
    "transformers.cache_utils": ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin"),
    _REFORMER: ("ReformerDynamicCache",),  # no subclass of Cache
}
_CACHE_BATCH_DIMS = {"indexer_position_ids": 1}
_BATCH_SIZE_ATTRIBUTES = ("batch_size", "max_batch_size", "_max_batch_size")
_QUANTIZED_ATTRIBUTES = ("_quantized_keys", "_quantized_values", "_quantized_key_cache", "_quantized_value_cache")


def _cache_children(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys and children of a container, cache or layer; None for a leaf."""
    if isinstance(value, dict):
        return list(value.items())
    if type(value) in (list, tuple):
        return list(enumerate(value))
    modules = [(sys.modules.get(module), names) for module, names in _CACHE_CLASSES.items()]
    classes = tuple(getattr(module, name) for module, names in modules for name in names if hasattr(module, name))
    return list(vars(value).items()) if isinstance(value, classes) else None


def _cache_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    children = _cache_children(value)
    if children is None:
        yield path, value
    for key, child in children or ():
        yield from _cache_leaves(child, (*path, key))


def _rebuild_cache(value: Any, leaves: Iterator[Any]) -> Any:
    """Copy a cache, its layers and containers, with new leaves in the order of `_cache_leaves`."""
    children = _cache_children(value)
    if children is None:
        return next(leaves)
    items = [(key, _rebuild_cache(child, leaves)) for key, child in children]
    if isinstance(value, dict):
        return type(value)(items)
    if isinstance(value, (list, tuple)):
        return type(value)([child for _, child in items])
    new = shallow_copy(value)
    vars(new).update(items)
    return new


def _attribute_name(path: Path) -> str:
    return next((key for key in reversed(path) if isinstance(key, str)), "")


def _cache_batch_dim(path: Path, leaf: Any) -> int | None:
    """The batch dim of a leaf; None for counters and settings."""
    if not isinstance(leaf, Tensor) or leaf.dim() < 3:
        return None
    return _CACHE_BATCH_DIMS.get(_attribute_name(path), 0)


def _cache_batch_size(value: Any) -> int | None:
    _check_not_quantized(value, StructureError)
    sizes: dict[int, Path] = {}
    for path, leaf in _cache_leaves(value):
        dim = _cache_batch_dim(path, leaf)
        if dim is not None:
            sizes.setdefault(leaf.shape[dim], path)
    if len(sizes) > 1:
        found = ", ".join(f"{size} samples in {format_path(path)}" for size, path in sizes.items())
        raise StructureError(
            f"a {type(value).__name__} holds batches of different sizes ({found}); fill every layer with the same "
            "samples, or select the same ones from every layer"
        )
    return next(iter(sizes), None)


def _check_not_quantized(value: Any, error: type[Exception]) -> None:
    for path, leaf in _cache_leaves(value):
        name = _attribute_name(path)
        if name in _QUANTIZED_ATTRIBUTES and leaf is not None:
            where = format_path(path[: path.index(name) + 1])
            raise error(
                f"a quantized {type(value).__name__} ({where}) can be neither split nor merged; use a DynamicCache"
            )


def _split_cache(value: Any, sizes: Sequence[int]) -> list[Any]:
    _check_not_quantized(value, StructureError)
    leaves, batch_size = list(_cache_leaves(value)), sum(sizes)

    def part(start: int, size: int) -> Any:
        tensors: dict[int, Tensor] = {}  # a tensor that is in two attributes stays one tensor

        def narrow(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                is_batch_size = _attribute_name(path) in _BATCH_SIZE_ATTRIBUTES and leaf == batch_size
                return size if is_batch_size else leaf
            if id(leaf) not in tensors:
                dim = _cache_batch_dim(path, leaf)
                tensors[id(leaf)] = leaf.clone() if dim is None else leaf.narrow(dim, start, size)
            return tensors[id(leaf)]

        return _rebuild_cache(value, iter([narrow(path, leaf) for path, leaf in leaves]))

    starts = accumulate(sizes[:-1], initial=0)
    return [part(start, size) for start, size in zip(starts, sizes, strict=True)]


def _merge_caches(parts: Sequence[Any]) -> Any:
    first, name = parts[0], type(parts[0]).__name__
    _check_not_quantized(first, MergeError)
    sizes = [_cache_batch_size(part) or 0 for part in parts]
    tables = [dict(_cache_leaves(part)) for part in parts]
    for path in dict.fromkeys(path for table in tables for path in table):
        present = [index for index, table in enumerate(tables) if path in table]
        if len(present) < len(parts):
            missing = next(index for index in range(len(parts)) if index not in present)
            where = format_path((name, *path))
            raise MergeError(f"{where} is in the cache of part {present[0]} and not in that of part {missing}")
    merged: list[Any] = []
    tensors: dict[tuple[int, ...], Tensor] = {}  # a tensor that is in two attributes stays one tensor
    for path in tables[0]:
        leaves = [table[path] for table in tables]
        key = tuple(map(id, leaves))
        if key in tensors:
            merged.append(tensors[key])
            continue
        merged.append(_merge_cache_leaves(path, leaves, sizes, format_path((name, *path))))
        if isinstance(merged[-1], Tensor):
            tensors[key] = merged[-1]
    return _rebuild_cache(first, iter(merged))


def _merge_cache_leaves(path: Path, leaves: Sequence[Any], sizes: Sequence[int], where: str) -> Any:
    first = leaves[0]
    if any(type(leaf) is not type(first) for leaf in leaves):
        raise MergeError(f"{where} is of different types: {[type(leaf).__name__ for leaf in leaves]}")
    if not isinstance(first, Tensor):
        if _attribute_name(path) in _BATCH_SIZE_ATTRIBUTES and leaves == list(sizes):
            return sum(sizes)
        if isinstance(first, SCALARS) and any(leaf != first for leaf in leaves):
            raise MergeError(f"{where} differs between the parts: {list(leaves)}")
        return first
    dim = _cache_batch_dim(path, first)
    if dim is None:
        if not all(torch.equal(first, leaf.to(first.device)) for leaf in leaves[1:]):
            raise MergeError(f"{where} differs between the parts: {[leaf.tolist() for leaf in leaves]}")
        return first.clone()
    if len({(*leaf.shape[:dim], *leaf.shape[dim + 1 :]) for leaf in leaves}) > 1:
        raise MergeError(
            f"{where} has different lengths in the parts: {[tuple(leaf.shape) for leaf in leaves]}; "
            "pad the inputs to one length, or leave the cache out of the outputs"
        )
    return torch.cat(list(leaves), dim)


def _map_cache(fn: TensorFn, value: Any) -> Any:
    leaves = [leaf for _, leaf in _cache_leaves(value)]
    tensors: dict[int, Tensor] = {}
    changes: dict[Any, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in tensors:
            new = tensors[id(leaf)] = fn(leaf)
            if leaf.dim() > 0:
                changes.setdefault(leaf.device, new.device)
                changes.setdefault(leaf.dtype, new.dtype)

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return tensors[id(leaf)]
        # Layers also store the device and dtype of their tensors.
        return changes.get(leaf, leaf) if type(leaf) in (torch.device, torch.dtype) else leaf

    return _rebuild_cache(value, map(replace, leaves))


def _cache_to_device(value: Any, device: Any) -> Any:
    """Move a cache. Counters are copied even if they are on the device, because `forward` writes to them."""
    return _map_cache(lambda tensor: tensor.to(device, copy=tensor.dim() == 0), value)


CACHE = TypeHandler(_cache_batch_size, _split_cache, _merge_caches, _map_cache, _cache_to_device)


# TensorDict and tensorclass know their batch size and can split themselves.


def _tensordict_size(value: Any) -> int | None:
    return int(value.batch_size[0]) if len(value.batch_size) else None


def _split_tensordict(value: Any, sizes: Sequence[int]) -> list[Any]:
    return list(value.split(list(sizes), 0))


def _merge_tensordicts(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts), 0)


def _map_tensordict(fn: TensorFn, value: Any) -> Any:
    mapped: list[Tensor] = []
    value.apply(lambda tensor: mapped.append(fn(tensor)))
    # A TensorDict that has a device moves its tensors there, so the new device has to be given.
    devices = {tensor.device for tensor in mapped}
    device = devices.pop() if len(devices) == 1 and value.device is not None else None
    tensors = iter(mapped)
    return value.apply(lambda _: next(tensors), device=device)


TENSOR_DICT = TypeHandler(_tensordict_size, _split_tensordict, _merge_tensordicts, _map_tensordict)


def _is_tensorclass(cls: type) -> bool:
    return bool(getattr(cls, "_is_tensorclass", False))


def register_optional_types() -> None:
    """Register the types of optional packages by name, without importing the packages."""
    add_handler("transformers.cache_utils.Cache", CACHE)
    add_handler(f"{_REFORMER}.ReformerDynamicCache", CACHE)
    add_handler("tensordict.base.TensorDictBase", TENSOR_DICT)
    add_handler_if(_is_tensorclass, TENSOR_DICT)  # classes decorated with `@tensorclass` have no common base class
    add_handler("torch_geometric.data.batch.Batch", GRAPH_BATCH)
    add_handler("torch_geometric.data.data.Data", GRAPH)
    add_handler("torch_geometric.data.hetero_data.HeteroData", GRAPH)
