"""Running statistics of batch norm layers, in flat blocks of memory.

The layers are known by their class: torch's own forward updates all statistics of a replica in its blocks. They are
copied from the source, sent and merged as blocks, without a comparison or a rule for each tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.replicas.object_graph import tensors_equal
from instep.replicas.write_watch import MemoryLayout, WriteDetector
from instep.runtime.modes import set_inference_mode
from instep.structure.shapes import is_plain_tensor

_STANDARD_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_VALUES, _COUNTER = ("running_mean", "running_var"), "num_batches_tracked"


def has_standard_forward(module: nn.Module) -> bool:
    """Whether a module is a batch normalization layer whose forward is torch's own."""
    return (
        isinstance(module, _BatchNorm)
        and type(module).forward in _STANDARD_FORWARDS
        and "forward" not in module.__dict__
    )


class WrittenStatistics(NamedTuple):
    """The running statistics of one replica after a forward that may have written them."""

    keys: tuple[int, ...]
    """The ids of the source's tensors, in the order of the blocks; last those without a block, which count calls."""
    blocks: Sequence[Tensor] = ()
    """Flat means and variances, one block per dtype. Empty if they were not sent: they equal the first replica's."""
    compare: bool = False
    """Whether to check that synchronized statistics equal the first replica's."""
    by_user: bool = False
    """Whether other code than the layers has written them."""

    def split(self, sources: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The value of each tensor in the blocks, by id of the source."""
        found, keys = {}, iter(self.keys)
        for block in self.blocks:
            start = 0
            while start < block.numel():
                key = next(keys)
                stop = start + sources[key].numel()
                found[key] = block[start:stop].view(sources[key].shape)
                start = stop
        return found


class StatisticsBlocks:
    """The running statistics of a replica's layers. The replica's copies are views of one block per dtype."""

    def __init__(self, layers: Sequence[nn.Module], pairs: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """
        Args:
            layers: Layers of the replica with a standard forward, and with all of their statistics in `pairs`.
            pairs: The source's tensor and its copy, by the id of the copy.
        """
        self._layers = layers
        groups: dict[Any, dict[int, tuple[Tensor, Tensor]]] = {}
        for name in (*_VALUES, _COUNTER):
            for layer in layers:
                source, copy = pairs[id(layer._buffers[name])]
                groups.setdefault((name == _COUNTER, copy.dtype, source.device), {})[id(copy)] = source, copy
        ordered = [list(groups[key].values()) for key in sorted(groups, key=lambda key: key[0])]  # counters last
        self._sources = [[source for source, _ in group] for group in ordered]
        self._copies = [copy for group in ordered for _, copy in group]
        self.pairs = [pair for group in ordered for pair in group]
        """(source, copy) of each tensor."""
        self._num_values = sum(not key[0] for key in groups)
        self._blocks = [_flatten([copy for _, copy in group]) for group in ordered]
        self._views: list[list[Tensor]] = []
        """The copies in each block. Copied block by block: a foreach copy of several dtypes is one copy per tensor."""
        for block, group in zip(self._blocks, ordered, strict=True):
            self._views.append(list(_unflatten(block, [copy for _, copy in group])))
            for (_, copy), view in zip(group, self._views[-1], strict=True):
                copy.data = view  # keeps the copy's version counter
        sources = [source for group in self._sources for source in group]
        self.keys = tuple(map(id, sources))
        self.copy_ids = frozenset(map(id, self._copies))
        self._source_data = [[source.data for source in group] for group in self._sources]
        self._source_layout, self._copy_layout = MemoryLayout(sources), MemoryLayout(self._copies)
        values = sum(map(len, self._sources[: self._num_values]))
        self._value_writes = WriteDetector(range(values), self._copies[:values])
        self._counter_writes = WriteDetector(range(len(self._copies) - values), self._copies[values:])
        self._always_written = False
        """Whether code that is not seen otherwise has written the statistics of layers in evaluation mode."""
        self.has_user_rule: bool | None = None
        """Whether a state rule of the user names one of the tensors; None if that is not known yet."""

    def is_current(self) -> bool:
        """Whether the tensors of the source, and the replica's copies in the blocks, have the same memory as before."""
        return self._source_layout.is_unchanged() and self._copy_layout.is_unchanged()

    def sync(self) -> None:
        """Copy the values of the source. Version counters are not incremented."""
        with set_inference_mode(False), torch.no_grad():
            for views, values in zip(self._views, self._source_data, strict=True):
                torch._foreach_copy_(views, values)
        self._reset()

    def _reset(self) -> None:
        self._value_writes.reset()
        self._counter_writes.reset()

    def written(self, reported: Collection[int], compare: bool) -> WrittenStatistics | None:
        """The statistics after a forward; None if it has not written any.

        Args:
            reported: Ids of copies that functional batch norm has written.
            compare: Whether values may be compared, which synchronizes with an accelerator.
        """
        by_user, counted = bool(self._value_writes.written()), bool(self._counter_writes.written())
        self._reset()
        is_written = by_user or counted or self._always_written or not self.copy_ids.isdisjoint(reported)
        if not is_written and not any(layer.training for layer in self._layers):
            if not compare or not self._differs_from_source():
                return None
            self._always_written = self._blocks[0].device.type != "cpu"
        return WrittenStatistics(self.keys, self._blocks[: self._num_values], compare or by_user, by_user)

    def _differs_from_source(self) -> bool:
        pairs = zip(self._blocks, self._sources, strict=True)
        return not all(tensors_equal(block, _flatten(group).to(block.device)) for block, group in pairs)

    @property
    def counters(self) -> list[Tensor]:
        """The numbers of batches, in the order of the last keys."""
        return [block for views in self._views[self._num_values :] for block in views]

    def merge(
        self, results: Sequence[WrittenStatistics | None], sizes: Sequence[int], synced: bool, index: int = 0
    ) -> bool:
        """Merge the statistics of all replicas in the blocks of this one, the replica with this index.

        Synchronized statistics are this replica's, others the mean weighted by samples. Returns False if that needs a
        rule per tensor.
        """
        own, others = results[index], [*results[:index], *results[index + 1 :]]
        if own is None or any(other is not None and other.keys != self.keys for other in others):
            return False
        if synced:
            return not (own.by_user and len(others)) and all(map(self._equals, others))
        if any(other is None for other in others):
            return False
        device = self._blocks[0].device
        for number, block in enumerate(own.blocks):
            values = [result.blocks[number].to(device) for result in results if result is not None]
            block.copy_(weighted_mean(values, sizes))
        return True

    def _equals(self, other: WrittenStatistics | None) -> bool:
        if other is None or not other.blocks or not (other.compare or other.by_user):
            return True
        return all(
            tensors_equal(mine, block.to(mine.device)) for mine, block in zip(self._blocks, other.blocks, strict=False)
        )

    def write_to_source(self) -> None:
        """Copy the values to the source. Version counters are not incremented."""
        with set_inference_mode(False), torch.no_grad():
            for values, views in zip(self._source_data, self._views, strict=True):
                torch._foreach_copy_(values, views)


def find_statistics(
    modules: Sequence[tuple[nn.Module, nn.Module]], state: Sequence[tuple[Tensor, Tensor]], shared: Collection[int]
) -> StatisticsBlocks | None:
    """Move the running statistics of a replica to blocks. None if it has none that can be moved.

    Args:
        modules: Each module of the source with the replica's.
        state: Tensors of the source that require no gradient, each with the replica's copy.
        shared: The addresses of storages that several tensors of the source view.
    """
    pairs = {id(copy): (source, copy) for source, copy in state if _can_move(source, copy, shared)}
    layers = [
        copy
        for source, copy in modules
        if has_standard_forward(source) and all(id(copy._buffers.get(name)) in pairs for name in (*_VALUES, _COUNTER))
    ]
    return StatisticsBlocks(layers, pairs) if layers else None


def _can_move(source: Tensor, copy: Tensor, shared: Collection[int]) -> bool:
    return (
        is_plain_tensor(source)
        and is_plain_tensor(copy)
        and not (source.is_inference() or source.is_meta)
        and source.is_contiguous()
        and source.numel() > 0
        and source.shape == copy.shape
        and source.dtype == copy.dtype
        and source.untyped_storage().data_ptr() not in shared
    )


def weighted_mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The mean weighted by sizes. Entries that are equal in all values keep their bits."""
    kept = [(value, size) for value, size in zip(values, sizes, strict=True) if size] or [(values[0], 1)]
    first, total = kept[0][0], sum(size for _, size in kept)
    mean, same = first * (kept[0][1] / total), torch.ones_like(first, dtype=torch.bool)
    for value, size in kept[1:]:
        mean = mean + value * (size / total)
        same &= value == first
    return torch.where(same, first, mean)


class FlatCopy(NamedTuple):
    """A copy of the values of some tensors in one block."""

    keys: tuple[int, ...]
    """The ids of the tensors."""
    tensors: Sequence[Tensor]
    block: Tensor

    def split(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor with its copy."""
        return zip(self.tensors, _unflatten(self.block, self.tensors), strict=True)


def flat_copies(tensors: Sequence[Tensor]) -> list[FlatCopy]:
    """Copies of dense tensors, one block per dtype and device."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return [FlatCopy(tuple(map(id, group)), group, _flatten(group)) for group in groups.values()]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A flat copy of tensors."""
    with set_inference_mode(False), torch.no_grad():
        flat: Tensor = torch._C._nn.flatten_dense_tensors(list(tensors))
        return flat.clone() if len(tensors) == 1 else flat


def _unflatten(block: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of a flat tensor with the shapes of some tensors."""
    with set_inference_mode(False), torch.no_grad():
        views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(block, list(like))
        return views
