"""The tensors of a replica: leaves that stand for the source's differentiable tensors, and copies of its state."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import BridgeError


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
            raise BridgeError(
                "a gradient reached a replica's parameter from outside its call: a tensor made inside forward was kept "
                "by another way than the outputs (a list, a hook, a global).\n"
                "Return it from forward, or set it as an attribute of the module, so that its gradient finds the way."
            )


def refuse_gradients(leaves: Iterable[Tensor]) -> None:
    """`BridgeError` if a backward inside `forward` left gradients on leaves, where the source would not see them."""
    left = [leaf for leaf in leaves if leaf.is_leaf and leaf.grad is not None]
    for leaf in left:
        leaf.grad = None
    if left:
        raise BridgeError(
            "backward() was called inside forward: its gradients would stay on the replicas.\n"
            "Return the loss and call backward() on it outside, or use torch.autograd.grad inside."
        )


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf of the source tensor's own class and attributes around `data`."""
    made = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    made.__dict__.update(source.__dict__)
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

    device: torch.device
    way: Way
    guard: Guard = field(default_factory=Guard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, counterpart) for each tensor that takes a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each tensor that takes none."""
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
            with torch.inference_mode(False), torch.set_grad_enabled(grad):  # the first turns gradients on by itself
                return source.to(self.device) if source.device != self.device else source.clone()
        with torch.inference_mode(False), torch.no_grad():
            made = self._leaf(source)
        made.register_hook(self.guard)
        return made

    def _leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if self.way is Way.PRIVATE:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer that was computed: a leaf here, its graph goes on at the source

    def copy(self, source: Tensor) -> Tensor:
        """A copy of a tensor that takes no gradient, as the class that the source is."""
        with torch.inference_mode(False), torch.no_grad():
            data = source.detach().to(self.device, copy=True)
            if isinstance(source, nn.Parameter) or type(source) is not Tensor:
                return leaf_like(source, data) if type(source).__torch_function__ is _PLAIN else data
            data.__dict__.update(source.__dict__)
            return data

    def drop(self, made: Collection[int]) -> None:
        """Forget counterparts by their ids."""
        self.trainable = [pair for pair in self.trainable if id(pair[1]) not in made]
        self.state = [pair for pair in self.state if id(pair[1]) not in made]
        for counterpart in made:
            self.sources.pop(counterpart, None)


_PLAIN: Any = nn.Parameter.__torch_function__
