"""Parts of the index tensors and adjacency matrices of PyTorch Geometric: `EdgeIndex`, `Index` and sparse tensors.

An `EdgeIndex` or `Index` also has the number of nodes that it refers to, its sort order, and these values for each
graph that was concatenated. A part gets those of its own graphs. Cached pointers are left out; they are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from instep.errors import StructureError

_COMPRESSED_DIMS = {torch.sparse_csr: (0, 1), torch.sparse_csc: (1, 0)}
"""By layout: the dim whose entries are compressed to pointers, and the other one."""


def add_increment(value: Tensor, increment: Tensor) -> Tensor:
    """Add an increment. A value to which 0 is added stays a view."""
    if increment.dim() == 0 and int(increment) == 0:
        return value
    return value + increment.to(value.device)


# EdgeIndex and Index


def is_index(value: Any) -> bool:
    """Whether a tensor is an `EdgeIndex` or an `Index`."""
    return isinstance(value, Tensor) and hasattr(value, "_cat_metadata")


def _is_edge_index(value: Any) -> bool:
    return hasattr(value, "_sparse_size")


def _sizes(value: Any) -> tuple[int | None, ...]:
    """The number of nodes in each row of the index; None where it is unknown."""
    return tuple(value._sparse_size) if _is_edge_index(value) else (value._dim_size,)


def _shift(sizes: Sequence[int | None], increment: Tensor, sign: int) -> tuple[int | None, ...]:
    steps = increment.flatten().tolist()
    steps = steps if len(steps) == len(sizes) else steps * len(sizes)
    return tuple([None if size is None else size + sign * step for size, step in zip(sizes, steps, strict=True)])


def _largest(sizes: Sequence[Sequence[int | None]]) -> tuple[int | None, ...]:
    columns = [[size for size in column if size is not None] for column in zip(*sizes, strict=True)]
    return tuple([max(column) if len(column) == len(sizes) else None for column in columns])


def _graph_sizes(value: Any) -> list[tuple[int | None, ...]]:
    """`_sizes` of each graph, from the metadata."""
    metadata = value._cat_metadata
    return list(metadata.sparse_size) if _is_edge_index(value) else [(size,) for size in metadata.dim_size]


def _order(value: Any) -> Any:
    """The sort order of an `EdgeIndex`, or whether an `Index` is sorted."""
    return value._sort_order if _is_edge_index(value) else value._is_sorted


def _verified_order(order: Any, data: Tensor) -> Any:
    """The sort order if the entries are in this order, as torch_geometric finds it for concatenated indices."""
    if not order:
        return order
    keys = data if data.ndim == 1 else data[0 if order.value == "row" else 1]
    return order if bool((keys.diff() >= 0).all()) else None


def _new_index(value: Any, data: Tensor, sizes: Sequence[int | None], order: Any, columns: dict[str, Any]) -> Any:
    """An index like `value` with other entries. `columns` is the metadata of its graphs; empty if there is none."""
    if _is_edge_index(value):
        undirected = all(columns["is_undirected"]) if columns else value._is_undirected
        new = type(value)(data, sparse_size=tuple(sizes), sort_order=order, is_undirected=undirected)
    else:
        new = type(value)(data, dim_size=sizes[0], is_sorted=bool(order))
    if columns:
        new._cat_metadata = type(value._cat_metadata)(**columns)
    return new


def _columns(value: Any, graphs: slice, sizes: Sequence[tuple[int | None, ...]]) -> dict[str, Any]:
    """The metadata of some graphs, with these sizes."""
    columns = {name: column[graphs] for name, column in value._cat_metadata._asdict().items()}
    if _is_edge_index(value):
        return {**columns, "sparse_size": list(sizes)}
    return {**columns, "dim_size": [size for (size,) in sizes]}


def narrow_index(value: Any, bounds: tuple[int, int], graphs: tuple[int, int], incs: Tensor) -> Any:
    """The entries of an index that belong to the graphs `start` to `stop`. `incs` has the increment of each graph."""
    start, stop = graphs
    data = add_increment(value.as_tensor()[..., bounds[0] : bounds[1]], -incs[start])
    metadata = value._cat_metadata
    if metadata is not None and len(metadata.nnz) == len(incs):
        sizes = [_shift(size, incs[start], -1) for size in _graph_sizes(value)[start:stop]]
        columns = _columns(value, slice(start, stop), sizes)
        order = _order(value) or _verified_order(
            columns["sort_order" if _is_edge_index(value) else "is_sorted"][0], data
        )
        return _new_index(value, data, _largest(sizes), order, columns)
    whole = _sizes(value)
    if bool(incs.any()):  # the nodes of the part end where those of the next graph begin
        known = [None if size is None else 0 for size in whole]
        end = whole if stop == len(incs) else _shift(known, incs[stop], 1)
        whole = _shift(end, incs[start], -1)
    return _new_index(value, data, whole, _order(value), {})


def cat_indices(values: Sequence[Any], offsets: Sequence[Tensor]) -> Any:
    """The inverse of `narrow_index`. `offsets` has what is added to the entries of each part."""
    first = values[0]
    data = torch.cat([add_increment(value.as_tensor(), o) for value, o in zip(values, offsets, strict=True)], -1)
    sizes = _largest([_shift(_sizes(value), offset, 1) for value, offset in zip(values, offsets, strict=True)])
    columns: dict[str, Any] = {}
    if all(value._cat_metadata is not None for value in values):
        for value, offset in zip(values, offsets, strict=True):
            shifted = [_shift(size, offset, 1) for size in _graph_sizes(value)]
            for name, column in _columns(value, slice(None), shifted).items():
                columns[name] = [*columns.get(name, []), *column]
    return _new_index(first, data, sizes, _verified_order(_order(first), data), columns)


# Sparse adjacency matrices. The graphs of a batch are the blocks of its diagonal.


def is_sparse_matrix(value: Any) -> bool:
    """Whether a value is a sparse tensor that `narrow_sparse` can cut."""
    return isinstance(value, Tensor) and (value.layout in _COMPRESSED_DIMS or value.layout is torch.sparse_coo)


def narrow_sparse(value: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The block of a sparse matrix in these ranges of rows and columns. Reading the entries synchronizes.

    `StructureError` if a row (of CSC, a column) of the block has entries outside of it.
    """
    shape = (*[stop - start for start, stop in ranges], *value.shape[2:])
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        rows, columns = value.indices()
        limits = torch.tensor(ranges[0], device=rows.device)
        low, high = torch.searchsorted(rows.contiguous(), limits).tolist()
        inner = _shift_block(columns[low:high], ranges[1])
        indices = torch.stack([rows[low:high] - ranges[0][0], inner])
        return torch.sparse_coo_tensor(
            indices, value.values()[low:high], shape, is_coalesced=True, check_invariants=False
        )
    major, minor = _COMPRESSED_DIMS[value.layout]
    by_rows = value.layout is torch.sparse_csr
    pointers = value.crow_indices() if by_rows else value.ccol_indices()
    entries = value.col_indices() if by_rows else value.row_indices()
    pointers = pointers[ranges[major][0] : ranges[major][1] + 1]
    low, high = int(pointers[0]), int(pointers[-1])
    inner = _shift_block(entries[low:high], ranges[minor])
    return torch.sparse_compressed_tensor(
        pointers - low, inner, value.values()[low:high], shape, layout=value.layout, check_invariants=False
    )


def _shift_block(entries: Tensor, bounds: tuple[int, int]) -> Tensor:
    if entries.numel() and (int(entries.min()) < bounds[0] or int(entries.max()) >= bounds[1]):
        raise StructureError("it connects nodes of different graphs")
    return entries - bounds[0]


def cat_sparse(values: Sequence[Tensor], dims: tuple[int, ...]) -> Tensor:
    """Concatenate sparse matrices along one dim, or along the diagonal."""
    from torch_geometric.utils.sparse import cat

    merged: Tensor = cat(list(values), dim=dims if len(dims) > 1 else dims[0])
    return merged
