"""Batch normalization over the whole batch.

A replica computes batch statistics over all replicas in two places:

- Layers with a forward of torch's own (`nn.BatchNorm2d`) get a `forward` attribute (`SyncedForward`), so that hooks
  still run; the source's layer is not changed.
- All other code that calls `torch.nn.functional.batch_norm` in training gets `synced_batch_norm`, which replaces that
  function while replicas run. It calls torch's own function in threads that run no replica.

All replicas then have equal running statistics.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.collectives.batch_norm import normalize
from instep.collectives.batch_norm_kernels import RunningStatistics, TooFewValues
from instep.collectives.group import ReplicaContext, current_context
from instep.errors import StateError
from instep.replicas.state.batch_norm import has_standard_forward
from instep.runtime.caller_warnings import warn_caller
from instep.runtime.locks import ForkSafeLock
from instep.runtime.modes import disable_compile_for_collective
from instep.runtime.torch_private import load_dynamo_rules, skip_frame


class SyncedForward:
    """The synchronized forward of a replica's layer. Holds a weak reference to the layer."""

    def __init__(self, layer: _BatchNorm) -> None:
        self._layer = weakref.ref(layer)

    @disable_compile_for_collective
    def __call__(self, input: Tensor) -> Tensor:
        layer: Any = self._layer()
        context = current_context()
        if context is None or not _uses_batch_statistics(layer):
            return cast(Tensor, type(layer).forward(layer, input))
        layer._check_input_dim(input)
        if not (layer.training and layer.track_running_stats):
            return _normalize(context, input, None, None, layer.weight, layer.bias, 0.0, layer.eps)
        factor = layer.momentum
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
            if factor is None:
                factor = _cumulative_factor(layer.num_batches_tracked)
        mean, var = layer.running_mean, layer.running_var
        return _normalize(
            context, input, mean, var, layer.weight, layer.bias, 0.0 if factor is None else factor, layer.eps
        )


def _cumulative_factor(num_batches: Tensor) -> float | Tensor:
    """The factor of a cumulative average; on an accelerator a tensor, because reading it would wait for the device."""
    return 1.0 / float(num_batches) if num_batches.device.type == "cpu" else 1.0 / num_batches


class SyncBatchNormPatch:
    """Patches the batch normalization layers of a module's replicas."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._unsynced: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._warned = False

    def __call__(self, source: nn.Module, module: nn.Module) -> None:
        """Patch one module of a replica, the counterpart of a module of the source."""
        if not self.enabled and isinstance(source, _BatchNorm):
            self._unsynced.add(source)
        elif has_standard_forward(source):
            module.__dict__["forward"] = SyncedForward(cast(_BatchNorm, module))

    def warn_once(self, calls_function: bool) -> None:
        """Warn once about statistics of shards: of torch's layers, or if `forward` calls the functional batch norm."""
        if self.enabled or self._warned:
            return
        if not calls_function and not any(map(_uses_batch_statistics, self._unsynced)):
            return
        self._warned = True
        warn_caller(
            "sync_batchnorm=False: batch normalization uses the statistics of each replica's shard. Outputs, gradients "
            "and running statistics differ from one device's."
        )

    def state_rule(self, root: nn.Module, path: str) -> str | Callable[..., Any] | None:
        """The state rule for running statistics that differ between replicas.

        If replicas compute them separately, it is a mean weighted by samples. For the running mean this equals the
        whole batch's. For the variance it leaves out the variance between the shards' means.
        """
        layer, _, name = path.rpartition(".")
        owner: nn.Module | None = root
        for part in filter(None, layer.split(".")):
            owner = None if owner is None else owner._modules.get(part)
        if not isinstance(owner, _BatchNorm) or name not in ("running_mean", "running_var"):
            return None
        return partial(_first_if_close, path) if self.enabled else "mean"


def _first_if_close(path: str, old: Tensor, new: Sequence[Tensor], _: Sequence[int]) -> Tensor:
    """The first replica's running statistics. Those of other devices may differ from them by rounding."""
    change, size = (new[0].cpu() - old.cpu()).abs().max(), new[0].abs().max().cpu()
    tolerance = 1e-3 * change + 8 * torch.finfo(new[0].dtype).eps * size
    if not all(bool(((value.cpu() - new[0].cpu()).abs() <= tolerance).all()) for value in new[1:]):
        raise StateError(
            f"{path!r} differs between replicas: the layer computes batch statistics by its own arithmetic, over each "
            f"replica's shard instead of the whole batch.\n"
            f"Compute them by torch.nn.functional.batch_norm, which is synchronized, or from instep.all_gather(x)."
        )
    return new[0]


def _uses_batch_statistics(layer: Any) -> bool:
    return bool(layer.training or (layer.running_mean is None and layer.running_var is None))


class FunctionReplacement:
    """Context manager: replaces `torch.nn.functional.batch_norm` until the last user leaves."""

    def __init__(self) -> None:
        self.original: Callable[..., Tensor] = F.batch_norm
        """What is replaced: torch's function, or that of another package."""
        self._users = 0
        self._lock = ForkSafeLock()

    def __enter__(self) -> None:
        with self._lock:
            if F.batch_norm is not synced_batch_norm:
                load_dynamo_rules()
                self.original = F.batch_norm
                F.batch_norm = synced_batch_norm
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and F.batch_norm is synced_batch_norm:
                F.batch_norm = self.original


_replacement = FunctionReplacement()


@dataclass
class TrialBatchNorms:
    """How often a trial has called the functional batch norm in training."""

    in_run: int = 0
    total: int = 0


class _ThreadLocal(threading.local):
    trial_calls: TrialBatchNorms | None = None
    """The calls of the trial that runs in this thread."""


_thread_local = _ThreadLocal()


def replace_batch_norm(context: ReplicaContext | None) -> AbstractContextManager[None]:
    """Context manager in which a replica's calls of the functional batch norm are synchronized."""
    synced = context is not None and context.sync_batchnorm and context.info.count > 1
    return _replacement if synced else nullcontext()


@contextmanager
def use_trial_batch_norm(calls: TrialBatchNorms) -> Iterator[None]:
    """Context manager for a run of a trial: the functional batch norm does not make samples depend on each other.

    In training, it normalizes by the running statistics, which it does not update, or by mean 0 and variance 1 if there
    are none. The variance is multiplied by a different factor at each call of the run. So a module that applies
    different layers to different parts of its batch gives other outputs for a part of the samples than for the whole.
    """
    outer = _thread_local.trial_calls
    _thread_local.trial_calls, calls.in_run = calls, 0
    try:
        with _replacement:
            yield
    finally:
        _thread_local.trial_calls = outer


def synced_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Replaces `torch.nn.functional.batch_norm` while replicas run."""
    function = _batch_norm_in_training if training else _replacement.original  # torch.compile traces the latter
    return function(input, running_mean, running_var, weight, bias, training, momentum, eps)


skip_frame(synced_batch_norm)


@disable_compile_for_collective
def _batch_norm_in_training(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    context = current_context()
    trial_calls = _thread_local.trial_calls
    if not _is_parameter(input):
        if context is not None and context.sync_batchnorm:
            return _normalize(context, input, running_mean, running_var, weight, bias, momentum, eps)
        if trial_calls is not None:
            trial_calls.in_run, trial_calls.total = trial_calls.in_run + 1, trial_calls.total + 1
            return _normalize_in_trial(trial_calls.in_run, input, running_mean, running_var, weight, bias, eps)
    return _replacement.original(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _normalize_in_trial(
    number: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    like = next((t for t in (running_mean, running_var, weight, bias) if t is not None), input)
    mean = like.new_zeros(input.shape[1]) if running_mean is None else running_mean
    var = like.new_ones(input.shape[1]) if running_var is None else running_var
    factor = 0.5 + number * 0.618 % 1  # differs most between successive calls
    return _replacement.original(input, mean, var * factor, weight, bias, False, 0.0, eps)


def _is_parameter(input: Tensor) -> bool:
    """Whether the input is a whole parameter, as in weight standardization. Replicas have equal parameters."""
    source = input if input._base is None else input._base
    return isinstance(source, nn.Parameter) and source.numel() == input.numel()


def _normalize(
    context: ReplicaContext,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
    eps: float,
) -> Tensor:
    """Normalize by the statistics of all replicas, and update the running statistics as torch does."""
    channels = input.shape[1] if input.ndim > 1 else 0
    tensors = [t for t in (running_mean, running_var, weight, bias) if t is not None]
    if input.ndim < 2 or any(tensor.numel() != channels for tensor in tensors):  # torch's own error
        return _replacement.original(input, running_mean, running_var, weight, bias, True, momentum, eps)
    running = None
    if running_mean is not None or running_var is not None:
        running = RunningStatistics(context, running_mean, running_var, momentum)
    try:
        return normalize(context, input, weight, bias, eps, running)
    except TooFewValues as error:
        if not error.total:
            return _replacement.original(input, running_mean, running_var, weight, bias, True, momentum, eps)
    size = torch.Size([1, *input.shape[1:]])
    raise ValueError(f"Expected more than 1 value per channel when training, got input size {size}")
