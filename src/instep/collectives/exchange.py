"""Exchanging tensors between replicas, with gradients: the operation below every collective.

`exchange_tensors` gives every replica every replica's tensors (an all-gather). What a collective computes from them is
ordinary torch code on each replica.

There are two cases. If the replicas build one joint graph, tensors are exchanged with their history and autograd does
the rest. Otherwise every replica runs its own backward, in which the replicas exchange gradients in the reverse order:
`ExchangeFunction` is its own adjoint. For that, all replicas have to reach the same exchanges in backward. So each
exchange has a token, a zero tensor at which every replica's backward starts too: a replica whose outputs do not depend
on an exchange still takes part in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from instep.autograd.bridge import GRAPH_FREED_MESSAGE
from instep.collectives.group import Group, ReplicaContext, current_context, describe_row
from instep.errors import CollectiveError
from instep.runtime.torch_private import is_graph_retained, register_own_hook
from instep.structure.shapes import is_plain_tensor

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def exchange_tensors(
    context: ReplicaContext, label: str, tensors: Sequence[Tensor], metadata: Any = None, *, owned: bool = False
) -> tuple[list[list[Tensor]], list[Any]]:
    """Return every replica's tensors and metadata, in the order of the replicas; differentiable.

    The returned tensors must not be written to: replicas share their memory. Tensors are copied before they are sent,
    unless they are `owned`, i.e. nothing else uses them.
    """
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    label = label if grad else f"{label} without gradients"
    sent = list(tensors) if owned else [tensor.clone() for tensor in tensors]
    reject_checkpoint(context, label)
    if context.group.joint_graph:
        received, all_metadata = _exchange_joint(context, label, sent, metadata)
        for tensor in sent:
            if tensor.requires_grad:
                register_own_hook(tensor, partial(_reject_inner_gradient, context, label))
    else:
        received, all_metadata = _exchange_separate(context, label, sent, metadata, grad)
    received[context.info.index] = sent
    return received, all_metadata


def gather_rows(context: ReplicaContext, label: str, row: Tensor) -> Tensor:
    """All-gather of one row per replica, as `[count, *row.shape]`, without gradients (see `Group.all_gather`).

    The label is numbered, so that replicas that are out of step fail. In a backward, where the label of the forward
    has a number already, call `Group.all_gather` itself.
    """
    reject_checkpoint(context, label)
    return context.group.all_gather(context.info.index, numbered_label(context, label), row.detach())


def numbered_label(context: ReplicaContext, label: str) -> str:
    """The label of the call's next exchange. Counts it."""
    context.exchange_count += 1
    return number_label(label, context.exchange_count)


@lru_cache(maxsize=4096)
def number_label(label: str, number: int) -> str:
    return f"{label}, number {number} of the call"


def all_gather_by_exchange(
    exchange: Callable[[int, str, Payload], list[Payload]], index: int, count: int, label: str, row: Tensor
) -> Tensor:
    """`Group.all_gather` by a `Group.exchange` of a `Payload`. The label describes the row."""
    peers = [peer for peer in range(count) if peer != index]
    no_grad = {peer: [False] for peer in peers}
    payload = Payload({peer: [row] for peer in peers}, no_grad, current_streams([row]), None)
    payloads = exchange(index, label, payload)
    rows = [row] * count
    for peer in peers:
        received = payloads[peer].rows[index][0]
        assert received is not None
        rows[peer] = _to_device(copy_from_peer(received, row.device, payloads[peer].streams), row.device)
    return torch.stack(rows)


class RowPayload(NamedTuple):
    """What one replica sends in an `all_gather` within one process."""

    row: Tensor
    streams: dict[torch.device, Any]


def all_gather_in_process(group: Group, index: int, label: str, row: Tensor) -> Tensor:
    """`Group.all_gather` by `Group.exchange`, for groups that hand over any object."""
    payloads: list[RowPayload] = group.exchange(
        index, describe_row(label, row), RowPayload(row, current_streams([row]))
    )
    return torch.stack([copy_from_peer(payload.row, row.device, payload.streams) for payload in payloads])


class JointPayload(NamedTuple):
    """What one replica sends in an exchange within a joint graph."""

    tensors: list[Tensor]
    streams: dict[torch.device, Any]
    metadata: Any


def _exchange_joint(
    context: ReplicaContext, label: str, tensors: list[Tensor], metadata: Any
) -> tuple[list[list[Tensor]], list[Any]]:
    """Exchange tensors with their history, in a joint graph."""
    info = context.info
    payloads: list[JointPayload] = context.group.exchange(
        info.index, label, JointPayload(tensors, current_streams(tensors), metadata)
    )
    received: list[list[Tensor]] = [[] for _ in payloads]
    for index, payload in enumerate(payloads):
        if index != info.index:
            for at, tensor in enumerate(payload.tensors):
                # the device of this replica's own tensor: its accelerator, or the CPU
                target_device = tensors[min(at, len(tensors) - 1)].device if tensors else info.device
                received[index].append(copy_from_peer(tensor, target_device, payload.streams))
    return received, [payload.metadata for payload in payloads]


def current_streams(tensors: Sequence[Tensor]) -> dict[torch.device, Any]:
    """The current streams of this thread on the tensors' devices."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return {device: torch.get_device_module(device).current_stream(device) for device in devices}


def copy_from_peer(tensor: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """Copy another replica's tensor to a device, on the sender's stream if it is on an accelerator."""
    if device is None or tensor.device == device:
        return tensor
    stream = streams.get(tensor.device)
    if stream is None:
        return tensor.to(device)
    with torch.get_device_module(tensor.device).stream(stream):
        return tensor.to(device)


@dataclass
class Exchange:
    """One exchange between separate graphs."""

    context: ReplicaContext
    label: str
    metadata: Any = None
    counts: list[int] = field(default_factory=list)
    """The number of tensors that each replica sent."""
    all_metadata: list[Any] = field(default_factory=list)
    needs_grad: bool = False
    """Whether any replica sent a tensor that requires grad."""

    @property
    def peers(self) -> list[int]:
        info = self.context.info
        return [index for index in range(info.count) if index != info.index]


def _exchange_separate(
    context: ReplicaContext, label: str, tensors: list[Tensor], metadata: Any, grad: bool
) -> tuple[list[list[Tensor]], list[Any]]:
    """Exchange tensors between separate graphs; backward exchanges their gradients."""
    exchange = Exchange(context, numbered_label(context, label), metadata)
    flat = iter(_run_exchange(exchange, [list(tensors) for _ in exchange.peers], grad))
    received = [[cast(Tensor, next(flat)) for _ in range(count)] for count in exchange.counts]
    all_metadata, exchange.all_metadata, exchange.metadata = exchange.all_metadata, [], None  # not needed in backward
    return received, all_metadata


def _run_exchange(exchange: Exchange, rows: list[TensorRow], grad: bool) -> TensorRow:
    """Send a row of tensors to each other replica; returns the received rows, concatenated."""
    flat = [tensor for row in rows for tensor in row]
    device = next((tensor.device for tensor in flat if tensor is not None), torch.device("cpu"))
    start = torch.zeros((), device=device, requires_grad=grad)
    token, *received = apply_exchange(start, exchange, [len(row) for row in rows], *flat)
    if grad and exchange.needs_grad:
        exchange.context.tokens.append(token)
    return list(received)


class ExchangeFunction(torch.autograd.Function):
    """Sends each other replica a row of tensors and returns the rows received."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, exchange: Exchange, widths: list[int], *tensors: Tensor | None
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.is_freed = False
        info = exchange.context.info
        items = iter(tensors)
        rows = {peer: [next(items) for _ in range(width)] for peer, width in zip(exchange.peers, widths, strict=True)}
        ctx.devices = [None if tensor is None else tensor.device for tensor in tensors]
        needed = {peer: [_requires_grad(tensor) for tensor in row] for peer, row in rows.items()}
        present = [tensor for tensor in tensors if tensor is not None]
        detached = {id(tensor): tensor.detach() for tensor in present}
        rows_to_send = {peer: [detached.get(id(tensor)) for tensor in row] for peer, row in rows.items()}
        payload = Payload(rows_to_send, needed, current_streams(present), exchange.metadata)
        payloads: list[Payload] = exchange.context.group.exchange(info.index, exchange.label, payload)
        exchange.all_metadata = [payload.metadata for payload in payloads]
        exchange.needs_grad = any(any(flags) for payload in payloads for flags in payload.needs_grad.values())
        exchange.counts = [0 if i == info.index else len(p.rows[info.index]) for i, p in enumerate(payloads)]
        received: TensorRow = []
        constant: list[Tensor] = []
        for peer in exchange.peers:
            payload = payloads[peer]
            own_devices = [tensor.device for tensor in rows[peer] if tensor is not None]
            sent = zip(payload.rows[info.index], payload.needs_grad[info.index], strict=True)
            for at, (tensor, needs_grad) in enumerate(sent):
                if tensor is None:
                    received.append(None)
                    continue
                local = _local_tensor(tensor, info.device, payload.streams)
                if own_devices:  # the sender's device may be the CPU
                    local = _to_device(local, own_devices[min(at, len(own_devices) - 1)])
                elif is_staged(payload, info.index, at) and info.device is not None:
                    local = _to_device(local, info.device)
                received.append(local)
                if not needs_grad:
                    constant.append(local)
        ctx.mark_non_differentiable(*constant)
        # Not the exchange itself: its tokens reference this node, and the cycle would never be freed.
        ctx.label, ctx.widths = exchange.label, [exchange.counts[peer] for peer in exchange.peers]
        ctx.active_contexts = exchange.context.active
        return (torch.zeros_like(token), *received)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> Any:
        context = start_backward(ctx, ctx.label, ctx.active_contexts)[0]
        items = iter(gradients)
        rows = [[next(items) for _ in range(width)] for width in ctx.widths]
        exchange = Exchange(context, f"the backward of {ctx.label}")
        received = zip(_run_exchange(exchange, rows, torch.is_grad_enabled()), ctx.devices, strict=True)
        return (None, None, None, *(g if g is None or device is None else g.to(device) for g, device in received))


def start_backward(
    ctx: Any, label: str, active_contexts: Sequence[ReplicaContext]
) -> tuple[ReplicaContext, tuple[Any, ...]]:
    """Begin the backward of a node with a token; returns the context in which it exchanges, and its saved tensors.

    The node has `is_freed`, which is False at first.
    """
    if ctx.is_freed:
        raise RuntimeError(GRAPH_FREED_MESSAGE)
    saved: tuple[Any, ...] = ctx.saved_tensors  # recomputes a checkpointed region around this node
    ctx.is_freed = not is_graph_retained()
    context = current_context() or next(iter(active_contexts), None)
    if context is None:
        raise CollectiveError(
            f"a gradient reached {label}, outside the backward of its call, where the other replicas do not "
            f"take part.\nReturn from forward the tensor that is differentiated."
        )
    return context, saved


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _local_tensor(sent: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """A tensor with its own version counter; its memory may be shared.

    A tensor on an accelerator is copied to the replica's device; one on the CPU stays there.
    """
    tensor = sent if sent.device.type == "cpu" else copy_from_peer(sent, device, streams)
    return tensor.data if tensor is sent else tensor


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device, without waiting if it is on the CPU."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


# torch does not type `Function.apply`.
apply_exchange = cast(Callable[..., tuple[Any, ...]], ExchangeFunction.apply)


def _reject_inner_gradient(context: ReplicaContext, label: str, _: Tensor) -> None:
    check_forward_done(context, label)


def check_forward_done(context: ReplicaContext, label: str) -> None:
    """Raise for a gradient taken inside forward: in a joint graph it would lack the other replicas' contributions."""
    if not context.forward_done:
        raise CollectiveError(
            f"a gradient was taken inside forward through {label}. This engine cannot add the other replicas' "
            f"contributions there.\nTake it outside the call, or use engine='threads' with CPU replicas."
        )


def reject_checkpoint(context: ReplicaContext, label: str) -> None:
    """Raise for a collective in a checkpointed region, on accelerators and in joint graphs.

    There autograd recomputes such a region in one of its own threads, where the replicas cannot exchange tensors.
    """
    on_accelerator = context.info.device is not None and context.info.device.type != "cpu"
    if not context.grad_enabled or not (context.group.joint_graph or on_accelerator):
        return
    entry_code, frame = context.entry_code, cast(FrameType | None, sys._getframe(1))
    while frame is not None and (code := frame.f_code) is not entry_code:
        if code.co_filename == _CHECKPOINT_FILE:
            raise CollectiveError(
                f"{label} is inside an activation checkpoint, which runs again in backward. There, replicas on "
                f"accelerators and replicas with a joint graph cannot exchange tensors.\n"
                f"Move it out of the checkpoint"
                f"{', or pass sync_batchnorm=False' if label.startswith('batch norm') else ''}, "
                f"or use engine='threads' with CPU replicas."
            )
        frame = frame.f_back


TensorRow = list[Tensor | None]

HOST_STAGING_LIMIT = 64 * 1024
"""Payloads up to this many bytes are sent through host memory."""


class Payload(NamedTuple):
    """What one replica sends in an exchange between separate graphs: a row of tensors for every other replica."""

    rows: dict[int, TensorRow]
    needs_grad: dict[int, list[bool]]
    """Which of the tensors require grad."""
    streams: dict[torch.device, Any]
    metadata: Any
    staged: Mapping[int, list[bool]] = MappingProxyType({})
    """Which of the tensors were copied from an accelerator to the host; empty if none was."""


EncodedPayload = tuple[dict[int, list[int | None]], dict[int, list[bool]], Any, dict[int, list[bool]]]
"""A payload as sent to another process, without streams: each row as indices into the message's tensors, which tensors
require grad, the metadata, and which tensors were staged on the host."""


def stage_on_host(payload: Payload) -> Payload:
    """Copy the tensors of a small payload to the host.

    The sender then synchronizes with its device once, rather than every process that forwards the payload.
    """
    on_device = {id(t): t for row in payload.rows.values() for t in row if t is not None and t.device.type != "cpu"}
    if (
        not on_device
        or not all(map(is_plain_tensor, on_device.values()))
        or sum(t.nbytes for t in on_device.values()) > HOST_STAGING_LIMIT
    ):
        return payload
    on_host = {key: tensor.cpu() for key, tensor in on_device.items()}
    rows = {peer: [t if t is None else on_host.get(id(t), t) for t in row] for peer, row in payload.rows.items()}
    staged = {peer: [id(t) in on_host for t in row] for peer, row in payload.rows.items()}
    return payload._replace(rows=rows, staged=staged)


def is_staged(payload: Payload, peer: int, at: int) -> bool:
    """Whether one of the tensors for a replica was staged on the host."""
    return bool(payload.staged) and payload.staged[peer][at]


def encode_payload(payload: Payload, tensors: list[Tensor], to: int | None = None) -> EncodedPayload:
    """Encode a payload for another process. Appends its tensors to `tensors`, each once.

    With `to`, only the row for that replica is encoded.
    """
    indices: dict[int, int] = {}
    rows: dict[int, list[int | None]] = {}
    for peer, row in payload.rows.items():
        if to is None or peer == to:
            for tensor in row:
                if tensor is not None and id(tensor) not in indices:
                    indices[id(tensor)] = len(tensors)
                    tensors.append(tensor)
            rows[peer] = [indices.get(id(tensor)) for tensor in row]
    return rows, payload.needs_grad, payload.metadata, dict(payload.staged)


def decode_payload(encoded: EncodedPayload, tensors: Sequence[Tensor]) -> Payload:
    """Decode a payload that was received from another process."""
    rows, needed, metadata, staged = encoded
    decoded = {peer: [None if index is None else tensors[index] for index in row] for peer, row in rows.items()}
    return Payload(decoded, needed, {}, metadata, staged)
