"""Batch normalization over the whole batch: one autograd node, one all-gather in forward and one in backward.

Forward: each replica computes the statistics of its shard, the replicas gather them, and each combines all of them and
normalizes its shard. Backward: each replica reduces its gradient to two sums per channel, the replicas gather these,
and each computes the gradient of its shard. The gradients of weight and bias are those of the shard: like all
gradients, they are summed over replicas later.

- With separate graphs, every replica has its own node (`BatchNorm`), with a token as in `collectives.exchange`.
- In a joint graph one node (`JointBatchNorm`) is over all replicas' inputs and outputs. One of the replicas creates it.
- A backward that is differentiated itself, and inputs without kernels, use `normalize_differentiably`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from instep.collectives.batch_norm_kernels import (
    Kernels,
    RunningStatistics,
    Statistics,
    TooFewValues,
    absent_row,
    are_absent,
    channel_shape,
    kernels_for,
    row_dtype,
)
from instep.collectives.exchange import (
    check_forward_done,
    copy_from_peer,
    current_streams,
    exchange_tensors,
    gather_rows,
    number_label,
    reject_checkpoint,
    start_backward,
)
from instep.collectives.group import PeerFailure, ReplicaContext
from instep.runtime.torch_private import is_batched_gradient


def normalize(
    context: ReplicaContext,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: RunningStatistics | None,
) -> Tensor:
    """Normalize a replica's shard by the statistics of the whole batch, and update the running statistics.

    Raises `TooFewValues` on all replicas if the whole batch has at most one value per channel.
    """
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    grad = grad and any(t is not None and t.requires_grad for t in (x, weight, bias))
    dtype, channels, group = row_dtype(x), x.shape[1], context.group
    label = _label(channels, dtype, grad)
    kernels = kernels_for(x, weight, bias)
    if kernels is None:
        return normalize_differentiably(context, label, x, weight, bias, eps, running)
    dense = kernels.dense(x.detach())
    count = x.numel() // channels if channels else 0
    # The inverse deviation of a constant channel is infinite without eps: then rows have variances.
    buffer = group.row_buffer(2 * channels + 1, dtype, x.device) if eps > 0 else None
    row = kernels.describe(dense, eps, buffer)
    if grad and group.joint_graph:
        part = JointPart(context, x, weight, bias, dense, row, current_streams([x]), SharedResult())
        return _normalize_joint(part, label, kernels, count, eps, running)
    rows = gather_rows(context, label, row)
    statistics = kernels.combine(rows, count, eps, buffer is not None, running)
    if not grad:
        return kernels.normalize(dense, weight, bias, statistics, eps).to(x.dtype)
    call = NormCall(kernels, eps, number_label(label, context.exchange_count), context.active)
    output, token = apply_batch_norm(x, weight, bias, dense, statistics, call)
    context.tokens.append(token)
    return cast(Tensor, output)


@lru_cache(maxsize=1024)
def _label(channels: int, dtype: torch.dtype, grad: bool) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"batch normalization of {channels} channels in {name}{'' if grad else ' without gradients'}"


@lru_cache(maxsize=4096)
def _backward_label(label: str) -> str:
    return f"the backward of {label}"


class NormCall(NamedTuple):
    """A call of a layer on one replica."""

    kernels: Kernels
    eps: float
    label: str
    active_contexts: list[ReplicaContext]
    """See `ReplicaContext.active`. Not the context itself: its tokens reference the node."""


class BatchNorm(torch.autograd.Function):
    """Normalizes one replica's shard. Backward gathers the sums of all replicas' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dense: Tensor,
        statistics: Statistics,
        call: NormCall,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.is_freed = call, False
        _save(ctx, [x, weight], [statistics])
        ctx.dtypes = [_dtype_if_needed(weight), _dtype_if_needed(bias)]
        output = call.kernels.normalize(dense, weight, bias, statistics, call.eps).to(x.dtype)
        return output, output.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> Any:
        kernels, eps, label, active_contexts = ctx.call
        context, saved = start_backward(ctx, label, active_contexts)
        (x, weight), (statistics,) = _load(ctx, saved)
        if torch.is_grad_enabled():
            label = f"the differentiable backward of {label}"
            outputs = [normalize_differentiably(context, label, x, weight, None, eps)]
            grads = _differentiate(outputs, [x, weight], ctx.dtypes[1:], [gradient])
            return (*grads, None, None, None)
        dense = kernels.dense(x)
        buffer = context.group.row_buffer(2 * dense.shape[1], row_dtype(dense), dense.device)
        row, grad_weight, grad_bias = _reduce(kernels, gradient, dense, weight, statistics, eps, buffer)
        rows = context.group.all_gather(context.info.index, _backward_label(label), row)
        if gradient is None and are_absent(rows):
            return (None,) * 6
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = kernels.gradient(gradient, dense, weight, statistics, rows, eps).to(x.dtype)
        return grad_x, _cast(grad_weight, ctx.dtypes[0]), _cast(grad_bias, ctx.dtypes[1]), None, None, None


# The C++ `apply` alone: the Python override only adds support for `torch.func` transforms, under which calls run on one
# device.
apply_batch_norm = cast(Callable[..., tuple[Any, ...]], super(torch.autograd.Function, BatchNorm).apply)


def _dtype_if_needed(parameter: Tensor | None) -> torch.dtype | None:
    """The dtype of a parameter's gradient; None if it needs none."""
    return parameter.dtype if parameter is not None and parameter.requires_grad else None


def _cast(gradient: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if gradient is None or dtype is None else gradient.to(dtype)


def _save(ctx: Any, inputs: Sequence[Tensor | None], statistics: Sequence[Statistics]) -> None:
    """Save tensors for backward. Counts may be on the host."""
    ctx.counts = [None if isinstance(count, Tensor) else count for _, _, count in statistics]
    ctx.num_inputs = len(inputs)
    tensors = [t for each in statistics for t in each if isinstance(t, Tensor)]
    ctx.save_for_backward(*inputs, *tensors)


def _load(ctx: Any, saved: Sequence[Any]) -> tuple[Sequence[Any], list[Statistics]]:
    """The inputs and the statistics among the saved tensors."""
    inputs, tensors = saved[: ctx.num_inputs], iter(saved[ctx.num_inputs :])
    return inputs, [
        Statistics(next(tensors), next(tensors), next(tensors) if count is None else count) for count in ctx.counts
    ]


def _reduce(
    kernels: Kernels,
    gradient: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    statistics: Statistics,
    eps: float,
    buffer: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The row of a gradient that may be absent, and the gradients of weight and bias."""
    if gradient is None:
        return absent_row(x), None, None
    if not x.numel():
        row = absent_row(x).abs_()
        grad_bias, grad_weight = row.view(2, -1).unbind()
        return row, grad_weight, grad_bias
    return kernels.reduce(gradient, x, weight, statistics, eps, buffer)


# In a joint graph.


class SharedResult:
    """A result that the first of several threads computes for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._result: Sequence[Tensor] | None = None
        self._failed = False

    def get(self, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        with self._lock:
            if self._failed:
                raise PeerFailure("another replica failed in this collective.")
            if self._result is None:
                self._failed = True
                self._result = compute()
                self._failed = False
            return self._result


class JointPart(NamedTuple):
    """What one replica sends in a joint graph."""

    context: ReplicaContext
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dense: Tensor
    row: Tensor
    streams: dict[torch.device, Any]
    """The replica's current streams, on which its part is computed, in backward too."""
    outputs: SharedResult


class JointCall(NamedTuple):
    """A call of a layer on all replicas."""

    kernels: list[Kernels]
    eps: float
    label: str
    contexts: list[ReplicaContext]
    streams: list[dict[torch.device, Any]]


def _normalize_joint(
    part: JointPart, label: str, kernels: Kernels, count: int, eps: float, running: RunningStatistics | None
) -> Tensor:
    info = part.context.info
    reject_checkpoint(part.context, label)
    parts: list[JointPart] = part.context.group.exchange(info.index, label, part)
    rows = torch.stack([copy_from_peer(each.row, part.row.device, each.streams) for each in parts])
    statistics = kernels.combine(rows, count, eps, False, running)

    def compute() -> Sequence[Tensor]:
        by_device = {rows.device: statistics}
        each_kernels = [cast(Kernels, kernels_for(each.x, each.weight, each.bias)) for each in parts]
        with _use_streams([each.streams for each in parts]):
            for each, own in zip(parts, each_kernels, strict=True):
                if (device := each.row.device) not in by_device:
                    by_device[device] = own.combine(rows.to(device), max(2, count), eps, False, None)
            call = JointCall(
                each_kernels, eps, label, [each.context for each in parts], [each.streams for each in parts]
            )
            inputs = [tensor for each in parts for tensor in (each.x, each.weight, each.bias)]
            all_statistics = [by_device[each.row.device] for each in parts]
            return apply_joint_batch_norm([each.dense for each in parts], all_statistics, call, *inputs)

    return parts[0].outputs.get(compute)[info.index]


@contextmanager
def _use_streams(streams: Sequence[dict[torch.device, Any]]) -> Iterator[None]:
    """Context manager: makes the replicas' streams the current ones. Replicas on one device share a stream."""
    with ExitStack() as stack:
        for device, stream in {device: stream for each in streams for device, stream in each.items()}.items():
            module: Any = torch.get_device_module(device)
            if module.current_stream(device) != stream:
                stack.enter_context(module.stream(stream))
        yield


class JointBatchNorm(torch.autograd.Function):
    """Normalizes all replicas' shards."""

    @staticmethod
    def forward(
        ctx: Any, dense: list[Tensor], statistics: list[Statistics], call: JointCall, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        xs, weights, biases = cast(Any, (inputs[::3], inputs[1::3], inputs[2::3]))
        _save(ctx, [*xs, *weights], statistics)
        ctx.dtypes = [_dtype_if_needed(parameter) for parameter in (*weights, *biases)]
        return tuple(
            kernels.normalize(shard, weight, bias, own, call.eps).to(x.dtype)
            for kernels, shard, x, weight, bias, own in zip(
                call.kernels, dense, xs, weights, biases, statistics, strict=True
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call: JointCall = ctx.call
        for context in call.contexts:
            check_forward_done(context, call.label)
        inputs, statistics = _load(ctx, ctx.saved_tensors)
        count = len(call.kernels)
        xs, weights = inputs[:count], inputs[count:]
        with _use_streams(call.streams):
            if torch.is_grad_enabled() or any(g is not None and is_batched_gradient(g) for g in gradients):
                with torch.enable_grad():
                    outputs = _normalize_all_differentiably(xs, weights, call.eps)
                grads = _differentiate(outputs, inputs, ctx.dtypes[count:], gradients)
            else:
                grads = _joint_gradients(ctx, call, xs, weights, statistics, gradients)
        return (None, None, None, *(grads[at * count + i] for i in range(count) for at in range(3)))


apply_joint_batch_norm = cast(Callable[..., tuple[Tensor, ...]], super(torch.autograd.Function, JointBatchNorm).apply)


def _joint_gradients(
    ctx: Any,
    call: JointCall,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor | None],
    statistics: Sequence[Statistics],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of all replicas' inputs, weights and biases, in this order."""
    dense = [kernels.dense(x) for kernels, x in zip(call.kernels, xs, strict=True)]
    parts = list(zip(call.kernels, gradients, dense, weights, statistics, strict=True))
    reduced = [_reduce(*part, call.eps) for part in parts]
    rows: dict[torch.device, Tensor] = {}
    grad_xs: list[Tensor | None] = []
    for at, (x, (kernels, gradient, shard, weight, own)) in enumerate(zip(xs, parts, strict=True)):
        if not ctx.needs_input_grad[3 + 3 * at]:
            grad_xs.append(None)
            continue
        if x.device not in rows:
            rows[x.device] = torch.stack([row.to(x.device) for row, _, _ in reduced])
        grad_xs.append(kernels.gradient(gradient, shard, weight, own, rows[x.device], call.eps).to(x.dtype))
    parameters = [*(grad for _, grad, _ in reduced), *(grad for _, _, grad in reduced)]
    return [*grad_xs, *map(_cast, parameters, ctx.dtypes)]


# With differentiable operations.


def normalize_differentiably(
    context: ReplicaContext,
    label: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: RunningStatistics | None = None,
) -> Tensor:
    """Normalize by torch operations and `exchange_tensors`, whose gradients can be differentiated again."""
    rows, counts = exchange_tensors(context, label, [_describe(x)], x.numel() // max(1, x.shape[1]), owned=True)
    total = sum(counts)
    if total < 2:
        raise TooFewValues(total)
    mean, var = _combine([tensors[0] for tensors in rows], counts)
    if running is not None:
        running.update(mean.detach(), var.detach(), total / (total - 1))
    return _apply(x, weight, bias, mean, var, eps)


def _normalize_all_differentiably(xs: Sequence[Tensor], weights: Sequence[Tensor | None], eps: float) -> list[Tensor]:
    """All replicas' outputs, without bias, within a joint graph."""
    rows, counts = [_describe(x) for x in xs], [x.numel() // max(1, x.shape[1]) for x in xs]
    outputs = []
    for x, weight in zip(xs, weights, strict=True):
        mean, var = _combine([row.to(x.device) for row in rows], counts)
        outputs.append(_apply(x, weight, None, mean, var, eps))
    return outputs


def _differentiate(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    bias_dtypes: Sequence[torch.dtype | None],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of `inputs` and of the outputs' biases, with their graph if grad mode is enabled."""
    given = [
        torch.zeros_like(output) if gradient is None else gradient
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
    needed = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, needed, given, create_graph=torch.is_grad_enabled(), allow_unused=True))
    grads = [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
    biases = [
        None if dtype is None else gradient.sum([0, *range(2, gradient.ndim)]).to(dtype)
        for dtype, gradient in zip(bias_dtypes, given, strict=True)
    ]
    return [*grads, *biases]


def _describe(x: Tensor) -> Tensor:
    """Mean and variance of each channel, stacked."""
    x = x.to(row_dtype(x))
    return channel_statistics(x) if x.numel() else x.sum([0, *range(2, x.ndim)]).repeat(2, 1)


def _apply(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
    zeros, ones = mean.new_zeros(len(mean)), mean.new_ones(len(mean))
    # x * scale + shift, by torch's batch norm kernels, which are the fastest for per-channel factors
    return torch.batch_norm(x.to(mean.dtype), scale, shift, zeros, ones, False, 0.0, 0.0, False).to(x.dtype)


class ChannelStatistics(torch.autograd.Function):
    """Mean and variance of each channel, stacked, in few passes over the input.

    On the CPU `torch.var_mean` is several times slower, unless the input is tiny.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dims = [0, *range(2, x.ndim)]
        if x.device.type == "cpu":
            mean = x.mean(dims)
            var = (x - mean.view(channel_shape(x))).square_().mean(dims)
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
        return torch.addcmul(base.view(channel_shape(x)), x, slope.view(channel_shape(x)))


# torch does not type `Function.apply`.
channel_statistics = cast(Callable[[Tensor], Tensor], ChannelStatistics.apply)


def _combine(parts: Sequence[Tensor], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
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
