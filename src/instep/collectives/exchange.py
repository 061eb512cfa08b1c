"""Exchanging tensors between replicas, with gradients: the operation below every collective."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from instep.autograd.context import GRAPH_FREED_MESSAGE
from instep.collectives.group import ReplicaContext, current_context
from instep.errors import CollectiveError
from instep.runtime.torch_private import is_graph_retained
from instep.structure.shapes import is_plain_tensor


def exchange_tensors(
    context: ReplicaContext, label: str, tensors: Sequence[Tensor], metadata: Any = None, *, owned: bool = False
) -> tuple[list[list[Tensor]], list[Any]]:
    """Every replica's tensors and notes, in the order of the replicas; differentiable.

    They may be read and never written: all replicas that got a tensor share its memory. So it is a copy, unless the
    tensors are `fresh`: nobody else has them.
    """
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    label = label if grad else f"{label} without gradients"
    kept = list(tensors) if owned else [tensor.clone() for tensor in tensors]
    if context.group.joint_graph or (context.info.device is not None and context.info.device.type != "cpu"):
        _reject_checkpoint(context, label)
    if context.group.joint_graph:
        received, notes = _exchange_joint(context, label, kept, metadata)
        for tensor in kept:
            if tensor.requires_grad:
                tensor.register_hook(partial(_reject_inner_gradient, context, label))
    else:
        received, notes = _exchange_separate(context, label, kept, metadata, grad)
    received[context.info.index] = kept
    return received, notes


class JointPayload(NamedTuple):
    """What one replica brings to a joint meeting."""

    tensors: list[Tensor]
    streams: dict[torch.device, Any]
    metadata: Any


def _exchange_joint(
    place: ReplicaContext, label: str, tensors: list[Tensor], note: Any
) -> tuple[list[list[Tensor]], list[Any]]:
    """Tensors cross with their history: the graphs of the replicas are one."""
    mine = place.info
    parcels: list[JointPayload] = place.group.exchange(
        mine.index, label, JointPayload(tensors, _current_streams(tensors), note)
    )
    received: list[list[Tensor]] = [[] for _ in parcels]
    for index, parcel in enumerate(parcels):
        if index != mine.index:
            for at, tensor in enumerate(parcel.tensors):
                # where this replica's own counterpart is: on its device, or on the host
                place_for = tensors[min(at, len(tensors) - 1)].device if tensors else mine.device
                received[index].append(_copy_from_peer(tensor, place_for, parcel.streams))
    return received, [parcel.metadata for parcel in parcels]


def _current_streams(tensors: Sequence[Tensor]) -> dict[torch.device, Any]:
    """The stream that each tensor's device works on in this thread."""
    places = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return {place: torch.get_device_module(place).current_stream(place) for place in places}


def _copy_from_peer(tensor: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """Another replica's tensor on a device; a copy from an accelerator waits for what the sender has queued there."""
    if device is None or tensor.device == device:
        return tensor
    stream = streams.get(tensor.device)
    if stream is None:
        return tensor.to(device)
    with torch.get_device_module(tensor.device).stream(stream):
        return tensor.to(device)


@dataclass
class Exchange:
    """One crossing between separate graphs: who, what for, and what came of it."""

    context: ReplicaContext
    label: str
    metadata: Any = None
    counts: list[int] = field(default_factory=list)
    """How many tensors each replica sent."""
    all_metadata: list[Any] = field(default_factory=list)
    needs_grad: bool = False
    """Whether a gradient can come back to any replica."""

    @property
    def peers(self) -> list[int]:
        position = self.context.info
        return [index for index in range(position.count) if index != position.index]


def _exchange_separate(
    place: ReplicaContext, label: str, tensors: list[Tensor], note: Any, grad: bool
) -> tuple[list[list[Tensor]], list[Any]]:
    """Tensors cross without their history, and their gradients come back the same way."""
    place.exchange_count += 1
    route = Exchange(place, f"{label}, number {place.exchange_count} of the call", note)
    flat = iter(_run_exchange(route, [list(tensors) for _ in route.peers], grad))
    received = [[cast(Tensor, next(flat)) for _ in range(count)] for count in route.counts]
    notes, route.all_metadata, route.metadata = route.all_metadata, [], None  # the graph needs none of them
    return received, notes


def _run_exchange(route: Exchange, rows: list[TensorRow], grad: bool) -> TensorRow:
    """A row of tensors to each other replica; what they sent, one row after the other."""
    flat = [tensor for row in rows for tensor in row]
    device = next((tensor.device for tensor in flat if tensor is not None), torch.device("cpu"))
    start = torch.zeros((), device=device, requires_grad=grad)
    token, *received = apply_exchange(start, route, [len(row) for row in rows], *flat)
    if grad and route.needs_grad:
        route.context.tokens.append(token)
    return list(received)


class ExchangeFunction(torch.autograd.Function):
    """Gives each other replica its row of tensors and returns the rows that they had for this one."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, route: Exchange, widths: list[int], *tensors: Tensor | None
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.consumed_tokens = False
        mine = route.context.info
        items = iter(tensors)
        rows = {peer: [next(items) for _ in range(width)] for peer, width in zip(route.peers, widths, strict=True)}
        ctx.places = [None if tensor is None else tensor.device for tensor in tensors]
        needed = {peer: [_requires_grad(tensor) for tensor in row] for peer, row in rows.items()}
        present = [tensor for tensor in tensors if tensor is not None]
        bare = {id(tensor): tensor.detach() for tensor in present}
        handed = {peer: [bare.get(id(tensor)) for tensor in row] for peer, row in rows.items()}
        package = Payload(handed, needed, _current_streams(present), route.metadata)
        packages: list[Payload] = route.context.group.exchange(mine.index, route.label, package)
        route.all_metadata = [package.metadata for package in packages]
        route.needs_grad = any(any(flags) for package in packages for flags in package.needs_grad.values())
        route.counts = [0 if i == mine.index else len(p.rows[mine.index]) for i, p in enumerate(packages)]
        received: TensorRow = []
        constant: list[Tensor] = []
        for peer in route.peers:
            package = packages[peer]
            own = [tensor.device for tensor in rows[peer] if tensor is not None]
            sent = zip(package.rows[mine.index], package.needs_grad[mine.index], strict=True)
            for at, (tensor, wanted) in enumerate(sent):
                made = None if tensor is None else _local_tensor(tensor, mine.device, package.streams)
                if made is not None and own:  # another replica's device may be the host
                    made = _to_device(made, own[min(at, len(own) - 1)])
                elif made is not None and is_staged(package, mine.index, at) and mine.device is not None:
                    made = _to_device(made, mine.device)
                received.append(made)
                if made is not None and not wanted:
                    constant.append(made)
        ctx.mark_non_differentiable(*constant)
        # Not the route itself: it leads to the tokens, which lead back here, and nobody would ever clear that away.
        ctx.label, ctx.rows = route.label, [route.counts[peer] for peer in route.peers]
        ctx.open = route.context.active
        return (torch.zeros_like(token), *received)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> Any:
        if ctx.consumed_tokens:
            raise RuntimeError(GRAPH_FREED_MESSAGE)
        ctx.saved_tensors  # noqa: B018  # a checkpointed region around this is run again here at the latest
        ctx.consumed_tokens = not is_graph_retained()
        now = current_context() or next(iter(ctx.open), None)
        if now is None:
            raise CollectiveError(
                f"a gradient came to {ctx.label} by another way than the backward of its call.\n"
                f"Return what the gradient is taken of from forward, so that every replica takes part."
            )
        items = iter(gradients)
        rows = [[next(items) for _ in range(count)] for count in ctx.rows]
        back = Exchange(now, f"the backward of {ctx.label}")
        brought = zip(_run_exchange(back, rows, torch.is_grad_enabled()), ctx.places, strict=True)
        return (None, None, None, *(g if g is None or p is None else g.to(p) for g, p in brought))


def _requires_grad(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _local_tensor(sent: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """A tensor object of this replica's own, with a version counter of its own, in memory that may be shared.

    What lies on an accelerator comes to the replica's own, what lies on the host stays there.
    """
    tensor = sent if sent.device.type == "cpu" else _copy_from_peer(sent, device, streams)
    return tensor.data if tensor is sent else tensor


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; one of the host's has left it when this returns, and nobody waits for it to arrive."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


# torch leaves `Function.apply` without types.
apply_exchange = cast(Callable[..., tuple[Any, ...]], ExchangeFunction.apply)


def _reject_inner_gradient(place: ReplicaContext, label: str, _: Tensor) -> None:
    """In a joint graph a gradient that one replica takes in its forward would leave out what the others make of it."""
    if not place.forward_done:
        raise CollectiveError(
            f"a gradient was taken inside of forward through {label}, where this engine cannot add what the other "
            f"replicas have of it.\nTake it outside of the call; on CPU replicas engine='threads' can do it inside."
        )


def _reject_checkpoint(place: ReplicaContext, label: str) -> None:
    """On accelerators autograd runs regions again in a thread of its own: nobody would meet there."""
    if not place.grad_enabled:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not place.entry_code:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise CollectiveError(
                f"{label} is inside of a region under activation checkpointing, which runs again in the backward, "
                f"where replicas of accelerators, and of one joint graph, cannot meet.\n"
                f"Take it out of the checkpointed region"
                f"{', or pass sync_batchnorm=False' if label.startswith('batch norm') else ''}; "
                f"on CPU replicas engine='threads' runs it as it is."
            )
        frame = frame.f_back


TensorRow = list[Tensor | None]

HOST_STAGING_LIMIT = 64 * 1024
"""Bytes of a package up to which its tensors cross by the host, wherever they are."""


class Payload(NamedTuple):
    """What one replica brings to a meeting of separate graphs: a row of tensors for every other replica."""

    rows: dict[int, TensorRow]
    needs_grad: dict[int, list[bool]]
    """Which of them a gradient is wanted for."""
    streams: dict[torch.device, Any]
    metadata: Any
    staged: Mapping[int, list[bool]] = MappingProxyType({})
    """Which of them were brought to the host from an accelerator; nothing where none was."""


EncodedPayload = tuple[dict[int, list[int | None]], dict[int, list[bool]], Any, dict[int, list[bool]]]
"""A package as it goes to another process, whose streams are its own: for each row the places of its tensors among all
that go along, which of them need a gradient, the note, and which of them were brought to the host."""


def stage_on_host(package: Payload) -> Payload:
    """A package for other processes: what is light comes to the host first.

    So a device is waited for once, by whoever brings the package, and not once more by everybody who passes it on.
    """
    far = {id(t): t for row in package.rows.values() for t in row if t is not None and t.device.type != "cpu"}
    if (
        not far
        or not all(map(is_plain_tensor, far.values()))
        or sum(t.nbytes for t in far.values()) > HOST_STAGING_LIMIT
    ):
        return package
    near = {key: tensor.cpu() for key, tensor in far.items()}
    rows = {peer: [t if t is None else near.get(id(t), t) for t in row] for peer, row in package.rows.items()}
    lifted = {peer: [id(t) in near for t in row] for peer, row in package.rows.items()}
    return package._replace(rows=rows, staged=lifted)


def is_staged(package: Payload, peer: int, at: int) -> bool:
    """Whether one of the tensors for a replica was brought to the host."""
    return bool(package.staged) and package.staged[peer][at]


def encode_payload(package: Payload, tensors: list[Tensor], to: int | None = None) -> EncodedPayload:
    """A package for another process, with its tensors added to others, each once.

    Of its rows only those that are for one replica, where that is said.
    """
    places: dict[int, int] = {}
    rows: dict[int, list[int | None]] = {}
    for peer, row in package.rows.items():
        if to is None or peer == to:
            for tensor in row:
                if tensor is not None and id(tensor) not in places:
                    places[id(tensor)] = len(tensors)
                    tensors.append(tensor)
            rows[peer] = [places.get(id(tensor)) for tensor in row]
    return rows, package.needs_grad, package.metadata, dict(package.staged)


def decode_payload(bare: EncodedPayload, tensors: Sequence[Tensor]) -> Payload:
    """A package that came from another process."""
    rows, needed, note, lifted = bare
    found = {peer: [None if place is None else tensors[place] for place in row] for peer, row in rows.items()}
    return Payload(found, needed, {}, note, lifted)
