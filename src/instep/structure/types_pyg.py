"""Type handlers for PyTorch Geometric graphs and batches of graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import MergeError, StructureError
from instep.structure.shapes import summarize_values
from instep.structure.tree import map_tensors
from instep.structure.types import TensorFn, TypeHandler
from instep.structure.types_torch import tensor_handler


class _Collated(NamedTuple):
    """A collated attribute, or one member of it where it is a list or a dictionary."""

    value: Any
    slices: Any
    incs: Any


CatDimFn = Callable[[Any], int]
IncFn = Callable[[Sequence[Any]], Any]

_NODE_KEYS = ("x", "feat", "pos", "node_type", "n_id")
"""Attributes by which PyTorch Geometric itself counts nodes."""


def _graph_count(batch: Any) -> int | None:
    known = getattr(batch, "_num_graphs", None)
    if known is not None:
        return int(known)
    for store in batch.stores:
        if isinstance(store.get("ptr"), Tensor):
            return int(store["ptr"].numel()) - 1
    raise StructureError(f"a {type(batch).__name__} without `ptr` does not tell its graphs; use `Batch.from_data_list`")


def _slice_and_inc_tables(batch: Any) -> tuple[Any, Any]:
    slices, incs = getattr(batch, "_slice_dict", None), getattr(batch, "_inc_dict", None)
    if slices is None or incs is None:
        raise StructureError(f"a {type(batch).__name__} is split only if `Batch.from_data_list` made it")
    return slices, incs


def _store_table(table: Any, store: Any) -> Any:
    """The slices or increments of one store: those of a kind of nodes or edges have a table of their own."""
    return table if store._key is None else table.get(store._key, {})


def _copy_table(table: Any) -> Any:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _cat_dim_fn(batch: Any, key: str, store: Any) -> CatDimFn:
    def dim(value: Any) -> int:
        found = batch.__cat_dim__(key, value, store)
        if isinstance(found, tuple) or tensor_handler(value) is not None:
            raise StructureError(f"`{key}` is sparse or nested, which is not split; store edges as `edge_index`")
        return found or 0

    return dim


def _member_keys(item: _Collated) -> Sequence[Any] | None:
    if isinstance(item.value, Mapping):
        return tuple(item.value)
    return range(len(item.value)) if isinstance(item.slices, (list, tuple)) else None


def _zip_members(key: str, items: Sequence[_Collated]) -> list[tuple[Any, list[_Collated]]] | None:
    """The members of collated lists or dictionaries, by key, each over all items; None for anything else."""
    names = [found for found in map(_member_keys, items) if found is not None]
    if not names:
        return None
    if len(names) < len(items):
        raise MergeError(f"`{key}` is a list or dictionary in some parts, a single value in others")
    _check_same_keys(names, "the member", f" of `{key}`")
    return [(one, [_Collated(item.value[one], item.slices[one], item.incs[one]) for item in items]) for one in names[0]]


def _collate_members(like: Any, keys: Sequence[Any], items: Sequence[_Collated]) -> _Collated:
    columns: Any = zip(*items, strict=True)
    if isinstance(like, Mapping):
        return _Collated(*(dict(zip(keys, column, strict=True)) for column in columns))
    return _Collated(*(list(column) for column in columns))


# Cutting


def _split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    starts = accumulate(sizes[:-1], initial=0)
    return [_narrow_batch(batch, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _narrow_batch(batch: Any, start: int, stop: int) -> Any:
    slices, incs = _slice_and_inc_tables(batch)
    new, new_slices, new_incs = copy.copy(batch), _copy_table(slices), _copy_table(incs)
    for old, store in zip(batch.stores, new.stores, strict=True):
        for key in list(old.keys()):
            if key in _store_table(slices, old):
                item = _Collated(old[key], _store_table(slices, old)[key], _store_table(incs, old)[key])
                item = _narrow_attribute(key, item, start, stop, _cat_dim_fn(batch, key, old))
                store[key], _store_table(new_slices, old)[key], _store_table(new_incs, old)[key] = item
            elif key != "num_nodes":
                store[key] = _narrow_uncollated(batch, old, key, start, stop)
        counts = vars(old).get("_num_nodes")
        if counts is not None:
            store._num_nodes = counts[start:stop]
            store["num_nodes"] = sum(store._num_nodes)
    new._num_graphs, new._slice_dict, new._inc_dict = stop - start, new_slices, new_incs
    return new


def _narrow_attribute(key: str, item: _Collated, start: int, stop: int, dim: CatDimFn) -> _Collated:
    members = _zip_members(key, [item])
    if members is not None:
        cut = [_narrow_attribute(f"{key}.{name}", member[0], start, stop, dim) for name, member in members]
        return _collate_members(item.value, [name for name, _ in members], cut)
    value, slices, incs = item
    new_slices = slices[start : stop + 1] - slices[start]
    if not isinstance(value, Tensor):
        return _Collated(value[start:stop], new_slices, None)
    if value.shape[dim(value)] != int(slices[-1]):
        raise StructureError(f"`{key}` was replaced after batching: its graphs cannot be determined; set it before")
    first, last = int(slices[start]), int(slices[stop])
    new_value = value.narrow(dim(value), first, last - first)
    if incs is None:
        return _Collated(new_value, new_slices, None)
    return _Collated(_add_increment(new_value, -incs[start]), new_slices, incs[start:stop] - incs[start])


def _add_increment(value: Tensor, by: Tensor) -> Tensor:
    """The value plus an increment; nothing to add leaves it as it is, a view."""
    if by.dim() == 0 and int(by) == 0:
        return value
    return value + by.to(value.device)


def _narrow_uncollated(batch: Any, store: Any, key: str, start: int, stop: int) -> Any:
    """The share of an attribute that collating did not slice: a `batch` or `ptr` vector, or one added later."""
    value = store[key]
    if key == "ptr":
        return value[start : stop + 1] - value[start]
    if key == "batch":
        nodes = _node_slices(batch, store)
        return value[nodes[start] : nodes[stop]] - start
    name, followed = _follow_batch_slices(batch, store, key)
    if followed is not None:
        return _narrow_follow_batch(value, followed, name, start, stop)
    slices = _infer_slices(batch, store, key, value)
    if slices is None:
        return value
    first, last = int(slices[start]), int(slices[stop])
    if isinstance(value, Tensor):
        return value.narrow(_cat_dim_fn(batch, key, store)(value), first, last - first)
    return value[first:last]


def _follow_batch_slices(batch: Any, store: Any, key: str) -> tuple[str, Any]:
    """For `x_batch` and `x_ptr` of `follow_batch=["x"]`: which of the two it is, and the slices of `x`."""
    name, _, suffix = key.rpartition("_")
    slices = _store_table(_slice_and_inc_tables(batch)[0], store).get(name) if suffix in ("batch", "ptr") else None
    return suffix, slices


def _narrow_follow_batch(value: Any, slices: Any, suffix: str, start: int, stop: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _narrow_follow_batch(value[key], slices[key], suffix, start, stop) for key in value}
    if isinstance(value, (list, tuple)):
        return [_narrow_follow_batch(*member, suffix, start, stop) for member in zip(value, slices, strict=True)]
    if suffix == "ptr":
        return value[start : stop + 1] - value[start]
    return value[int(slices[start]) : int(slices[stop])] - start


def _node_slices(batch: Any, store: Any) -> list[int]:
    counts = vars(store).get("_num_nodes")
    if counts is not None:
        return list(accumulate(counts, initial=0))
    slices = _store_table(_slice_and_inc_tables(batch)[0], store)
    for key in _NODE_KEYS:
        if isinstance(slices.get(key), Tensor):
            found: list[int] = slices[key].tolist()
            return found
    # Only the pointers are left to tell: on a device, this waits for it.
    pointers: list[int] = store["ptr"].tolist()
    return pointers


def _infer_slices(
    batch: Any, store: Any, key: str, value: Any, *, allow_ambiguous: bool = False
) -> Sequence[int] | None:
    """Where the graphs begin in an attribute that was added later; None for one that is the same for all graphs.

    An attribute may have as many entries as there are nodes, and as edges: `any_level` will do where it is only joined.
    """
    if isinstance(value, Tensor) and value.dim():
        length = value.shape[_cat_dim_fn(batch, key, store)(value)]
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
    fitting = [list(level) for level in levels if level[-1] == length]
    counts_nodes = any(word in key for word in ("index", "face", "batch"))
    if counts_nodes or not fitting or not (allow_ambiguous or all(level == fitting[0] for level in fitting)):
        raise StructureError(f"`{key}` was added after batching: its graphs cannot be determined; set it before")
    return fitting[0]


# Joining


def _check_same_keys(names: Sequence[Iterable[Any]], what: str, owner: str = "") -> None:
    """Refuse what some parts have and others lack, by the first such name."""
    tables = [set(some) for some in names]
    for name in dict.fromkeys(name for some in names for name in some):
        having = [index for index, table in enumerate(tables) if name in table]
        if len(having) < len(tables):
            lacking = [index for index in range(len(tables)) if index not in having]
            raise MergeError(
                f"{what} {name!r}{owner} is in part {having[0]} and not in part {lacking[0]}; give it to every graph "
                "always, without rows where there is nothing"
            )


def _stores_by_key(batch: Any) -> dict[Any, Any]:
    """The stores of a batch: one for itself, and one for each kind of nodes and edges."""
    return {store._key: store for store in batch.stores}


def _check_same_attributes(parts: Sequence[Any]) -> None:
    tables = [_stores_by_key(part) for part in parts]
    _check_same_keys(tables, "the kind of nodes or edges")
    for kind in tables[0]:
        owner = "" if kind is None else f" of {kind!r}"
        _check_same_keys([table[kind].keys() for table in tables], "the attribute", owner)


def _merge(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    _check_same_attributes(parts)
    first, tables = parts[0], [_slice_and_inc_tables(part) for part in parts]
    # What the next part is raised by depends on the last graph of this one: its class may have a rule of its own.
    lasts = [part.get_example(part.num_graphs - 1) for part in parts[:-1]]
    new, slices, incs = copy.copy(first), _copy_table(tables[0][0]), _copy_table(tables[0][1])
    for store in new.stores:
        stores = [_stores_by_key(part)[store._key] for part in parts]
        for key in list(store.keys()):
            if len({key in _store_table(table[0], store) for table in tables}) > 1:
                raise MergeError(f"`{key}` was added after batching in some parts: its graphs cannot be determined")
            if key in _store_table(slices, store):
                items = [
                    _Collated(other[key], _store_table(table[0], other)[key], _store_table(table[1], other)[key])
                    for other, table in zip(stores, tables, strict=True)
                ]
                rules = [_inc_fn(last, _stores_by_key(last)[store._key], key) for last in lasts]
                item = _cat_attributes(key, items, rules, _cat_dim_fn(first, key, stores[0]))
                store[key], _store_table(slices, store)[key], _store_table(incs, store)[key] = item
            elif key != "num_nodes":
                store[key] = _cat_uncollated(parts, stores, key)
        if "_num_nodes" in vars(store):
            store._num_nodes = [count for other in stores for count in other._num_nodes]
            store["num_nodes"] = sum(store._num_nodes)
    new._num_graphs, new._slice_dict, new._inc_dict = sum(part.num_graphs for part in parts), slices, incs
    return new


def _inc_fn(graph: Any, store: Any, key: str) -> IncFn:
    """What one graph raises the graphs after it by, for the attribute or a member of it found by its path."""

    def inc(path: Sequence[Any]) -> Any:
        value, name = store[key], key
        for step in path:
            name = step if isinstance(value, Mapping) else name
            value = value[step]
        return graph.__inc__(name, value, store)

    return inc


def _cat_attributes(
    key: str, items: Sequence[_Collated], rules: Sequence[IncFn], dim: CatDimFn, *path: Any
) -> _Collated:
    members = _zip_members(key, items)
    if members is not None:
        joined = [_cat_attributes(f"{key}.{name}", member, rules, dim, *path, name) for name, member in members]
        return _collate_members(items[0].value, [name for name, _ in members], joined)
    shifts = accumulate((item.slices[-1] for item in items[:-1]), initial=0)
    slices = torch.cat(
        [items[0].slices[:1], *(item.slices[1:] + shift for item, shift in zip(items, shifts, strict=True))]
    )
    first = items[0].value
    if not isinstance(first, Tensor):
        return _Collated([one for item in items for one in item.value], slices, None)
    if any(item.value.shape[dim(item.value)] != int(item.slices[-1]) for item in items):
        raise MergeError(f"`{key}` was replaced in a part: its graphs cannot be determined")
    values = [item.value for item in items]
    if items[0].incs is None:
        return _Collated(torch.cat(values, dim(first)), slices, None)
    totals = [item.incs[-1] + torch.as_tensor(rule(path)) for item, rule in zip(items[:-1], rules, strict=True)]
    raises = list(accumulate(totals, initial=torch.zeros_like(items[0].incs[0])))
    return _Collated(
        torch.cat([_add_increment(value, by) for value, by in zip(values, raises, strict=True)], dim(first)),
        slices,
        torch.cat([item.incs + by for item, by in zip(items, raises, strict=True)]),
    )


def _cat_uncollated(parts: Sequence[Any], stores: Sequence[Any], key: str) -> Any:
    values = [store[key] for store in stores]
    if key in ("batch", "ptr"):
        return _cat_follow_batch(values, key, [part.num_graphs for part in parts])
    suffix, followed = _follow_batch_slices(parts[0], stores[0], key)
    if followed is not None:
        return _cat_follow_batch(values, suffix, [part.num_graphs for part in parts])
    levels = [
        _infer_slices(part, store, key, store[key], allow_ambiguous=True)
        for part, store in zip(parts, stores, strict=True)
    ]
    if any(level is None for level in levels):
        if any(value is not values[0] and not _values_equal(value, values[0]) for value in values):
            raise MergeError(
                f"`{key}` differs between the parts ({summarize_values(values)}) and does not follow the graphs"
            )
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(values, _cat_dim_fn(parts[0], key, stores[0])(values[0]))
    return type(values[0])(one for value in values for one in value)


def _values_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other.to(one.device))
    return bool(one == other)


def _cat_follow_batch(values: Sequence[Any], suffix: str, graphs: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _cat_follow_batch([value[key] for value in values], suffix, graphs) for key in first}
    if isinstance(first, (list, tuple)):
        return [_cat_follow_batch(column, suffix, graphs) for column in zip(*values, strict=True)]
    if suffix == "batch":
        shifts: Any = accumulate(graphs[:-1], initial=0)
        return torch.cat([value + shift for value, shift in zip(values, shifts, strict=True)])
    shifts = accumulate((value[-1] for value in values[:-1]), initial=torch.zeros_like(first[0]))
    return torch.cat([first[:1], *(value[1:] + shift for value, shift in zip(values, shifts, strict=True))])


# One graph is a sample: it is copied around other tensors, never cut.


def _map_graph(fn: TensorFn, graph: Any) -> Any:
    new = copy.copy(graph)
    for store in new.stores:
        for key, value in list(store.items()):
            store[key] = map_tensors(fn, value)
    return new


def _unsized(_graph: Any) -> None:
    return None


def _raise_split_graph(graph: Any, _sizes: Sequence[int]) -> Any:
    raise StructureError(f"a {type(graph).__name__} is one graph; batch graphs with `Batch.from_data_list`")


def _raise_merge_graph(parts: Sequence[Any]) -> Any:
    raise MergeError(f"each part holds one {type(parts[0]).__name__}; return a list of graphs or a `Batch`")


GRAPH_BATCH = TypeHandler(_graph_count, _split, _merge, _map_graph)
GRAPH = TypeHandler(_unsized, _raise_split_graph, _raise_merge_graph, _map_graph, is_single_sample=True)
