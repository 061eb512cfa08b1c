"""The autograd node that connects the caller's graph to the replicas' graphs.

Its inputs are the source's parameters (and buffers that need a gradient) and the shards that need one; its outputs are
every replica's output tensors. To the caller's graph a call is one operation: parameter hooks fire, `.grad`
accumulates, `torch.autograd.grad` and `retain_graph=True` work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from instep.autograd.context import GRAPH_FREED_MESSAGE, GraphContext
from instep.errors import BridgeError
from instep.replicas.tensors import GradientGuard, get_grad
from instep.runtime.rng import ReplicaRng
from instep.runtime.torch_private import is_batched_gradient, is_graph_retained

Gradients = list[Tensor | None]


class NonLeafInputs(torch.autograd.Function):
    """Passes tensors to a replica as outputs of a node, neither leaves nor views, so that forward may write in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> Any:
        return gradients


@dataclass
class ReplicaGraph:
    """One replica's autograd graph."""

    leaves: list[Tensor]
    """The replica's parameters, in the order of `CallGraph.sources`."""
    inputs: list[Tensor]
    """The leaves for shards that need a gradient."""
    outputs: list[Tensor | None]
    """Output tensors that need a gradient; None once their graph is freed."""
    guard: GradientGuard
    name: str
    """The replica and its device, for error messages."""
    context: GraphContext | None = None
    remote_call: Any = None
    """For a replica in another process: the handle by which its backward is requested."""
    received_gradients: Gradients | None = None
    """Gradients of the leaves that another process sent, if they are not in the leaves' `.grad`."""

    def collect_gradients(self) -> Gradients:
        """Return the gradients of the leaves after a backward, and clear them."""
        received, self.received_gradients = self.received_gradients, None
        return take_gradients(self.leaves) if received is None else received


class BackwardEngine(Protocol):
    """What the bridge asks of an engine."""

    def backward(
        self, span: CallGraph, gradients: Sequence[Gradients], keep: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward; the sum of the leaves' gradients, and each replica's input gradients."""
        ...


@dataclass
class VersionTracker:
    """Tensors of the caller whose memory or values replicas use under version counters of their own."""

    entries: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def track(self, outside: Tensor, inside: Tensor) -> None:
        """Watch a tensor of the caller for the sake of the one that a replica has in its place."""
        if not outside.is_inference():
            self.entries.append((outside, outside._version, inside))

    def update(self, outsides: Sequence[Tensor]) -> None:
        """Take what these tensors hold now as what the replicas have used."""
        known = set(map(id, outsides))
        self.entries = [(o, o._version if id(o) in known else version, i) for o, version, i in self.entries]

    def propagate(self) -> None:
        """Let torch see what was written since the forward, as it would on one device."""
        for outside, version, inside in self.entries:
            if outside._version != version:
                torch.autograd.graph.increment_version(inside)


@dataclass
class CallGraph:
    """One call as the bridge sees it, kept as long as the caller's graph."""

    engine: BackwardEngine
    replicas: list[ReplicaGraph]
    sources: list[Tensor]
    rng: ReplicaRng
    """Where the replicas draw from, in backward too."""
    versions: VersionTracker = field(default_factory=VersionTracker)


class Bridge(torch.autograd.Function):
    """The node itself. Forward only hands over what the replicas have made; backward runs theirs."""

    @staticmethod
    def forward(ctx: Any, span: CallGraph, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph = span
        return tuple(output.detach() for side in span.replicas for output in side.outputs if output is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        span: CallGraph = ctx.graph
        if torch.is_grad_enabled():
            raise BridgeError(
                "create_graph=True cannot pass through the replicas' separate graphs.\n"
                "Either compute the penalty inside the module and run it with model.call('penalty', ...), or use "
                "DataParallel(..., engine='serial'), which builds one joint graph."
            )
        if any(g is not None and is_batched_gradient(g) for g in gradients):
            raise BridgeError(
                "a batched backward (is_grads_batched=True, jacobian(vectorize=True)) cannot pass through the "
                "replicas' separate graphs.\nUse DataParallel(..., engine='serial'), which builds one joint graph."
            )
        keep = is_graph_retained()
        per_side: list[Gradients] = []
        at = 0
        for side in span.replicas:
            count = len(side.outputs)
            per_side.append(list(gradients[at : at + count]))
            at += count
        for side, grads in zip(span.replicas, per_side, strict=True):
            if any(o is None and g is not None for o, g in zip(side.outputs, grads, strict=True)):
                raise RuntimeError(GRAPH_FREED_MESSAGE)
        span.versions.propagate()
        total, inputs = span.engine.backward(span, per_side, keep)
        if not keep:
            for side, grads in zip(span.replicas, per_side, strict=True):
                side.outputs = [None if g is not None else o for o, g in zip(side.outputs, grads, strict=True)]
        for source, gradient in zip(span.sources, total, strict=True):
            if gradient is None and source.is_leaf:
                skip_hooks_without_gradient(source)
        return (None, *total, *(gradient for side in inputs for gradient in side))


# torch leaves `Function.apply` without types.
as_non_leaf = cast(Callable[..., tuple[Tensor, ...]], NonLeafInputs.apply)
# What `apply` does besides is for transforms of `torch.func`: no call comes here under one, and tensors that one has
# left behind are no parameters or shards that a gradient could be wanted for.
bridge = cast(Callable[..., tuple[Tensor, ...]], super(torch.autograd.Function, Bridge).apply)


def outputs_with_gradients(side: ReplicaGraph, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a gradient has arrived for, with it."""
    pairs = [(o, g) for o, g in zip(side.outputs, gradients, strict=True) if o is not None and g is not None]
    return [o for o, _ in pairs], [g for _, g in pairs]


def take_gradients(tensors: Sequence[Tensor]) -> Gradients:
    """The gradients that a backward left on these leaves, which are clear again afterwards."""
    found: Gradients = list(map(get_grad, tensors))
    for tensor in tensors:
        tensor.grad = None
    return found


class _GradientPresence:
    """A hook that only notes whether a gradient came by."""

    __torch_unserializable__ = True  # torch leaves it out when the parameter is saved

    def __init__(self) -> None:
        self.absent = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.absent = gradient is None


class _GuardedTensorHook:
    """A user's hook on the gradient, called only where there is one."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _GuardedAccumulateHook:
    """A user's hook on the accumulated gradient, called only where one was added."""

    def __init__(self, hook: Callable[[Tensor], None], note: _GradientPresence) -> None:
        self.hook = hook
        self.presence = note

    def __call__(self, parameter: Tensor) -> None:
        if not self.presence.absent:
            self.hook(parameter)


def skip_hooks_without_gradient(parameter: Tensor) -> None:
    """See to it that this parameter's hooks are not called in a backward that brings it nothing."""
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    if any(not isinstance(hook, _GuardedAccumulateHook) for hook in after.values()):
        note = _presence_hook(parameter)
        for key, hook in after.items():
            if not isinstance(hook, _GuardedAccumulateHook):
                after[key] = _GuardedAccumulateHook(hook, note)
    before: dict[int, Any] = parameter._backward_hooks or {}
    for key, hook in before.items():
        if not isinstance(hook, (_GuardedTensorHook, _GradientPresence)):
            before[key] = _GuardedTensorHook(hook)


def _presence_hook(parameter: Tensor) -> _GradientPresence:
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    for hook in hooks.values():
        if isinstance(hook, _GradientPresence):
            return hook
    note = _GradientPresence()
    note.absent = True  # it is made in the middle of a backward that brings nothing
    parameter.register_hook(note)
    return note
