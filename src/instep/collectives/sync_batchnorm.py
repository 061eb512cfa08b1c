"""Batch normalization over the whole batch.

A replica's batch normalization layer gets a `forward` attribute that computes its statistics over all replicas, so that
hooks still run; the source's layer is not changed. All replicas then have equal running statistics.
"""

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

# torch's own forwards; a subclass with another forward is left as it is.
_STANDARD_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


class SyncedForward:
    """The synchronized forward of a replica's layer. Holds a weak reference to the layer."""

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer = weakref.ref(layer)

    @disable_compile_for_collective
    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer()
        assert layer is not None
        context = current_context()
        if context is None or not _uses_batch_statistics(layer):
            return type(layer).forward(layer, input)
        return _normalize(layer, input, context)


class SyncBatchNormPatch:
    """Patches the batch normalization layers of a module's replicas."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._unsynced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned = False

    def __call__(self, source: nn.Module, module: nn.Module) -> None:
        """Patch one module of a replica, the counterpart of a module of the source."""
        if not isinstance(module, _BatchNorm):
            return
        if self.enabled and type(module).forward in _STANDARD_FORWARDS and "forward" not in source.__dict__:
            module.__dict__["forward"] = SyncedForward(module)
        else:
            self._unsynced.add(source)

    def warn_once(self, root: nn.Module) -> None:
        """Warn once which layers compute statistics over their shard only."""
        if self._warned or not self._unsynced or not any(_uses_batch_statistics(layer) for layer in self._unsynced):  # type: ignore[arg-type]
            return
        self._warned = True
        reason = "sync_batchnorm=False"
        if self.enabled:
            names = [name for name, module in root.named_modules() if module in self._unsynced]
            reason = f"{', '.join(names) or 'a layer'} overrides forward"
        warnings.warn(
            f"batch normalization uses each replica's shard instead of the whole batch, because {reason}. Outputs, "
            f"gradients and running statistics differ from one device's: running statistics are the mean over the "
            f"replicas, weighted by samples, and the variance leaves out the variance between shards.",
            stacklevel=5,
        )


def running_stats_rule(root: nn.Module, path: str) -> str | None:
    """The state rule for running statistics that replicas computed separately: a mean weighted by samples.

    For the running mean this equals the whole batch's. For the variance it leaves out the variance between the shards'
    means.
    """
    layer, _, name = path.rpartition(".")
    owner: nn.Module | None = root
    for part in filter(None, layer.split(".")):
        owner = None if owner is None else owner._modules.get(part)
    return "mean" if isinstance(owner, _BatchNorm) and name in ("running_mean", "running_var") else None


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _normalize(layer: _BatchNorm, input: Tensor, context: ReplicaContext) -> Tensor:
    layer._check_input_dim(input)
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    channels, dims = x.shape[1], [0, *range(2, x.ndim)]
    # A replica without samples still takes part in the exchange, with weight zero.
    row = channel_statistics(x) if x.numel() else x.sum(dims).repeat(2, 1)
    label = f"batch normalization of {channels} channels in {str(x.dtype).removeprefix('torch.')}"
    rows, counts = exchange_tensors(context, label, [row], x.numel() // max(1, channels), owned=True)
    total = sum(counts)
    if not total:
        return type(layer).forward(layer, input)
    mean, var = _combine_statistics([tensors[0] for tensors in rows], counts)
    if layer.training and layer.track_running_stats:
        _update_running_stats(layer, mean, var, total)
    scale = torch.rsqrt(var + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight
    bias: Tensor | None = layer.bias  # typed as Tensor by torch
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    zeros, ones = x.new_zeros(channels), x.new_ones(channels)
    # x * scale + shift, by torch's batch norm kernels, which are the fastest for per-channel factors
    return torch.batch_norm(x, scale, shift, zeros, ones, False, 0.0, 0.0, False).to(input.dtype)


class ChannelStatistics(torch.autograd.Function):
    """Mean and variance of each channel, stacked, in few passes over the input.

    On the CPU `torch.var_mean` is several times slower, unless the input is tiny.
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


# torch does not type `Function.apply`.
channel_statistics = cast(Callable[[Tensor], Tensor], ChannelStatistics.apply)


def _channel_shape(x: Tensor) -> list[int]:
    """The shape that broadcasts one value per channel."""
    return [1, x.shape[1], *[1] * (x.ndim - 2)]


def _combine_statistics(parts: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Combine the parts' means and variances (Chan et al.), in the order of the replicas."""
    mean, var = parts[0].unbind()
    total = counts[0]
    for part, count in zip(parts[1:], counts[1:], strict=True):
        total += count
        weight = count / total if count else 0.0
        new_mean, new_var = part.unbind()
        delta = new_mean - mean
        var = torch.addcmul(torch.lerp(var, new_var, weight), delta, delta, value=weight * (1 - weight))
        mean = torch.add(mean, delta, alpha=weight)
    return mean, var


def _update_running_stats(layer: Any, mean: Tensor, var: Tensor, total: int) -> None:
    """Update the running statistics as torch does, without changing their version counters."""
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
