"""The local parts of batch normalization over the whole batch, for each type of device.

On the CPU all engines give the same bits: rows are combined in the order of the replicas, by the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from instep.collectives.group import ReplicaContext

_native_batch_norm = torch.native_batch_norm
_native_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default

_NO_SAMPLES = 1e-30
"""The count that a replica without samples sends. Torch's CUDA kernels divide by counts, so that 0 would give NaN."""

_LARGE_INPUT = 2**15
"""Elements from which two passes of `mean` are faster on the CPU than torch's kernel for statistics."""


class TooFewValues(Exception):
    """The whole batch has at most one value per channel."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total


@dataclass(frozen=True)
class RunningStatistics:
    """The running statistics of a layer. The only place that writes them."""

    context: ReplicaContext
    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float | Tensor = 0.0
    """A tensor of no dimensions if the factor is known on the device only."""

    def update(self, mean: Tensor, var: Tensor, correction: float | Tensor) -> None:
        """Update by the statistics of a batch; `correction` makes the variance unbiased."""
        if self.mean is not None:
            self._update(self.mean, mean, 1.0)
        if self.var is not None:
            self._update(self.var, var, correction)

    def _update(self, running: Tensor, value: Tensor, by: float | Tensor) -> None:
        """Update one tensor without changing its version counter, as torch does."""
        value = value.to(running.dtype)
        if isinstance(self.momentum, Tensor) or isinstance(by, Tensor):
            running.data.lerp_((value * by).to(running.dtype), self.momentum)
        else:
            running.data.mul_(1 - self.momentum).add_(value, alpha=self.momentum * by)
        self._mark_written(running)

    def take_for_kernel(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
        """The tensors and the factor, for a kernel that updates them; None if they are not of this dtype."""
        if isinstance(self.momentum, Tensor) or self.mean is None or self.var is None:
            return None
        if not self.mean.dtype == self.var.dtype == dtype:
            return None
        self._mark_written(self.mean)
        self._mark_written(self.var)
        return self.mean, self.var, self.momentum

    def _mark_written(self, running: Tensor) -> None:
        self.context.statistics_written.add(id(running if running._base is None else running._base))


class Statistics(NamedTuple):
    """The statistics of the whole batch, as the kernels of a device use them."""

    mean: Tensor
    spread: Tensor
    """The variance on the CPU, the inverse standard deviation on CUDA."""
    counts: float | Tensor
    """The values per channel in total; on CUDA, those of each replica, on the device."""


class Kernels(Protocol):
    """The local parts of batch normalization on one type of device.

    Inputs are `dense`; gradients are made so. A replica may be without samples.

    A row is the mean and the variance of each channel, and the number of values per channel. It is the same on all
    types of devices, unless there is a `buffer`, which means that all replicas run on CUDA: then it has the inverse
    standard deviation in place of the variance, which saves CUDA's kernels the conversion. It is written to the buffer.
    """

    def dense(self, x: Tensor) -> Tensor:
        """The input in a dtype and a memory format that the kernels take."""
        ...

    def describe(self, x: Tensor, eps: float, buffer: Tensor | None) -> Tensor:
        """The row of a shard."""
        ...

    def combine(
        self, rows: Tensor, count: int, eps: float, inverted: bool, running: RunningStatistics | None
    ) -> Statistics:
        """Combine all replicas' rows; updates the running statistics.

        `count` is that of this replica's shard. `inverted` says that rows have inverse standard deviations.

        Raises `TooFewValues`.
        """
        ...

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float
    ) -> Tensor: ...

    def reduce(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        eps: float,
        buffer: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The row of a gradient, and the gradients of weight and bias.

        The row is, for each channel, the sum of the gradient, and then of its product with the input's distance from
        the mean.
        """
        ...

    def gradient(
        self,
        gradient: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        rows: Tensor,
        eps: float,
    ) -> Tensor:
        """The gradient of a shard, from all replicas' rows. Without a `gradient` it is zero."""
        ...


class CpuKernels:
    """Kernels for the CPU, which compute in float32 or float64."""

    def dense(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in _HALF_DTYPES else x
        return x if x.is_contiguous() or _memory_format(x) is not None else x.contiguous()

    def describe(self, x: Tensor, eps: float, buffer: Tensor | None) -> Tensor:  # noqa: ARG002
        assert buffer is None
        count = x.numel() // max(1, x.shape[1])
        if not count:
            return _empty_row(x, 0.0)
        if x.numel() >= _LARGE_INPUT and x.is_contiguous():
            dims = [0, *range(2, x.ndim)]
            mean = x.mean(dims)
            var = (x - mean.view(channel_shape(x))).square_().mean(dims)
        else:
            mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        return torch.cat((mean, var, torch.full((1,), count, dtype=x.dtype)))

    def combine(
        self,
        rows: Tensor,
        count: int,  # noqa: ARG002
        eps: float,  # noqa: ARG002
        inverted: bool,
        running: RunningStatistics | None,
    ) -> Statistics:
        assert not inverted
        counts = [round(value) for value in rows[:, -1].tolist()]
        total = sum(counts)
        if total < 2:
            raise TooFewValues(total)
        channels = rows.shape[1] // 2
        combined, combined_count = rows[0, :-1].clone(), counts[0]
        mean, var = combined.view(2, channels).unbind()
        for row, added in zip(rows[1:], counts[1:], strict=True):  # Chan et al., in the order of the replicas
            if added:
                combined_count += added
                part = added / combined_count
                delta = row[:channels] - mean
                combined.lerp_(row[:-1], part)
                var.addcmul_(delta, delta, value=part * (1 - part))
        if running is not None:
            running.update(mean, var, total / (total - 1))
        return Statistics(mean, var, float(total))

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float
    ) -> Tensor:
        mean, var, _ = statistics
        return _native_batch_norm(x, _cast(weight, x), _cast(bias, x), mean, var, False, 0.0, eps)[0]

    def reduce(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,  # noqa: ARG002
        statistics: Statistics,
        eps: float,
        buffer: Tensor | None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        mean, var, _ = statistics
        gradient = _like(gradient, x)
        _, grad_weight, grad_bias = _native_batch_norm_backward(
            gradient, x, None, mean, var, None, None, False, eps, [False, True, True]
        )
        return torch.cat((grad_bias, grad_weight * (var + eps).sqrt_())), grad_weight, grad_bias

    def gradient(
        self,
        gradient: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        rows: Tensor,
        eps: float,
    ) -> Tensor:
        mean, var, count = statistics
        first, *others = rows.view(len(rows), 2, -1).unbind()
        sums = first / -count
        for row in others:
            sums.add_(row, alpha=-1 / cast(float, count))
        inverse = (var + eps).rsqrt_()
        scale = inverse if weight is None else inverse * weight.to(x.dtype)
        shift, slope = (sums * scale).unbind()
        result = _native_batch_norm(x, slope.mul_(inverse), shift, mean, var, False, 0.0, eps)[0]
        return result if gradient is None else result.addcmul_(_like(gradient, x), scale.view(channel_shape(x)))


class CudaKernels:
    """Torch's own kernels for synchronized batch normalization. Nothing waits for the device.

    Only a replica with at most one value per channel reads the other replicas' counts.
    """

    def dense(self, x: Tensor) -> Tensor:
        return x if x.is_contiguous() or _memory_format(x) is not None else x.contiguous()

    def describe(self, x: Tensor, eps: float, buffer: Tensor | None) -> Tensor:
        count = x.numel() // max(1, x.shape[1])
        if not count:
            return _empty_row(x, 0.0 if buffer is None else eps**-0.5)
        if buffer is None:
            mean, spread = torch.batch_norm_update_stats(x, None, None, 0.0)
        else:
            mean, spread = torch.batch_norm_stats(x, eps)
        return _concatenate((mean, spread, _count_tensor(count, mean.dtype, mean.device)), buffer)

    def combine(
        self, rows: Tensor, count: int, eps: float, inverted: bool, running: RunningStatistics | None
    ) -> Statistics:
        channels = rows.shape[1] // 2
        mean, inverse, counts = rows.split_with_sizes([channels, channels, 1], 1)
        counts = counts.squeeze(1)
        if not inverted:
            inverse = (inverse + eps).rsqrt_()
        if count < 2 and (total := sum(map(round, counts.tolist()))) < 2:
            raise TooFewValues(total)
        updated = None if running is None else running.take_for_kernel(rows.dtype)
        running_mean, running_var, momentum = updated or (None, None, 0.0)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            rows, mean, inverse, running_mean, running_var, momentum, eps, counts
        )
        if running is not None and updated is None:
            total = counts.sum()
            running.update(mean, inverse.pow(-2).sub_(eps), total / (total - 1))
        return Statistics(mean, inverse, counts.to(torch.int32))

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float
    ) -> Tensor:
        if not x.numel():
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, weight, bias, statistics.mean, statistics.spread, eps)

    def reduce(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        eps: float,  # noqa: ARG002
        buffer: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        mean, inverse, _ = statistics
        affine = weight is not None
        total, product, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            _like(gradient, x), x, mean, inverse, weight, True, affine, affine
        )
        return _concatenate((total, product), buffer), grad_weight, grad_bias if affine else total

    def gradient(
        self,
        gradient: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        statistics: Statistics,
        rows: Tensor,
        eps: float,  # noqa: ARG002
    ) -> Tensor:
        if not x.numel():
            return torch.empty_like(x)
        mean, inverse, counts = statistics
        total, product = rows.sum(0).view(2, -1).unbind()
        gradient = torch.zeros_like(x) if gradient is None else _like(gradient, x)
        weight = None if weight is None else weight.to(mean.dtype)
        return torch.batch_norm_backward_elemt(gradient, x, mean, inverse, weight, total, product, cast(Tensor, counts))


_KERNELS: dict[str, Kernels] = {"cpu": CpuKernels(), "cuda": CudaKernels()}
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def kernels_for(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kernels | None:
    """The kernels for an input; None if there are none for its device or these dtypes, which are those of CUDA."""
    dtype = None if weight is None else weight.dtype
    if bias is not None:
        if dtype is not None and bias.dtype is not dtype:
            return None
        dtype = bias.dtype
    is_supported = dtype is None or dtype is x.dtype or (dtype is torch.float32 and x.dtype in _HALF_DTYPES)
    return _KERNELS.get(x.device.type) if is_supported and x.is_floating_point() else None


def _memory_format(x: Tensor) -> torch.memory_format | None:
    """The channels-last format that a tensor has, if any."""
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return None


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient in the dtype and the memory format of a dense input."""
    if gradient.dtype != x.dtype:
        gradient = gradient.to(x.dtype)
    if x.is_contiguous():
        return gradient.contiguous()
    return gradient.contiguous(memory_format=_memory_format(x) or torch.contiguous_format)


def _cast(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return parameter if parameter is None or parameter.dtype == x.dtype else parameter.to(x.dtype)


def channel_shape(x: Tensor) -> list[int]:
    """The shape that broadcasts one value per channel."""
    return [1, x.shape[1], *[1] * (x.ndim - 2)]


@lru_cache(maxsize=256)
def _count_tensor(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A count on a device. It is cached: creating it takes as long as the other kernels of a layer."""
    with torch.inference_mode(False):
        return torch.full((1,), count, dtype=dtype, device=device)


def row_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF_DTYPES else x.dtype


def _concatenate(parts: tuple[Tensor, ...], buffer: Tensor | None) -> Tensor:
    return torch.cat(parts) if buffer is None else torch.cat(parts, out=buffer)


def _empty_row(x: Tensor, spread: float) -> Tensor:
    """The row of a replica without samples."""
    row = torch.zeros(2 * x.shape[1] + 1, dtype=row_dtype(x), device=x.device)
    row[x.shape[1] : -1].fill_(spread)
    row[-1].fill_(_NO_SAMPLES)
    return row


def absent_row(x: Tensor) -> Tensor:
    """The row of a replica that has no gradient: negative zeros, which change no sum."""
    return torch.full((2 * x.shape[1],), -0.0, dtype=row_dtype(x), device=x.device)


def are_absent(rows: Tensor) -> bool:
    """Whether no replica has a gradient."""
    return bool((rows.signbit() & (rows == 0)).all())
