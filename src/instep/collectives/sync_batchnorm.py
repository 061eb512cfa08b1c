"""Batch normalization over the whole batch, patched into replicas' layers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.collectives.exchange import exchange_tensors
from instep.collectives.group import ReplicaContext, current_context
from instep.runtime.modes import disable_compile_for_collective

# Classes whose forward is torch's own; a subclass that has another one knows best.
_STANDARD_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class SyncedForward:
    """The forward of a replica's layer. It does not keep its layer alive."""

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer = weakref.ref(layer)

    @disable_compile_for_collective
    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer()
        assert layer is not None
        place = current_context()
        if place is None or not _uses_batch_statistics(layer):
            return type(layer).forward(layer, input)
        return _normalize(layer, input, place)


class SyncBatchNormPatch:
    """What the batch normalisation layers of one module's replicas are given, or not."""

    def __init__(self, synchronised: bool) -> None:
        self.enabled = synchronised
        self._unsynced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned = False

    def __call__(self, source: nn.Module, made: nn.Module) -> None:
        """Dress one module of a replica, which stands for a module of the source."""
        if not isinstance(made, _BatchNorm):
            return
        if self.enabled and type(made).forward in _STANDARD_FORWARDS and "forward" not in source.__dict__:
            made.__dict__["forward"] = SyncedForward(made)
        else:
            self._unsynced.add(source)

    def warn_once(self, root: nn.Module) -> None:
        """Say once which layers take their statistics of each shard for itself, and what differs from one device."""
        if self._warned or not self._unsynced or not any(_uses_batch_statistics(layer) for layer in self._unsynced):  # type: ignore[arg-type]
            return
        self._warned = True
        why = "sync_batchnorm=False"
        if self.enabled:
            names = [name for name, module in root.named_modules() if module in self._unsynced]
            why = f"{', '.join(names) or 'a layer'}: a forward of its own is left as it is"
        warnings.warn(
            f"{why}: batch normalisation looks at each replica's shard and not at the whole batch, so that outputs, "
            f"gradients and running statistics differ from one device's. Running statistics become the mean of the "
            f"replicas', weighted by samples; the variance leaves out how far the shards lie apart.",
            stacklevel=5,
        )


def running_stats_rule(root: nn.Module, path: str) -> str | None:
    """How statistics that replicas took each of its shard become the module's: a mean, weighted by samples.

    For the mean that is what the whole batch gives. For the variance it is the mean of the variances inside of the
    shards, which leaves out how far the shards' means lie apart.
    """
    layer, _, name = path.rpartition(".")
    owner: nn.Module | None = root
    for part in filter(None, layer.split(".")):
        owner = None if owner is None else owner._modules.get(part)
    return "mean" if isinstance(owner, _BatchNorm) and name in ("running_mean", "running_var") else None


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _normalize(layer: _BatchNorm, input: Tensor, place: ReplicaContext) -> Tensor:
    layer._check_input_dim(input)
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    channels, dims = x.shape[1], [0, *range(2, x.ndim)]
    # A replica that has nothing to normalise still comes to the meeting; what it brings has no weight.
    row = channel_statistics(x) if x.numel() else x.sum(dims).repeat(2, 1)
    label = f"batch normalisation of {channels} channels in {str(x.dtype).removeprefix('torch.')}"
    rows, counts = exchange_tensors(place, label, [row], x.numel() // max(1, channels), owned=True)
    total = sum(counts)
    if not total:
        return type(layer).forward(layer, input)
    mean, var = _combine_statistics([tensors[0] for tensors in rows], counts)
    if layer.training and layer.track_running_stats:
        _update_running_stats(layer, mean, var, total)
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    bias: Tensor | None = layer.bias  # torch says that it has one
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    zeros, ones = x.new_zeros(channels), x.new_ones(channels)
    # x * scale + shift, by torch's own kernels, which are the fastest for a factor for each channel
    return torch.batch_norm(x, scale, shift, zeros, ones, False, 0.0, 0.0, False).to(input.dtype)


class ChannelStatistics(torch.autograd.Function):
    """Mean and variance of each channel, as two rows, in as few passes over the input as it takes.

    On the CPU torch's own `var_mean` takes several times as long, unless the input is tiny.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dims = [0, *range(2, x.ndim)]
        if x.device.type == "cpu":
            mean = x.mean(dims)
            var = (x - mean.view(_channel_shape(x))).square_().mean(dims)
        else:
            var, mean = torch.var_mean(x, dims, correction=0)
        row = torch.stack([mean, var])
        ctx.save_for_backward(x, row)
        return row

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, row = ctx.saved_tensors
        grad_mean, grad_var = (gradient / (x.numel() // x.shape[1])).unbind()
        slope = 2 * grad_var
        base = torch.addcmul(grad_mean, slope, row[0], value=-1)
        return torch.addcmul(base.view(_channel_shape(x)), x, slope.view(_channel_shape(x)))


# torch leaves `Function.apply` without types.
channel_statistics = cast(Callable[[Tensor], Tensor], ChannelStatistics.apply)


def _channel_shape(x: Tensor) -> list[int]:
    """The shape of something that each channel has one of."""
    return [1, x.shape[1], *[1] * (x.ndim - 2)]


def _combine_statistics(parts: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the whole from those of its parts, one after another in the order of the replicas."""
    mean, var = parts[0].unbind()
    before = counts[0]
    for part, count in zip(parts[1:], counts[1:], strict=True):
        before += count
        weight = count / before if count else 0.0
        new_mean, new_var = part.unbind()
        apart = new_mean - mean
        var = torch.addcmul(torch.lerp(var, new_var, weight), apart, apart, value=weight * (1 - weight))
        mean = torch.add(mean, apart, alpha=weight)
    return mean, var


def _update_running_stats(layer: Any, mean: Tensor, var: Tensor, total: int) -> None:
    """Move the running statistics as torch does; like torch's own, without moving their version counters."""
    factor = 0.0 if layer.momentum is None else layer.momentum
    with torch.no_grad():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if layer.momentum is None:
                factor = 1.0 / float(layer.num_batches_tracked)
        if layer.running_mean is not None:
            _update_running(layer.running_mean, mean, factor)
        if layer.running_var is not None:
            _update_running(layer.running_var, var, factor, total / max(total - 1, 1))


def _update_running(running: Tensor, value: Tensor, factor: float, by: float = 1.0) -> None:
    running.data.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor * by)
