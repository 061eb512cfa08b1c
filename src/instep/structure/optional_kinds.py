"""How values of optional packages are cut and joined.

They are registered by name: nothing here imports a package, and what needs one runs only when an object of that
package is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.cache_kind import CACHE
from instep.structure.graph_kind import GRAPH, GRAPH_BATCH
from instep.structure.shapes import brief
from instep.structure.tree import map_tensors, shallow_copy
from instep.structure.types import Kind, TensorMap, add_kind, add_kind_of

# Hugging Face's BatchEncoding: a dictionary of tensors, arrays or lists of samples, and what a fast tokenizer knows of
# each sample.


def _length(value: Any) -> int | None:
    """How many samples an item tells of, or None for one that belongs to no sample in particular."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.shape[0] if value.ndim else None
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, bool)):
        return len(value)
    return None


def _follows(value: Any, size: int | None) -> bool:
    """Whether an item has one entry for each of so many samples; a list of numbers may, but does not tell how many."""
    return (len(value) if isinstance(value, list) else _length(value)) == size


def _encoding_size(encoding: Any) -> int | None:
    lengths = {key: length for key, value in encoding.data.items() if (length := _length(value)) is not None}
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
    return [_cut_encoding(encoding, start, start + size, whole) for start, size in zip(starts, sizes, strict=True)]


def _cut_encoding(encoding: Any, start: int, stop: int, whole: int) -> Any:
    new = shallow_copy(encoding)
    new.data = {key: value[start:stop] if _follows(value, whole) else value for key, value in encoding.data.items()}
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
    new.data = {key: _join_items(key, [part.data[key] for part in parts], sizes) for key in first.data}
    tokens = [vars(part).get("_encodings") for part in parts]
    if all(some is not None and len(some) == size for some, size in zip(tokens, sizes, strict=True)):
        new._encodings = [one for some in tokens for one in some]
    return new


def _join_items(key: str, items: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    first = items[0]
    if all(item is first for item in items):
        return first
    if not all(_follows(item, size) for item, size in zip(items, sizes, strict=True)):
        if all(_equal(first, item) for item in items[1:]):
            return first
        raise MergeError(f"`{key}` differs between the parts ({brief(items)}) and does not follow the batch")
    if isinstance(first, Tensor):
        return torch.cat(list(items))
    if isinstance(first, np.ndarray):
        return np.concatenate(items)
    return [sample for item in items for sample in item]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _map_encoding(fn: TensorMap, encoding: Any) -> Any:
    new = shallow_copy(encoding)
    new.data = map_tensors(fn, encoding.data)
    return new


BATCH_ENCODING = Kind(_encoding_size, _split_encoding, _merge_encodings, _map_encoding)


# TensorDict and tensorclass know their batch and cut themselves.


def _dict_size(value: Any) -> int | None:
    return int(value.batch_size[0]) if len(value.batch_size) else None


def _split_dict(value: Any, sizes: Sequence[int]) -> list[Any]:
    return list(value.split(list(sizes), 0))


def _merge_dicts(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts), 0)


def _map_dict(fn: TensorMap, value: Any) -> Any:
    mapped: list[Tensor] = []
    value.apply(lambda tensor: mapped.append(fn(tensor)))
    # A TensorDict that declares a device moves every tensor there, so it must be told the new one first.
    devices = {tensor.device for tensor in mapped}
    device = devices.pop() if len(devices) == 1 and value.device is not None else None
    tensors = iter(mapped)
    return value.apply(lambda _: next(tensors), device=device)


TENSOR_DICT = Kind(_dict_size, _split_dict, _merge_dicts, _map_dict)


def _is_tensorclass(cls: type) -> bool:
    return bool(getattr(cls, "_is_tensorclass", False))


def install() -> None:
    """Teach the structure layer the optional packages' types, by name."""
    add_kind("transformers.tokenization_utils_base.BatchEncoding", BATCH_ENCODING)
    add_kind("transformers.cache_utils.Cache", CACHE)
    add_kind("tensordict.base.TensorDictBase", TENSOR_DICT)
    # A class decorated with `@tensorclass` has no parent that could be named.
    add_kind_of(_is_tensorclass, TENSOR_DICT)
    add_kind("torch_geometric.data.batch.Batch", GRAPH_BATCH)
    add_kind("torch_geometric.data.data.Data", GRAPH)
    add_kind("torch_geometric.data.hetero_data.HeteroData", GRAPH)
