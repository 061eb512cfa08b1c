"""The autograd node that connects the caller's graph to the replicas' graphs.

Its inputs are the source's parameters (and buffers that need a gradient) and the shards that need one; its outputs are
every replica's output tensors. To the caller's graph a call is one operation: parameter hooks fire, `.grad`
accumulates, `torch.autograd.grad` and `retain_graph=True` work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from instep.errors import BridgeError
from instep.replicas.replica import GraphContext, RemoteGraph
from instep.replicas.tensors import GradientGuard, get_grad
from instep.runtime.rng import ReplicaRng
from instep.runtime.torch_private import is_batched_gradient, is_graph_retained, register_own_hook

Gradients = list[Tensor | None]

GRAPH_FREED_MESSAGE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Specify retain_graph=True if you need to backward through the graph a second time."
)
"""torch's own message for a freed graph."""


class NonLeafInputs(torch.autograd.Function):
    """Passes tensors to a replica as outputs of a node, not leaves or views, so that forward may write in place."""

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
    remote: RemoteGraph | None = None
    """The graph itself, if it is in another process."""

    @property
    def tokens(self) -> list[Tensor]:
        """The tokens of the replica's collectives (see `GraphContext`)."""
        return [] if self.context is None else self.context.tokens

    def add_tokens(self, numbers: Sequence[int], outputs: list[Tensor], gradients: list[Tensor]) -> None:
        """Let a backward from these outputs start at tokens, too. Nobody reads their gradients, which are shared."""
        zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for token in map(self.tokens.__getitem__, numbers):
            key = token.dtype, token.device
            if key not in zeros:
                zeros[key] = torch.zeros_like(token)
            outputs.append(token)
            gradients.append(zeros[key])

    def drop_tokens(self, numbers: Sequence[int]) -> None:
        """Remove tokens that a backward has consumed."""
        if self.context is not None:
            self.context.tokens = [token for number, token in enumerate(self.tokens) if number not in numbers]

    def free_graph(self, gradients: Gradients) -> None:
        """Free the graph of the outputs for which a gradient arrived, after a backward that does not retain it."""
        self.outputs = [None if g is not None else o for o, g in zip(self.outputs, gradients, strict=True)]

    def collect_gradients(self) -> Gradients:
        """Return the gradients of the leaves after a backward, and clear them."""
        if self.remote is None or self.remote.received_gradients is None:
            return take_gradients(self.leaves)
        received, self.remote.received_gradients = self.remote.received_gradients, None
        return received


class BackwardEngine(Protocol):
    """What the bridge asks of an engine."""

    def backward(
        self, graph: CallGraph, gradients: Sequence[Gradients], retain_graph: bool
    ) -> tuple[Gradients, list[Gradients]]:
        """Run every replica's backward.

        Returns the summed gradients of the sources, and each replica's input gradients.
        """
        ...


@dataclass
class VersionTracker:
    """Version counters of the caller's tensors that replicas use through tensors with their own counters."""

    entries: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def track(self, outside: Tensor, inside: Tensor) -> None:
        """Track a tensor of the caller and the replica's tensor that has its memory or values."""
        if not outside.is_inference():
            self.entries.append((outside, outside._version, inside))

    def update(self, outsides: Sequence[Tensor]) -> None:
        """Set the recorded versions of these tensors to the current ones."""
        updated = set(map(id, outsides))
        self.entries = [(o, o._version if id(o) in updated else version, i) for o, version, i in self.entries]

    def propagate(self) -> None:
        """Increment the replicas' counters for tensors written since forward, so that torch raises as on one device."""
        for outside, version, inside in self.entries:
            if outside._version != version:
                torch.autograd.graph.increment_version(inside)


@dataclass
class CallGraph:
    """The graphs of one call. Lives as long as the caller's graph."""

    engine: BackwardEngine
    replicas: list[ReplicaGraph]
    sources: list[Tensor]
    rng: ReplicaRng
    """The replicas' random streams, which backward uses too."""
    versions: VersionTracker = field(default_factory=VersionTracker)


class Bridge(torch.autograd.Function):
    """The autograd node. Its forward returns the replicas' outputs; its backward runs the replicas' backward."""

    @staticmethod
    def forward(ctx: Any, graph: CallGraph, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph = graph
        return tuple(output.detach() for replica in graph.replicas for output in replica.outputs if output is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph: CallGraph = ctx.graph
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
        retain_graph = is_graph_retained()
        per_replica: list[Gradients] = []
        at = 0
        for replica in graph.replicas:
            count = len(replica.outputs)
            grads = list(gradients[at : at + count])
            for output, gradient in zip(replica.outputs, grads, strict=True):
                if output is None and gradient is not None:
                    raise RuntimeError(GRAPH_FREED_MESSAGE)
            per_replica.append(grads)
            at += count
        graph.versions.propagate()
        total, inputs = graph.engine.backward(graph, per_replica, retain_graph)
        if not retain_graph:
            for replica, grads in zip(graph.replicas, per_replica, strict=True):
                replica.free_graph(grads)
        for source, gradient in zip(graph.sources, total, strict=True):
            if gradient is None and source.is_leaf:
                skip_hooks_without_gradient(source)
        return (None, *total, *chain.from_iterable(inputs))


# torch does not type `Function.apply`.
as_non_leaf = cast(Callable[..., tuple[Tensor, ...]], NonLeafInputs.apply)
# The C++ `apply` alone: the Python override only adds support for `torch.func` transforms, under which calls run on one
# device.
bridge = cast(Callable[..., tuple[Tensor, ...]], super(torch.autograd.Function, Bridge).apply)


def outputs_with_gradients(replica: ReplicaGraph, gradients: Gradients) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs for which a gradient arrived, and these gradients."""
    outputs, found = [], []
    for output, gradient in zip(replica.outputs, gradients, strict=True):
        if output is not None and gradient is not None:
            outputs.append(output)
            found.append(gradient)
    return outputs, found


def take_gradients(tensors: Sequence[Tensor]) -> Gradients:
    """Return the `.grad` of these leaves and clear it."""
    found: Gradients = list(map(get_grad, tensors))
    for tensor in tensors:
        tensor.grad = None
    return found


class _GradientPresence:
    """A hook that records whether the last gradient was None."""

    __torch_unserializable__ = True  # not saved with the parameter

    def __init__(self) -> None:
        self.absent = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.absent = gradient is None


class _GuardedTensorHook:
    """Calls a user's tensor hook only if there is a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _GuardedAccumulateHook:
    """Calls a user's post-accumulate hook only if a gradient was accumulated."""

    def __init__(self, hook: Callable[[Tensor], None], presence: _GradientPresence) -> None:
        self.hook = hook
        self.presence = presence

    def __call__(self, parameter: Tensor) -> None:
        if not self.presence.absent:
            self.hook(parameter)


def skip_hooks_without_gradient(parameter: Tensor) -> None:
    """Wrap this parameter's hooks so that they are not called without a gradient.

    On one device autograd does not reach a parameter that gets no gradient. The bridge has an edge to every parameter,
    and autograd calls hooks along it with None.
    """
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    if any(not isinstance(hook, _GuardedAccumulateHook) for hook in after.values()):
        presence = _presence_hook(parameter)
        for key, hook in after.items():
            if not isinstance(hook, _GuardedAccumulateHook):
                after[key] = _GuardedAccumulateHook(hook, presence)
    before: dict[int, Any] = parameter._backward_hooks or {}
    for key, hook in before.items():
        if not isinstance(hook, (_GuardedTensorHook, _GradientPresence)):
            before[key] = _GuardedTensorHook(hook)


def _presence_hook(parameter: Tensor) -> _GradientPresence:
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    for hook in hooks.values():
        if isinstance(hook, _GradientPresence):
            return hook
    presence = _GradientPresence()
    presence.absent = True  # created during a backward without a gradient for it
    register_own_hook(parameter, presence)
    return presence
