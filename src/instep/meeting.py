"""Where the replicas of one call meet in the middle of it, and how tensors cross between them with their gradients.

Everything that replicas do together comes down to one operation, `share`: every replica gets every replica's tensors.
What is then made of them (a sum, a longer batch, the statistics of a batch) is ordinary torch code on each replica.

An engine brings a `Meeting` for each call, and for each backward where replicas have graphs of their own. There are two
kinds. In a joint meeting the replicas' graphs are one graph that one backward runs through, so tensors cross with their
history and autograd does the rest. Otherwise every replica runs its own backward, and the replicas meet once more
there, in the reverse order: `Swap` is its own adjoint.

For that no replica may pass by a meeting that another one comes to. So each crossing has a token, a tensor of no value,
that is one more root of the backward on every replica: outputs that are not used, inputs that were detached, and
replicas that use different tensors all come to the same meetings, with nothing to give.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.utils.checkpoint
from torch import Tensor

from instep.errors import CollectiveError
from instep.packages import Package, Row, is_lifted
from instep.private import keeps_graph
from instep.replicas.probing import excuse


class Meeting(Protocol):
    """What an engine brings so that the replicas of a call, or of its backward, can meet."""

    joint: bool
    """Whether the replicas' graphs are one, so that tensors cross with their history."""

    def exchange(self, index: int, label: str, payload: Any) -> list[Any]:
        """Hand over a payload and get every replica's, in their order.

        Raises `CollectiveError` at once when another replica has returned or failed, or came with another label.
        """
        ...


class PeerFailed(CollectiveError):
    """Another replica raised an exception, which is the one that the caller gets."""


def first_error(errors: Mapping[int, BaseException]) -> BaseException:
    """The error of the first replica that did not only fail because another one had."""
    return errors[min(errors, key=lambda index: (isinstance(errors[index], PeerFailed), index))]


@dataclass(frozen=True)
class Position:
    """Which part of a call this is."""

    index: int = 0
    count: int = 1
    device: torch.device | None = None
    """The replica's device; None outside of a parallel call."""
    size: int | None = None
    """The samples of this replica's shard, where the call has a batch that is split."""
    offset: int = 0
    """The samples of the replicas before this one."""


@dataclass
class Seat:
    """One replica's place in a meeting."""

    meeting: Meeting
    position: Position
    sizes: Sequence[int] = ()
    """The samples of every replica's shard."""
    grad: bool = False
    """Whether the caller wants gradients."""
    floor: CodeType | None = None
    """Code below which the caller's own frames begin."""
    over: bool = False
    """Whether the replica's forward has ended."""
    crossed: int = 0
    """How often tensors crossed so far."""
    tokens: list[Tensor] = field(default_factory=list)
    """One for each crossing that gradients can come back through, in order."""
    open: list[Seat] = field(default_factory=list)
    """This place while somebody is on it; autograd runs nodes of accelerators in threads that have no place."""

    def again(self, meeting: Meeting) -> Seat:
        """The same place in another meeting: the one of a backward."""
        return Seat(meeting, self.position, self.sizes, self.grad, self.floor, self.over, open=self.open)


_here = threading.local()
OUTSIDE = Position()


def seat() -> Seat | None:
    """This thread's place in a meeting of several replicas, if it has one."""
    return getattr(_here, "seat", None)


def sit(place: Seat | None) -> None:
    """Set this thread's place."""
    _here.seat = place


def alone() -> None:
    """Say that something was done together with others by one alone, which is nothing.

    What is run in parts to see how its outputs belong together is excused by it: such a module looks at the whole batch
    and takes care of that itself.
    """
    excuse("a cross-replica operation")


class attend:
    """Take a place in a meeting, for the length of a `with` block in one thread."""

    __slots__ = ("_before", "_place")

    def __init__(self, place: Seat | None) -> None:
        self._place = None if place is None or place.position.count == 1 else place

    def __enter__(self) -> None:
        self._before = seat()
        _here.seat = self._place
        if self._place is not None:
            self._place.open.append(self._place)

    def __exit__(self, *_: object) -> None:
        _here.seat = self._before
        if self._place is not None:
            self._place.open.pop()


def share(
    place: Seat, label: str, tensors: Sequence[Tensor], note: Any = None, *, fresh: bool = False
) -> tuple[list[list[Tensor]], list[Any]]:
    """Every replica's tensors and notes, in the order of the replicas; differentiable.

    They may be read and never written: all replicas that got a tensor share its memory. So it is a copy, unless the
    tensors are `fresh`: nobody else has them.
    """
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    label = label if grad else f"{label} without gradients"
    kept = list(tensors) if fresh else [tensor.clone() for tensor in tensors]
    if place.meeting.joint or (place.position.device is not None and place.position.device.type != "cpu"):
        _refuse_checkpoint(place, label)
    if place.meeting.joint:
        received, notes = _hand_over(place, label, kept, note)
        for tensor in kept:
            if tensor.requires_grad:
                tensor.register_hook(partial(_refuse_inside, place, label))
    else:
        received, notes = _swap(place, label, kept, note, grad)
    received[place.position.index] = kept
    return received, notes


class Parcel(NamedTuple):
    """What one replica brings to a joint meeting."""

    tensors: list[Tensor]
    streams: dict[torch.device, Any]
    note: Any


def _hand_over(place: Seat, label: str, tensors: list[Tensor], note: Any) -> tuple[list[list[Tensor]], list[Any]]:
    """Tensors cross with their history: the graphs of the replicas are one."""
    mine = place.position
    parcels: list[Parcel] = place.meeting.exchange(mine.index, label, Parcel(tensors, _streams(tensors), note))
    received: list[list[Tensor]] = [[] for _ in parcels]
    for index, parcel in enumerate(parcels):
        if index != mine.index:
            for at, tensor in enumerate(parcel.tensors):
                # where this replica's own counterpart is: on its device, or on the host
                place_for = tensors[min(at, len(tensors) - 1)].device if tensors else mine.device
                received[index].append(_bring(tensor, place_for, parcel.streams))
    return received, [parcel.note for parcel in parcels]


def _streams(tensors: Sequence[Tensor]) -> dict[torch.device, Any]:
    """The stream that each tensor's device works on in this thread."""
    places = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    return {place: torch.get_device_module(place).current_stream(place) for place in places}


def _bring(tensor: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """Another replica's tensor on a device; a copy from an accelerator waits for what the sender has queued there."""
    if device is None or tensor.device == device:
        return tensor
    stream = streams.get(tensor.device)
    if stream is None:
        return tensor.to(device)
    with torch.get_device_module(tensor.device).stream(stream):
        return tensor.to(device)


@dataclass
class Route:
    """One crossing between separate graphs: who, what for, and what came of it."""

    place: Seat
    label: str
    note: Any = None
    counts: list[int] = field(default_factory=list)
    """How many tensors each replica sent."""
    notes: list[Any] = field(default_factory=list)
    connected: bool = False
    """Whether a gradient can come back to any replica."""

    @property
    def peers(self) -> list[int]:
        position = self.place.position
        return [index for index in range(position.count) if index != position.index]


def _swap(
    place: Seat, label: str, tensors: list[Tensor], note: Any, grad: bool
) -> tuple[list[list[Tensor]], list[Any]]:
    """Tensors cross without their history, and their gradients come back the same way."""
    place.crossed += 1
    route = Route(place, f"{label}, number {place.crossed} of the call", note)
    flat = iter(_send(route, [list(tensors) for _ in route.peers], grad))
    received = [[cast(Tensor, next(flat)) for _ in range(count)] for count in route.counts]
    notes, route.notes, route.note = route.notes, [], None  # the graph needs none of them
    return received, notes


def _send(route: Route, rows: list[Row], grad: bool) -> Row:
    """A row of tensors to each other replica; what they sent, one row after the other."""
    flat = [tensor for row in rows for tensor in row]
    device = next((tensor.device for tensor in flat if tensor is not None), torch.device("cpu"))
    start = torch.zeros((), device=device, requires_grad=grad)
    token, *received = swap(start, route, [len(row) for row in rows], *flat)
    if grad and route.connected:
        route.place.tokens.append(token)
    return list(received)


class Swap(torch.autograd.Function):
    """Gives each other replica its row of tensors and returns the rows that they had for this one."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, route: Route, widths: list[int], *tensors: Tensor | None) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(token)
        ctx.spent = False
        mine = route.place.position
        items = iter(tensors)
        rows = {peer: [next(items) for _ in range(width)] for peer, width in zip(route.peers, widths, strict=True)}
        ctx.places = [None if tensor is None else tensor.device for tensor in tensors]
        needed = {peer: [_needs(tensor) for tensor in row] for peer, row in rows.items()}
        present = [tensor for tensor in tensors if tensor is not None]
        bare = {id(tensor): tensor.detach() for tensor in present}
        handed = {peer: [bare.get(id(tensor)) for tensor in row] for peer, row in rows.items()}
        package = Package(handed, needed, _streams(present), route.note)
        packages: list[Package] = route.place.meeting.exchange(mine.index, route.label, package)
        route.notes = [package.note for package in packages]
        route.connected = any(any(flags) for package in packages for flags in package.needed.values())
        route.counts = [0 if i == mine.index else len(p.rows[mine.index]) for i, p in enumerate(packages)]
        received: Row = []
        constant: list[Tensor] = []
        for peer in route.peers:
            package = packages[peer]
            own = [tensor.device for tensor in rows[peer] if tensor is not None]
            sent = zip(package.rows[mine.index], package.needed[mine.index], strict=True)
            for at, (tensor, wanted) in enumerate(sent):
                made = None if tensor is None else _own_object(tensor, mine.device, package.streams)
                if made is not None and own:  # another replica's device may be the host
                    made = _to(made, own[min(at, len(own) - 1)])
                elif made is not None and is_lifted(package, mine.index, at) and mine.device is not None:
                    made = _to(made, mine.device)
                received.append(made)
                if made is not None and not wanted:
                    constant.append(made)
        ctx.mark_non_differentiable(*constant)
        # Not the route itself: it leads to the tokens, which lead back here, and nobody would ever clear that away.
        ctx.label, ctx.rows = route.label, [route.counts[peer] for peer in route.peers]
        ctx.open = route.place.open
        return (torch.zeros_like(token), *received)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> Any:
        if ctx.spent:
            raise RuntimeError(SECOND_TIME)
        ctx.saved_tensors  # noqa: B018  # a checkpointed region around this is run again here at the latest
        ctx.spent = not keeps_graph()
        now = seat() or next(iter(ctx.open), None)
        if now is None:
            raise CollectiveError(
                f"a gradient came to {ctx.label} by another way than the backward of its call.\n"
                f"Return what the gradient is taken of from forward, so that every replica takes part."
            )
        items = iter(gradients)
        rows = [[next(items) for _ in range(count)] for count in ctx.rows]
        back = Route(now, f"the backward of {ctx.label}")
        brought = zip(_send(back, rows, torch.is_grad_enabled()), ctx.places, strict=True)
        return (None, None, None, *(g if g is None or p is None else g.to(p) for g, p in brought))


def _needs(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _own_object(sent: Tensor, device: torch.device | None, streams: dict[torch.device, Any]) -> Tensor:
    """A tensor object of this replica's own, with a version counter of its own, in memory that may be shared.

    What lies on an accelerator comes to the replica's own, what lies on the host stays there.
    """
    tensor = sent if sent.device.type == "cpu" else _bring(sent, device, streams)
    return tensor.data if tensor is sent else tensor


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; one of the host's has left it when this returns, and nobody waits for it to arrive."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


SECOND_TIME = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)

# torch leaves `Function.apply` without types.
swap = cast(Callable[..., tuple[Any, ...]], Swap.apply)


def _refuse_inside(place: Seat, label: str, _: Tensor) -> None:
    """In a joint graph a gradient that one replica takes in its forward would leave out what the others make of it."""
    if not place.over:
        raise CollectiveError(
            f"a gradient was taken inside of forward through {label}, where this engine cannot add what the other "
            f"replicas have of it.\nTake it outside of the call; on CPU replicas engine='threads' can do it inside."
        )


def _refuse_checkpoint(place: Seat, label: str) -> None:
    """On accelerators autograd runs regions again in a thread of its own: nobody would meet there."""
    if not place.grad:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not place.floor:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise CollectiveError(
                f"{label} is inside of a region under activation checkpointing, which runs again in the backward, "
                f"where replicas of accelerators, and of one joint graph, cannot meet.\n"
                f"Take it out of the checkpointed region"
                f"{', or pass sync_batchnorm=False' if label.startswith('batch norm') else ''}; "
                f"on CPU replicas engine='threads' runs it as it is."
            )
        frame = frame.f_back
