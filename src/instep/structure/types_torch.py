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


# Packed sequences. A part is what packing those samples alone would have given, and the joined value what packing all
# of them would have given: `torch.sort` is not stable, so samples of one length keep the order that torch gives them
# only if the same call sorts the same lengths again.


def _packed_size(packed: PackedSequence) -> int:
    """The number of samples; read, where nothing else says it, from metadata that torch keeps on the host."""
    if packed.sorted_indices is not None:
        return int(packed.sorted_indices.shape[0])
    return int(packed.batch_sizes[0]) if len(packed.batch_sizes) else 0


def _packed_positions(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """Where the data of each sample lies at each step, `[steps, samples]`, and each sample's length, on the CPU.

    The order of the samples is data: reading it waits for the device when it is not on the CPU, because the sizes
    of the parts depend on it.
    """
    steps = packed.batch_sizes
    if packed.unsorted_indices is None:
        rank = torch.arange(_packed_size(packed))
    else:
        rank = packed.unsorted_indices.cpu()
    firsts = steps.cumsum(0) - steps
    lengths = (steps[:, None] > rank).sum(0)
    return firsts[:, None] + rank, lengths


def _pack(cls: type, data: Tensor, positions: Tensor, lengths: Tensor, indexed: bool) -> PackedSequence:
    """The samples found at these positions of `data`, packed; with indices if asked for or if they are out of order."""
    order = None
    if indexed or bool((lengths[1:] > lengths[:-1]).any()):
        lengths, order = torch.sort(lengths, descending=True)
        positions = positions[:, order]
    alive = torch.arange(positions.shape[0])[:, None] < lengths
    batch_sizes = alive.sum(1)
    rows = positions[alive].to(data.device)
    order = None if order is None else order.to(data.device)
    packed: PackedSequence = cls(
        data.index_select(0, rows), batch_sizes[batch_sizes > 0], order, invert_permutation(order)
    )
    return packed


def _split_packed(packed: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    if len(sizes) == 1:
        return [packed]
    positions, lengths = _packed_positions(packed)
    indexed = packed.unsorted_indices is not None
    return [
        _pack(type(packed), packed.data, positions[:, start : start + size], lengths[start : start + size], indexed)
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
    # `batch_sizes` is metadata that torch keeps on the CPU: it is not one of the tensors.
    order, back = packed.sorted_indices, packed.unsorted_indices
    return type(packed)(
        fn(packed.data),
        packed.batch_sizes,
        None if order is None else fn(order),
        None if back is None else fn(back),
    )


def _move_packed(packed: PackedSequence, device: Any) -> PackedSequence:
    return _map_packed(lambda tensor: tensor.to(device), packed)


PACKED_SEQUENCE = TypeHandler(_packed_size, _split_packed, _merge_packed, _map_packed, _move_packed)


# Nested tensors of the strided layout: their sizes live on the CPU, so unbinding them reads nothing from a device.


def _split_nested_strided(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    rows = value.unbind()
    return [
        torch.nested.as_nested_tensor(list(rows[start : start + size]), layout=torch.strided)
        for start, size in zip(_shard_starts(sizes), sizes, strict=True)
    ]


def _merge_nested_strided(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor([row for part in parts for row in part.unbind()], layout=torch.strided)


# Nested tensors of the jagged layout. Two of them can be added only if they have the same *ragged size*, an identity
# that torch gives to an offsets tensor. So that `x * mask` still works on the parts, and `merged + x` on the whole,
# the offsets handed out are remembered by that identity.


@functools.lru_cache(maxsize=256)
def _offsets_cache(*_key: Hashable) -> list[Any]:
    """The place of the last few values by key, empty at first; a value that was pushed out is only made again."""
    return []


def _ragged_dim(value: Tensor) -> int:
    sizes: Sequence[Any] = value.shape
    return next(dim for dim, size in enumerate(sizes) if not isinstance(size, int))


def _ragged_size_id(value: Tensor) -> int:
    """The identity of the ragged size: equal for the tensors that torch lets one compute together."""
    size: Any = value.shape[_ragged_dim(value)]
    return int(size.node.nested_int())


def _build_jagged(values: Tensor, offsets: Tensor, ragged_dim: int) -> Tensor:
    if torch.is_inference_mode_enabled():
        # Torch refuses to build one there around tensors that were made outside.
        with set_inference_mode(False), torch.no_grad():
            return _build_jagged(values, offsets, ragged_dim)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim)


def _split_nested_jagged(value: Any, sizes: Sequence[int]) -> list[Tensor]:
    if value.lengths() is not None:
        value = value.contiguous()
    dim, values, offsets = _ragged_dim(value), value.values(), value.offsets()
    known = _offsets_cache("cut", _ragged_size_id(value), offsets.device, tuple(sizes))
    if not known:
        firsts = [*_shard_starts(sizes), sum(sizes)]
        # The rows of a part are as many as its offsets say: on a device, this waits for it.
        rows = offsets.tolist()
        with set_inference_mode(False):  # remembered, and perhaps met again in training
            parts_offsets = [offsets[a : b + 1] - rows[a] for a, b in pairwise(firsts)]
        known.append(([rows[first] for first in firsts], parts_offsets))
    cuts, parts_offsets = known[0]
    parts = [
        _build_jagged(values.narrow(dim - 1, start, stop - start), part, dim)
        for (start, stop), part in zip(pairwise(cuts), parts_offsets, strict=True)
    ]
    whole = _offsets_cache("whole", *(_ragged_size_id(part) for part in parts))
    if not whole:
        whole.append(offsets)
    return parts


def _merge_nested_jagged(parts: Sequence[Any]) -> Tensor:
    parts = [part if part.lengths() is None else part.contiguous() for part in parts]
    dim = _ragged_dim(parts[0])
    if any(_ragged_dim(part) != dim for part in parts):
        raise MergeError(f"jagged tensors that are ragged in dims {[_ragged_dim(part) for part in parts]}")
    values = torch.cat([part.values() for part in parts], dim - 1)
    whole = _offsets_cache("whole", *(_ragged_size_id(part) for part in parts))
    if not whole:
        shifts = _shard_starts([part.values().shape[dim - 1] for part in parts])
        with set_inference_mode(False):
            pieces = [part.offsets()[1:] + shift for part, shift in zip(parts, shifts, strict=True)]
            whole.append(torch.cat([parts[0].offsets()[:1], *pieces]))
    return _build_jagged(values, _offsets_to(whole[0], values.device, values.shape[dim - 1]), dim)


def _offsets_to(offsets: Tensor, device: torch.device, rows: int) -> Tensor:
    """The same offsets on another device; moved inside a nested tensor, so that torch keeps their ragged size."""
    if offsets.device == device:
        return offsets
    carrier: Any = _build_jagged(torch.empty(rows, 0, device=offsets.device), offsets, 1)
    moved: Tensor = carrier.to(device).offsets()
    return moved


# Sparse COO tensors. Torch's cuts of them are not differentiable when they are not coalesced; these two are each
# other's derivative, whatever the layout of the gradient.


def _narrow_rows(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    if value.layout is torch.strided:
        return [value.narrow(0, start, size) for start, size in zip(_shard_starts(sizes), sizes, strict=True)]
    indices, values, coalesced = value._indices(), value._values(), value.is_coalesced()
    shapes = [(size, *value.shape[1:]) for size in sizes]
    return [
        _build_coo(_shift_rows(indices[:, here], -start), values[here], shape, coalesced)
        for start, here, shape in zip(
            _shard_starts(sizes), _entries_by_shard(indices[0], sizes, coalesced), shapes, strict=True
        )
    ]


def _entries_by_shard(rows: Tensor, sizes: Sequence[int], in_order: bool) -> list[Any]:
    """Which entries belong to each part. How many they are is data: on a device, this waits for it."""
    starts = [*_shard_starts(sizes), sum(sizes)]
    if in_order:
        cuts = torch.searchsorted(rows.contiguous(), torch.tensor(starts, device=rows.device)).tolist()
        return [slice(low, high) for low, high in pairwise(cuts)]
    return [((rows >= low) & (rows < high)).nonzero().squeeze(1) for low, high in pairwise(starts)]


def _cat_rows(parts: Sequence[Tensor]) -> Tensor:
    if any(part.layout is torch.strided for part in parts):
        return torch.cat([part if part.layout is torch.strided else part.to_dense() for part in parts])
    sizes = [part.shape[0] for part in parts]
    indices = [_shift_rows(part._indices(), start) for start, part in zip(_shard_starts(sizes), parts, strict=True)]
    return _build_coo(
        torch.cat(indices, 1),
        torch.cat([part._values() for part in parts]),
        (sum(sizes), *parts[0].shape[1:]),
        all(part.is_coalesced() for part in parts),
    )


def _shift_rows(indices: Tensor, by: int) -> Tensor:
    return torch.cat([indices[:1] + by, indices[1:]]) if by else indices


def _build_coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)


class _SplitSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, sizes: Sequence[int]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.device = value.dtype, value.device
        ctx.shapes = [(size, *value.shape[1:]) for size in sizes]
        return tuple(_narrow_rows(value, sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return None, None
        full = [
            torch.zeros(shape, dtype=ctx.dtype, device=ctx.device, layout=torch.sparse_coo) if grad is None else grad
            for grad, shape in zip(grads, ctx.shapes, strict=True)
        ]
        return _merge_sparse(full), None


class _CatSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Any:
        ctx.sizes = [part.shape[0] for part in parts]
        return _cat_rows(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(_split_sparse(grads[0], ctx.sizes))


def _split_sparse(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(_SplitSparse.apply(value, tuple(sizes)))  # type: ignore[no-untyped-call]


def _merge_sparse(parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape[1:] for part in parts}) > 1:
        # Where no size was given, torch took the greatest index for it: that of the whole is not known to be that.
        raise MergeError(
            f"sparse tensors of shapes {[list(part.shape) for part in parts]} differ beside the batch; give each the "
            "size of the whole: `torch.sparse_coo_tensor(indices, values, size)`"
        )
    joined: Tensor = _CatSparse.apply(*parts)  # type: ignore[no-untyped-call]
    return joined


def _raise_split_unsupported(value: Tensor, _sizes: Sequence[int]) -> Any:
    raise StructureError(f"a tensor of layout {value.layout} is not split; write `value.to_sparse_coo()`")


def _raise_merge_unsupported(parts: Sequence[Tensor]) -> Any:
    raise MergeError(f"tensors of layout {parts[0].layout} are not joined; write `value.to_sparse_coo()`")


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
    """The kind of a nested or sparse tensor; None for an ordinary one."""
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
    """Teach the structure layer torch's own types."""
    add_handler(PackedSequence, PACKED_SEQUENCE)
    add_handler(Distribution, DISTRIBUTION)
