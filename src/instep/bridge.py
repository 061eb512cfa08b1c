"""The one autograd node that joins the caller's graph to the replicas' graphs.

Its inputs are the source's tensors that take a gradient and the shards that need one; its outputs are every replica's
output tensors. So parameter hooks fire, `.grad` accumulates, and `torch.autograd.grad` and `retain_graph` work: to the
caller's graph a call is one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from instep.errors import BridgeError
from instep.hooks import spare_hooks
from instep.meeting import SECOND_TIME, Seat
from instep.private import is_batched, keeps_graph
from instep.random import Streams
from instep.replicas.tensors import Guard, gradient_of

Gradients = list[Tensor | None]


class Entry(torch.autograd.Function):
    """Lets tensors into a replica as outputs of a node: no leaves and no views, so a first layer may write in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> Any:
        return gradients


@dataclass
class Side:
    """One replica's end of the bridge."""

    leaves: list[Tensor]
    """The replica's own leaves, in the order of the sources."""
    inputs: list[Tensor]
    """Leaves that stand for the shards that need a gradient."""
    outputs: list[Tensor | None]
    """Output tensors that need a gradient; None once their graph was given up."""
    guard: Guard
    name: str
    """The replica and its device, for messages."""
    seat: Seat | None = None
    """Its place among the replicas of the call, with the tokens of what they did together."""
    remote: Any = None
    """For a replica of another process: what its backward is asked for by."""
    brought: Gradients | None = None
    """What came of its leaves' gradients from there, if they do not lie on the leaves."""

    def collect(self) -> Gradients:
        """The gradients that a backward left for the leaves, which are clear again afterwards."""
        brought, self.brought = self.brought, None
        return take(self.leaves) if brought is None else brought


class Backward(Protocol):
    """What the bridge asks of an engine."""

    def backward(self, span: Span, gradients: Sequence[Gradients], keep: bool) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward; the sum of the leaves' gradients, and each replica's input gradients."""
        ...


@dataclass
class Notes:
    """Tensors of the caller whose memory or values replicas use under version counters of their own."""

    entries: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def add(self, outside: Tensor, inside: Tensor) -> None:
        """Watch a tensor of the caller for the sake of the one that a replica has in its place."""
        if not outside.is_inference():
            self.entries.append((outside, outside._version, inside))

    def renew(self, outsides: Sequence[Tensor]) -> None:
        """Take what these tensors hold now as what the replicas have used."""
        known = set(map(id, outsides))
        self.entries = [(o, o._version if id(o) in known else version, i) for o, version, i in self.entries]

    def tell(self) -> None:
        """Let torch see what was written since the forward, as it would on one device."""
        for outside, version, inside in self.entries:
            if outside._version != version:
                torch.autograd.graph.increment_version(inside)


@dataclass
class Span:
    """One call as the bridge sees it, kept as long as the caller's graph."""

    engine: Backward
    sides: list[Side]
    sources: list[Tensor]
    streams: Streams
    """Where the replicas draw from, in backward too."""
    notes: Notes = field(default_factory=Notes)


class Bridge(torch.autograd.Function):
    """The node itself. Forward only hands over what the replicas have made; backward runs theirs."""

    @staticmethod
    def forward(ctx: Any, span: Span, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.span = span
        return tuple(output.detach() for side in span.sides for output in side.outputs if output is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        span: Span = ctx.span
        if torch.is_grad_enabled():
            raise BridgeError(
                "create_graph=True cannot pass through the replicas' separate graphs.\n"
                "Either compute the penalty inside the module and run it with model.call('penalty', ...), or use "
                "DataParallel(..., engine='serial'), which builds one joint graph."
            )
        if any(g is not None and is_batched(g) for g in gradients):
            raise BridgeError(
                "a batched backward (is_grads_batched=True, jacobian(vectorize=True)) cannot pass through the "
                "replicas' separate graphs.\nUse DataParallel(..., engine='serial'), which builds one joint graph."
            )
        keep = keeps_graph()
        per_side: list[Gradients] = []
        at = 0
        for side in span.sides:
            count = len(side.outputs)
            per_side.append(list(gradients[at : at + count]))
            at += count
        for side, grads in zip(span.sides, per_side, strict=True):
            if any(o is None and g is not None for o, g in zip(side.outputs, grads, strict=True)):
                raise RuntimeError(SECOND_TIME)
        span.notes.tell()
        total, inputs = span.engine.backward(span, per_side, keep)
        if not keep:
            for side, grads in zip(span.sides, per_side, strict=True):
                side.outputs = [None if g is not None else o for o, g in zip(side.outputs, grads, strict=True)]
        for source, gradient in zip(span.sources, total, strict=True):
            if gradient is None and source.is_leaf:
                spare_hooks(source)
        return (None, *total, *(gradient for side in inputs for gradient in side))


# torch leaves `Function.apply` without types.
enter = cast(Callable[..., tuple[Tensor, ...]], Entry.apply)
# What `apply` does besides is for transforms of `torch.func`: no call comes here under one, and tensors that one has
# left behind are no parameters or shards that a gradient could be wanted for.
bridge = cast(Callable[..., tuple[Tensor, ...]], super(torch.autograd.Function, Bridge).apply)


def live(side: Side, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a gradient has arrived for, with it."""
    pairs = [(o, g) for o, g in zip(side.outputs, gradients, strict=True) if o is not None and g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def take(tensors: Sequence[Tensor]) -> Gradients:
    """The gradients that a backward left on these leaves, which are clear again afterwards."""
    found: Gradients = list(map(gradient_of, tensors))
    for tensor in tensors:
        tensor.grad = None
    return found


def leaves_below(tensors: Sequence[Tensor]) -> set[int]:
    """The ids of the leaves that a graph leads to."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)
    return found
