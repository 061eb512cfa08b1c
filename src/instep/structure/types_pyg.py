"""Type handlers for PyTorch Geometric graphs and batches of graphs.

A batch concatenates the attributes of its graphs. Its `_slice_dict` has the bounds of the graphs in each attribute, and
its `_inc_dict` what was added to the values of each graph, such as the number of preceding nodes for `edge_index`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.shapes import summarize_values
from instep.structure.tree import map_tensors
from instep.structure.types import TensorFn, TypeHandler
from instep.structure.types_pyg_tensors import (
    add_increment,
    cat_indices,
    cat_sparse,
    is_index,
    is_sparse_matrix,
    narrow_index,
    narrow_sparse,
)
from instep.structure.types_torch import tensor_handler


class _Collated(NamedTuple):
    """An attribute of a batch, with the bounds of its graphs and their increments."""

    value: Any
    slices: Tensor
    incs: Tensor | None


_NODE_ATTRIBUTES = ("x", "feat", "pos", "node_type", "n_id")
"""Attributes from which PyTorch Geometric infers the number of nodes."""


def _num_graphs(batch: Any) -> int | None:
    count = getattr(batch, "_num_graphs", None)
    if count is not None:
        return int(count)
    for store in batch.stores:
        if isinstance(store.get("ptr"), Tensor):
            return int(store["ptr"].numel()) - 1
    raise StructureError(
        f"the number of graphs of a {type(batch).__name__} without `ptr` is unknown; use `Batch.from_data_list`"
    )


def _slice_and_inc_tables(batch: Any) -> tuple[Any, Any]:
    slices, incs = getattr(batch, "_slice_dict", None), getattr(batch, "_inc_dict", None)
    if slices is None or incs is None:
        raise StructureError(f"only a {type(batch).__name__} of `Batch.from_data_list` can be split")
    return slices, incs


def _store_table(table: Any, store: Any) -> Any:
    """The slices or increments of one store. Stores of node and edge types have a table of their own."""
    return table if store._key is None else table.get(store._key, {})


def _copy_table(table: Any) -> Any:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _cat_dim(batch: Any, key: str, store: Any, value: Tensor) -> int:
    """The dim in which the graphs are concatenated."""
    dim = batch.__cat_dim__(key, value, store)
    if isinstance(dim, tuple) or tensor_handler(value) is not None:
        raise StructureError(
            f"`{key}` is a tensor of layout {value.layout}, which cannot be split; store edges as `edge_index`"
        )
    return dim or 0


def _block_dims(batch: Any, key: str, store: Any, value: Tensor) -> tuple[int, ...]:
    """The dims in which the matrices of the graphs are concatenated: both, for an adjacency matrix."""
    dim = batch.__cat_dim__(key, value, store)
    return tuple(dim) if isinstance(dim, tuple) else (dim or 0,)


def _concatenated_sizes(batch: Any, key: str, store: Any, value: Tensor) -> list[int]:
    """The sizes of a tensor in the dims in which the graphs are concatenated."""
    dims = _block_dims(batch, key, store, value) if is_sparse_matrix(value) else (_cat_dim(batch, key, store, value),)
    return [value.shape[dim] for dim in dims]


def _get_collated(batch: Any, key: str, store: Any) -> _Collated | None:
    """An attribute that `Batch.from_data_list` has concatenated; None for any other."""
    slices, incs = (_store_table(table, store) for table in _slice_and_inc_tables(batch))
    if key not in slices:
        return None
    if not isinstance(slices[key], Tensor):
        raise StructureError(
            f"`{key}` is a list or dictionary of tensors; store each tensor as an attribute of its own"
        )
    item = _Collated(store[key], slices[key], incs[key])
    if (
        isinstance(item.value, Tensor)
        and _concatenated_sizes(batch, key, store, item.value) != slices[key][-1].reshape(-1).tolist()
    ):
        raise StructureError(f"`{key}` was replaced after batching, so its graphs are unknown; set it before")
    return item


# Split


def _split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes[:-1], initial=0)
    return [_narrow_batch(batch, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _narrow_batch(batch: Any, start: int, stop: int) -> Any:
    new = copy.copy(batch)
    slices, incs = map(_copy_table, _slice_and_inc_tables(batch))
    for old, store in zip(batch.stores, new.stores, strict=True):
        for key in list(old.keys()):
            item = _get_collated(batch, key, old)
            if item is not None:
                item = _narrow_attribute(batch, key, old, item, start, stop)
                store[key], _store_table(slices, old)[key], _store_table(incs, old)[key] = item
            elif key != "num_nodes":
                store[key] = _narrow_uncollated(batch, old, key, start, stop)
        counts = vars(old).get("_num_nodes")
        if counts is not None:
            store._num_nodes = counts[start:stop]
            store["num_nodes"] = sum(store._num_nodes)
    new._num_graphs, new._slice_dict, new._inc_dict = stop - start, slices, incs
    return new


def _narrow_attribute(batch: Any, key: str, store: Any, item: _Collated, start: int, stop: int) -> _Collated:
    value, slices, incs = item
    new_slices = slices[start : stop + 1] - slices[start]
    if not isinstance(value, Tensor):
        return _Collated(value[start:stop], new_slices, None)
    if is_sparse_matrix(value):
        ranges = [(0, value.shape[0]), (0, value.shape[1])]
        bounds = zip(slices[start].tolist(), slices[stop].tolist(), strict=True)
        for dim, limits in zip(_block_dims(batch, key, store, value), bounds, strict=True):
            ranges[dim] = limits
        return _Collated(_narrow_block(key, value, ranges), new_slices, None)
    first, last = int(slices[start]), int(slices[stop])
    if is_index(value):
        increments = torch.zeros(len(slices) - 1, dtype=torch.long) if incs is None else incs
        part = narrow_index(value, (first, last), (start, stop), increments)
        return _Collated(part, new_slices, None if incs is None else incs[start:stop] - incs[start])
    new_value = value.narrow(_cat_dim(batch, key, store, value), first, last - first)
    if incs is None:
        return _Collated(new_value, new_slices, None)
    return _Collated(add_increment(new_value, -incs[start]), new_slices, incs[start:stop] - incs[start])


def _narrow_block(key: str, value: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    try:
        return narrow_sparse(value, ranges)
    except StructureError as error:
        raise StructureError(f"`{key}` cannot be split: {error}") from error


def _narrow_uncollated(batch: Any, store: Any, key: str, start: int, stop: int) -> Any:
    """The part of an attribute without slices: a `batch` or `ptr` vector, or one that was added after batching."""
    value = store[key]
    suffix, followed = _followed_slices(batch, store, key)
    if key == "ptr" or (suffix == "ptr" and followed is not None):
        return value[start : stop + 1] - value[start]
    if key == "batch":
        nodes = _node_slices(batch, store)
        return value[nodes[start] : nodes[stop]] - start
    if followed is not None:
        return value[int(followed[start]) : int(followed[stop])] - start
    if is_sparse_matrix(value):
        _check_adjacency(batch, store, key, value)
        nodes = _node_slices(batch, store)
        return _narrow_block(key, value, [(nodes[start], nodes[stop])] * 2)
    slices = _infer_slices(batch, store, key, value)
    if slices is None:
        return value
    first, last = int(slices[start]), int(slices[stop])
    if isinstance(value, Tensor):
        return value.narrow(_cat_dim(batch, key, store, value), first, last - first)
    return value[first:last]


def _check_adjacency(batch: Any, store: Any, key: str, value: Tensor) -> None:
    """`StructureError` unless a sparse attribute that was added after batching is the adjacency matrix of all nodes."""
    is_adjacency = _block_dims(batch, key, store, value) == (0, 1) and "batch" in store
    if not is_adjacency or set(value.shape[:2]) != {_node_slices(batch, store)[-1]}:
        raise StructureError(f"`{key}` was added after batching, so its graphs are unknown; set it before")


def _followed_slices(batch: Any, store: Any, key: str) -> tuple[str, Tensor | None]:
    """The suffix of `x_batch` or `x_ptr` from `follow_batch=["x"]`, and the slices of `x`; None for other keys."""
    name, _, suffix = key.rpartition("_")
    slices = _store_table(_slice_and_inc_tables(batch)[0], store).get(name) if suffix in ("batch", "ptr") else None
    return suffix, slices


def _node_slices(batch: Any, store: Any) -> list[int]:
    """The bounds of the graphs among the nodes."""
    counts = vars(store).get("_num_nodes")
    if counts is not None:
        return list(accumulate(counts, initial=0))
    slices = _store_table(_slice_and_inc_tables(batch)[0], store)
    tables = [slices[key] for key in _NODE_ATTRIBUTES if isinstance(slices.get(key), Tensor)]
    bounds: list[int] = (tables[0] if tables else store["ptr"]).tolist()  # `ptr` may be on a device: synchronizes
    return bounds


def _infer_slices(
    batch: Any, store: Any, key: str, value: Any, *, allow_ambiguous: bool = False
) -> Sequence[int] | None:
    """The bounds of the graphs in an attribute that was added after batching; None if it is the same for all graphs.

    The length of the attribute shows whether it belongs to graphs, edges or nodes. If several match, that is an error
    unless `allow_ambiguous`, which is enough for a merge.
    """
    if isinstance(value, Tensor) and value.dim():
        length = value.shape[_cat_dim(batch, key, store, value)]
    elif isinstance(value, (list, tuple)):
        length = len(value)
    else:
        return None
    edges = _store_table(_slice_and_inc_tables(batch)[0], store).get("edge_index")
    levels: list[Sequence[int]] = [range(batch.num_graphs + 1)]
    if isinstance(edges, Tensor):
        levels.append(edges.tolist())
    if "batch" in store:
        levels.append(_node_slices(batch, store))
    matches = [list(level) for level in levels if level[-1] == length]
    holds_indices = any(word in key for word in ("index", "face", "batch"))
    if holds_indices or not matches or not (allow_ambiguous or all(level == matches[0] for level in matches)):
        raise StructureError(f"`{key}` was added after batching, so its graphs are unknown; set it before")
    return matches[0]


# Merge


def _check_same_keys(key_sets: Sequence[Iterable[Any]], what: str, owner: str = "") -> None:
    tables = [set(keys) for keys in key_sets]
    for key in dict.fromkeys(key for keys in key_sets for key in keys):
        has_key = [key in table for table in tables]
        if not all(has_key):
            raise MergeError(
                f"{what} {key!r}{owner} is in part {has_key.index(True)} and not in part {has_key.index(False)}; give "
                "it to every graph, without rows if there is nothing"
            )


def _stores_by_key(batch: Any) -> dict[Any, Any]:
    """The stores of a batch: one for itself, and one for each type of nodes and edges."""
    return {store._key: store for store in batch.stores}


def _merge(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    stores_by_key = [_stores_by_key(part) for part in parts]
    _check_same_keys(stores_by_key, "the node or edge type")
    for key in stores_by_key[0]:
        owner = "" if key is None else f" of {key!r}"
        _check_same_keys([stores[key].keys() for stores in stores_by_key], "the attribute", owner)
    new = copy.copy(parts[0])
    slices, incs = map(_copy_table, _slice_and_inc_tables(parts[0]))
    # The increment of the next part depends on the last graph of this one, by the rule of its class.
    last_graphs = [_last_graph(part) for part in parts[:-1]]
    for store in new.stores:
        stores = [table[store._key] for table in stores_by_key]
        for key in list(store.keys()):
            found = [_get_collated(part, key, other) for part, other in zip(parts, stores, strict=True)]
            items = [item for item in found if item is not None]
            if items and len(items) < len(parts):
                raise MergeError(f"`{key}` was added after batching in some parts, so its graphs are unknown")
            if items:
                increments = []
                for graph in last_graphs:
                    last_store = _stores_by_key(graph)[store._key]
                    increments.append(graph.__inc__(key, last_store[key], last_store))
                value = items[0].value
                if is_sparse_matrix(value):
                    item = _cat_matrices(items, _block_dims(parts[0], key, stores[0], value))
                else:
                    dim = _cat_dim(parts[0], key, stores[0], value) if isinstance(value, Tensor) else 0
                    item = _cat_attributes(items, increments, dim)
                store[key], _store_table(slices, store)[key], _store_table(incs, store)[key] = item
            elif key != "num_nodes":
                store[key] = _cat_uncollated(parts, stores, key)
        if "_num_nodes" in vars(store):
            store._num_nodes = [count for other in stores for count in other._num_nodes]
            store["num_nodes"] = sum(store._num_nodes)
    new._num_graphs, new._slice_dict, new._inc_dict = sum(part.num_graphs for part in parts), slices, incs
    return new


def _last_graph(batch: Any) -> Any:
    """A batch of the last graph, without attributes that were added after batching."""
    new = copy.copy(batch)
    for old, store in zip(batch.stores, new.stores, strict=True):
        for key in list(old.keys()):
            if key not in ("batch", "ptr", "num_nodes") and _get_collated(batch, key, old) is None:
                del store[key]
    return _narrow_batch(new, batch.num_graphs - 1, batch.num_graphs)


def _cat_matrices(items: Sequence[_Collated], dims: tuple[int, ...]) -> _Collated:
    slices = _cat_pointers([item.slices for item in items])
    return _Collated(cat_sparse([item.value for item in items], dims), slices, None)


def _cat_attributes(items: Sequence[_Collated], increments: Sequence[Any], dim: int) -> _Collated:
    slices = _cat_pointers([item.slices for item in items])
    if not isinstance(items[0].value, Tensor):
        return _Collated([entry for item in items for entry in item.value], slices, None)
    values = [item.value for item in items]
    incs = [item.incs for item in items if item.incs is not None]
    if len(incs) < len(items):
        return _Collated(torch.cat(values, dim), slices, None)
    totals = [inc[-1] + torch.as_tensor(last) for inc, last in zip(incs[:-1], increments, strict=True)]
    offsets = list(accumulate(totals, initial=torch.zeros_like(incs[0][0])))
    if is_index(values[0]):
        value = cat_indices(values, offsets)
    else:
        value = torch.cat([add_increment(value, offset) for value, offset in zip(values, offsets, strict=True)], dim)
    return _Collated(value, slices, torch.cat([inc + offset for inc, offset in zip(incs, offsets, strict=True)]))


def _cat_pointers(pointers: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors of bounds, each of which starts at 0."""
    offsets = accumulate((pointer[-1] for pointer in pointers[:-1]), initial=torch.zeros_like(pointers[0][0]))
    shifted = [pointer[1:] + offset for pointer, offset in zip(pointers, offsets, strict=True)]
    return torch.cat([pointers[0][:1], *shifted])


def _cat_uncollated(parts: Sequence[Any], stores: Sequence[Any], key: str) -> Any:
    values = [store[key] for store in stores]
    suffix, followed = _followed_slices(parts[0], stores[0], key)
    if key == "ptr" or (suffix == "ptr" and followed is not None):
        return _cat_pointers(values)
    if key == "batch" or followed is not None:
        offsets = accumulate((part.num_graphs for part in parts[:-1]), initial=0)
        return torch.cat([value + offset for value, offset in zip(values, offsets, strict=True)])
    if is_sparse_matrix(values[0]):
        for part, store in zip(parts, stores, strict=True):
            _check_adjacency(part, store, key, store[key])
        return cat_sparse(values, (0, 1))
    levels = [
        _infer_slices(part, store, key, store[key], allow_ambiguous=True)
        for part, store in zip(parts, stores, strict=True)
    ]
    if any(level is None for level in levels):
        if any(value is not values[0] and not _values_equal(value, values[0]) for value in values):
            raise MergeError(f"`{key}` differs between the parts ({summarize_values(values)}) and is not per graph")
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(values, _cat_dim(parts[0], key, stores[0], values[0]))
    return type(values[0])(entry for value in values for entry in value)


def _values_equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right.to(left.device))
    return bool(left == right)


# A single graph is one sample.


def _map_graph(fn: TensorFn, graph: Any) -> Any:
    new = copy.copy(graph)
    for store in new.stores:
        for key, value in list(store.items()):
            store[key] = map_tensors(fn, value)
    return new


def _no_size(_graph: Any) -> None:
    return None


def _raise_split_graph(graph: Any, _sizes: Sequence[int]) -> Any:
    raise StructureError(f"a {type(graph).__name__} is one graph; batch graphs with `Batch.from_data_list`")


def _raise_merge_graph(parts: Sequence[Any]) -> Any:
    raise MergeError(f"each part is one {type(parts[0]).__name__}; return a list of graphs or a `Batch`")


def _nodes_per_graph(batch: Any) -> Tensor | None:
    """The number of nodes of each graph, of all types together."""
    counts = [store["ptr"].diff() for store in batch.stores if isinstance(store.get("ptr"), Tensor)]
    return torch.stack(counts).sum(0) if counts and len({len(count) for count in counts}) == 1 else None


GRAPH_BATCH = TypeHandler(_num_graphs, _split, _merge, _map_graph, sample_sizes=_nodes_per_graph)
GRAPH = TypeHandler(_no_size, _raise_split_graph, _raise_merge_graph, _map_graph, is_single_sample=True)
