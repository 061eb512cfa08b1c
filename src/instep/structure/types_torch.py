"""Type handlers for packed sequences, nested tensors and sparse tensors."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence, invert_permutation

from instep.errors import MergeError, StructureError
from instep.runtime.modes import set_inference_mode
from instep.structure.types import TensorFn, TypeHandler, add_handler, handler_for_type
from instep.structure.types_distributions import DISTRIBUTION


def _shard_starts(sizes: Sequence[int]) -> Iterator[int]:
    return accumulate(sizes[:-1], initial=0)


# Packed sequences. Every part, and the merged value, is what `pack_padded_sequence` gives for the same samples. Samples
# of equal length have the order of `torch.sort`, which is not stable, so the lengths are sorted again by the same call.


def _packed_size(packed: PackedSequence) -> int:
    """The number of samples. Does not synchronize: `batch_sizes` is on the CPU."""
    if packed.sorted_indices is not None:
        return int(packed.sorted_indices.shape[0])
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


def _packed_positions(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """The row of `data` for each step and sample, `[steps, samples]`, and the length of each sample, on the CPU.

    Reading the order of the samples synchronizes with their device.
    """
    steps = packed.batch_sizes
    if packed.unsorted_indices is None:
        rank = torch.arange(_packed_size(packed))
    else:
        rank = packed.unsorted_indices.cpu()
    step_starts = steps.cumsum(0) - steps
    lengths = (steps[:, None] > rank).sum(0)
    return step_starts[:, None] + rank, lengths


def _pack(cls: type, data: Tensor, positions: Tensor, lengths: Tensor, sort: bool) -> PackedSequence:
    """Pack the samples at these positions of `data`, sorted if `sort` or if their lengths are not in order."""
    order = None
    if sort or bool((lengths[1:] > lengths[:-1]).any()):
        lengths, order = torch.sort(lengths, descending=True)
        positions = positions[:, order]
    is_valid = torch.arange(positions.shape[0])[:, None] < lengths
    batch_sizes = is_valid.sum(1)
    rows = positions[is_valid].to(data.device)
    order = None if order is None else order.to(data.device)
    packed: PackedSequence = cls(
        data.index_select(0, rows), batch_sizes[batch_sizes > 0], order, invert_permutation(order)
    )
    return packed


def _split_packed(packed: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    if len(sizes) == 1:
        return [packed]
    positions, lengths = _packed_positions(packed)
    sort = packed.unsorted_indices is not None
    return [
        _pack(type(packed), packed.data, positions[:, start : start + size], lengths[start : start + size], sort)
        for start, size in zip(_shard_starts(sizes), sizes, strict=True)
    ]


def _merge_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    if len(parts) == 1:
        return parts[0]
    steps = max(len(part.batch_sizes) for part in parts)
    tables, lengths = [], []
    for start, part in zip(_shard_starts([len(part.data) for part in parts]), parts, strict=True):
        positions, length = _packed_positions(part)
        missing = steps - positions.shape[0]
        tables.append(torch.nn.functional.pad(positions + start, (0, 0, 0, missing)))
        lengths.append(length)
    return _pack(
        type(parts[0]),
        torch.cat([part.data for part in parts]),
        torch.cat(tables, 1),
        torch.cat(lengths),
        any(part.unsorted_indices is not None for part in parts),
    )


def _map_packed(fn: TensorFn, packed: PackedSequence) -> PackedSequence:
    # `batch_sizes` has to stay on the CPU.
    data = fn(packed.data)
    indices = [None if tensor is None else fn(tensor) for tensor in (packed.sorted_indices, packed.unsorted_indices)]
    return type(packed)(data, packed.batch_sizes, *indices)


def _move_packed(packed: PackedSequence, device: Any) -> PackedSequence:
    return _map_packed(lambda tensor: tensor.to(device), packed)


PACKED_SEQUENCE = TypeHandler(_packed_size, _split_packed, _merge_packed, _map_packed, _move_packed)


# Nested tensors of strided layout. Their sizes are on the CPU, so `unbind` does not synchronize.


def _split_nested_strided(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    rows = value.unbind()
    return [
        torch.nested.as_nested_tensor(list(rows[start : start + size]), layout=torch.strided)
        for start, size in zip(_shard_starts(sizes), sizes, strict=True)
    ]


def _merge_nested_strided(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor([row for part in parts for row in part.unbind()], layout=torch.strided)


# Nested tensors of jagged layout. Torch adds two of them only if they have the same ragged size, an id that torch gives
# to each offsets tensor. The offsets of parts and merged tensors are cached by that id, so that `x * mask` works on the
# parts and `merged + x` on the whole.


@functools.lru_cache(maxsize=256)
def _offsets_cache(*_key: Hashable) -> list[Any]:
    """A cell for the value of a key: a list that is empty until the value is computed."""
    return []


def _ragged_dim(value: Tensor) -> int:
    sizes: Sequence[Any] = value.shape
    return next(dim for dim, size in enumerate(sizes) if not isinstance(size, int))


def _ragged_size_id(value: Tensor) -> int:
    """The id of the ragged size. Torch computes with two jagged tensors only if their ids are equal."""
    size: Any = value.shape[_ragged_dim(value)]
    return int(size.node.nested_int())


def _build_jagged(values: Tensor, offsets: Tensor, ragged_dim: int) -> Tensor:
    if torch.is_inference_mode_enabled():
        # Torch cannot build one in inference mode from tensors that were created outside of it.
        with set_inference_mode(False), torch.no_grad():
            return _build_jagged(values, offsets, ragged_dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim)


def _split_nested_jagged(value: Any, sizes: Sequence[int]) -> list[Tensor]:
    if value.lengths() is not None:
        value = value.contiguous()
    dim, values, offsets = _ragged_dim(value), value.values(), value.offsets()
    cached = _offsets_cache("split", _ragged_size_id(value), offsets.device, tuple(sizes))
    if not cached:
        starts = [*_shard_starts(sizes), sum(sizes)]
        rows = offsets.tolist()  # synchronizes with the device
        with set_inference_mode(False):  # the cached offsets may be used in training later
            part_offsets = [offsets[start : stop + 1] - rows[start] for start, stop in pairwise(starts)]
        cached.append(([rows[start] for start in starts], part_offsets))
    row_bounds, part_offsets = cached[0]
    parts = [
        _build_jagged(values.narrow(dim - 1, start, stop - start), part, dim)
        for (start, stop), part in zip(pairwise(row_bounds), part_offsets, strict=True)
    ]
    whole = _offsets_cache("whole", *(_ragged_size_id(part) for part in parts))
    if not whole:
        whole.append(offsets)
    return parts


def _merge_nested_jagged(parts: Sequence[Any]) -> Tensor:
    parts = [part if part.lengths() is None else part.contiguous() for part in parts]
    dim = _ragged_dim(parts[0])
    if any(_ragged_dim(part) != dim for part in parts):
        raise MergeError(f"the parts are ragged in different dims: {[_ragged_dim(part) for part in parts]}")
    values = torch.cat([part.values() for part in parts], dim - 1)
    whole = _offsets_cache("whole", *(_ragged_size_id(part) for part in parts))
    if not whole:
        shifts = _shard_starts([part.values().shape[dim - 1] for part in parts])
        with set_inference_mode(False):
            shifted = [part.offsets()[1:] + shift for part, shift in zip(parts, shifts, strict=True)]
            whole.append(torch.cat([parts[0].offsets()[:1], *shifted]))
    return _build_jagged(values, _offsets_to(whole[0], values.device, values.shape[dim - 1]), dim)


def _offsets_to(offsets: Tensor, device: torch.device, rows: int) -> Tensor:
    """Move offsets to another device, inside a nested tensor so that torch keeps their ragged size."""
    if offsets.device == device:
        return offsets
    carrier: Any = _build_jagged(torch.empty(rows, 0, device=offsets.device), offsets, 1)
    moved: Tensor = carrier.to(device).offsets()
    return moved


# Sparse COO tensors. The values of a coalesced tensor are differentiable; those of an uncoalesced one are not.


def _split_sparse(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    value = value.coalesce()
    indices, values = value.indices(), value.values()
    starts = [*_shard_starts(sizes), sum(sizes)]
    # Reading the number of entries of each part synchronizes with the device.
    bounds = torch.searchsorted(indices[0].contiguous(), torch.tensor(starts, device=indices.device)).tolist()
    return [
        _build_coo(_shift_rows(indices[:, low:high], -start), values[low:high], (size, *value.shape[1:]))
        for (low, high), start, size in zip(pairwise(bounds), starts, sizes, strict=False)
    ]


def _merge_sparse(parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        # If `size` is left out, torch infers it from the largest index, which differs between parts.
        raise MergeError(
            f"sparse tensors of shapes {[list(part.shape) for part in parts]} differ in other dims than the batch; "
            "give each its size: `torch.sparse_coo_tensor(indices, values, size)`"
        )
    if any(part.requires_grad for part in parts):
        parts = [part.coalesce() for part in parts]
    coalesced = all(part.is_coalesced() for part in parts)
    sizes = [part.shape[0] for part in parts]
    indices = [_shift_rows(part._indices(), start) for start, part in zip(_shard_starts(sizes), parts, strict=True)]
    values = torch.cat([part.values() if coalesced else part._values() for part in parts])
    return _build_coo(torch.cat(indices, 1), values, (sum(sizes), *parts[0].shape[1:]), coalesced)


def _shift_rows(indices: Tensor, offset: int) -> Tensor:
    return torch.cat([indices[:1] + offset, indices[1:]])


def _build_coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool = True) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


def _raise_split_unsupported(value: Tensor, _sizes: Sequence[int]) -> Any:
    raise StructureError(f"a tensor of layout {value.layout} cannot be split; write `value.to_sparse_coo()`")


def _raise_merge_unsupported(parts: Sequence[Tensor]) -> Any:
    raise MergeError(f"tensors of layout {parts[0].layout} cannot be merged; write `value.to_sparse_coo()`")


def _num_rows(value: Tensor) -> int | None:
    return value.size(0) if value.dim() else None


def _map_tensor(fn: TensorFn, value: Tensor) -> Tensor:
    return fn(value)


NESTED_STRIDED = TypeHandler(_num_rows, _split_nested_strided, _merge_nested_strided, _map_tensor)
NESTED_JAGGED = TypeHandler(_num_rows, _split_nested_jagged, _merge_nested_jagged, _map_tensor)
SPARSE_COO = TypeHandler(_num_rows, _split_sparse, _merge_sparse, _map_tensor)
COMPRESSED_SPARSE = TypeHandler(_num_rows, _raise_split_unsupported, _raise_merge_unsupported, _map_tensor)

_COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensor_handler(value: Tensor) -> TypeHandler | None:
    """The handler of a nested or sparse tensor; None for a dense one."""
    layout = value.layout
    if layout is torch.strided:
        return NESTED_STRIDED if value.is_nested else None
    if layout is torch.jagged:
        return NESTED_JAGGED
    if layout is torch.sparse_coo:
        return SPARSE_COO
    return COMPRESSED_SPARSE if layout in _COMPRESSED_LAYOUTS else None


def handler_for(value: Any) -> TypeHandler | None:
    """The type handler of a value. Dense tensors have none."""
    cls = type(value)
    handler = None if cls is Tensor else handler_for_type(cls)
    return tensor_handler(value) if handler is None and isinstance(value, Tensor) else handler


def register_torch_types() -> None:
    """Register the handlers of torch's own types."""
    add_handler(PackedSequence, PACKED_SEQUENCE)
    add_handler(Distribution, DISTRIBUTION)
