"""The tensors of a replica: leaves that stand for the source's differentiable tensors, and copies of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from instep.errors import BridgeError
from instep.modes import inference
from instep.structure.shapes import is_dense


class Guard:
    """Refuses a gradient that reaches a replica's leaf by another way than the bridge.

    Such a gradient would stay on the replica and be lost to the source.
    """

    __slots__ = ("open", "touched")

    def __init__(self) -> None:
        self.open = False
        self.touched = False
        """Whether a gradient came by since this was last set to False."""

    def set(self, state: bool) -> None:
        self.open = state

    def __call__(self, _: Tensor) -> None:
        self.touched = True
        if not self.open:
            raise BridgeError(_FROM_OUTSIDE)


_FROM_OUTSIDE = (
    "a gradient reached a replica's parameter from outside its call: a tensor made inside forward was kept by another "
    "way than the outputs (a list, a hook, a global).\n"
    "Return it from forward, or set it as an attribute of the module, so that its gradient finds the way."
)
gradient_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def have_gradients(leaves: Iterable[Tensor]) -> bool:
    """Whether gradients lie on leaves."""
    return any(gradient is not None for gradient in map(gradient_of, leaves))


def refuse_strays(leaves: Sequence[Tensor]) -> None:
    """`BridgeError` if gradients lie on leaves that no guard has watched."""
    if have_gradients(leaves):
        for leaf in leaves:
            leaf.grad = None
        raise BridgeError(_FROM_OUTSIDE)


def refuse_gradients(leaves: Iterable[Tensor]) -> None:
    """`BridgeError` if a backward inside `forward` left gradients on leaves, where the source would not see them."""
    left = [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
    for leaf in left:
        leaf.grad = None
    if left:
        raise BridgeError(
            "backward() was called inside forward: its gradients would stay on the replicas.\n"
            "Return the loss and call backward() on it outside, or use torch.autograd.grad inside. (If it was another "
            "thread that called backward(), beside a call on engine='serial': engine='threads' allows that.)"
        )


class GradientsAside:
    """Around a `forward` that works on the source's own tensors: refuses a backward inside it, as elsewhere.

    Gradients that the source has are put aside meanwhile. It is no context manager: one that an interruption leaves
    without its end would lose them, or bring them back later, over new ones.
    """

    def __init__(self, sources: Iterable[Tensor]) -> None:
        self._leaves = [(leaf, leaf.grad) for leaf in sources if leaf.is_leaf]

    def begin(self) -> None:
        for leaf, _ in self._leaves:
            leaf.grad = None

    def check(self) -> None:
        refuse_gradients(leaf for leaf, _ in self._leaves)

    def end(self) -> None:
        for leaf, gradient in self._leaves:
            leaf.grad = gradient


def shared_storages(modules: Iterable[nn.Module]) -> set[int]:
    """The addresses of storages that two or more tensors without gradient of some modules are views of."""
    held = {
        id(tensor): tensor
        for module in modules
        for table in (module._buffers, module._parameters, module.__dict__)
        for tensor in table.values()
        if isinstance(tensor, Tensor) and not tensor.requires_grad
    }
    dense = [t for t in held.values() if is_dense(t) and type(t) in _DENSE]
    count = Counter(tensor.untyped_storage().data_ptr() for tensor in dense if not tensor.is_meta)
    return {address for address, number in count.items() if number > 1 and address}


_DENSE = (Tensor, nn.Parameter)


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf of the source tensor's own class and attributes around `data`."""
    made = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    made.__dict__ = source.__dict__  # what is set on the source's parameter is there for the replicas too
    return made


class Way(Enum):
    """How a replica comes by the source's tensors that take a gradient."""

    ALIAS = "leaves of its own that share the source's memory"
    PRIVATE = "leaves of its own in memory of its own, sent at each call"
    SHARE = "the source's own tensors: one joint graph"
    LINK = "differentiable copies of the source's tensors: one joint graph"


@dataclass
class Tensors:
    """Makes the tensors of one replica and remembers what each stands for."""

    guarded: ClassVar[bool] = True
    """Whether each leaf is watched for gradients."""
    device: torch.device
    way: Way
    apart: Mapping[int, Tensor] = field(default_factory=dict)
    """By their ids, trainable tensors that get memory of their own here whatever the way."""
    views: Collection[int] = ()
    """Storages that several tensors of the source are views of, by their addresses."""
    guard: Guard = field(default_factory=Guard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, counterpart) for each tensor that takes a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each tensor that takes none."""
    _storages: dict[int, Tensor] = field(default_factory=dict)
    sources: dict[int, Tensor] = field(default_factory=dict)
    """By the id of a counterpart: what it stands for."""

    def make(self, source: Tensor) -> Tensor:
        """The replica's counterpart of one tensor of the source."""
        if not source.requires_grad:
            made = self.copy(source)
            self.state.append((source, made))
        else:
            made = self._trainable(source)
            self.trainable.append((source, made))
        self.sources[id(made)] = source
        return made

    def _trainable(self, source: Tensor) -> Tensor:
        if self.way is Way.SHARE:
            return source
        if self.way is Way.LINK:
            grad = torch.is_grad_enabled()
            with inference(False), torch.set_grad_enabled(grad):  # the first turns gradients on by itself
                made = source.to(self.device) if source.device != self.device else source.clone()
            made.__dict__ = source.__dict__
            return made
        with inference(False), torch.no_grad():
            made = self._leaf(source)
        if self.guarded:
            made.register_hook(self.guard)
        return made

    def _leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if self.way is Way.PRIVATE or id(source) in self.apart:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer that was computed: a leaf here, its graph goes on at the source

    def copy(self, source: Tensor) -> Tensor:
        """A copy of a tensor that takes no gradient, as the class that the source is."""
        with inference(False), torch.no_grad():
            data = self._copied(source)
            if isinstance(source, nn.Parameter) or type(source) is not Tensor:
                return leaf_like(source, data) if type(source).__torch_function__ is _PLAIN else data
            data.__dict__ = source.__dict__
            return data

    def _copied(self, source: Tensor) -> Tensor:
        """Its values here; where tensors of the source are views of one storage, they are views of one copy."""
        if not is_dense(source) or not self.views:
            return source.detach().to(self.device, copy=True)
        storage = source.untyped_storage()
        if storage.data_ptr() not in self.views:
            return source.detach().to(self.device, copy=True)
        if storage.data_ptr() not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
            self._storages[storage.data_ptr()] = whole.to(self.device, copy=True)
        here = self._storages[storage.data_ptr()].untyped_storage()
        made = torch.empty(0, dtype=source.dtype, device=self.device)
        return made.set_(here, source.storage_offset(), source.size(), source.stride())

    def may_have_gradients(self) -> bool:
        """Whether gradients may have come to the leaves in a forward."""
        return self.guard.touched

    def drop(self, made: Collection[int]) -> None:
        """Forget counterparts by their ids."""
        self.trainable = [pair for pair in self.trainable if id(pair[1]) not in made]
        self.state = [pair for pair in self.state if id(pair[1]) not in made]
        for counterpart in made:
            self.sources.pop(counterpart, None)


_PLAIN: Any = nn.Parameter.__torch_function__
