"""The tensors of a replica: leaves that stand for the source's differentiable tensors, and copies of its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import BridgeError


class Guard:
    """Refuses a gradient that reaches a replica's leaf by another way than the bridge.

    Such a gradient would stay on the replica and be lost to the source.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = False

    def set(self, state: bool) -> None:
        self.open = state

    def __call__(self, _: Tensor) -> None:
        if not self.open:
            raise BridgeError(
                "a gradient reached a replica's parameter from outside its call: a tensor made inside forward was kept "
                "by another way than the outputs (a list, a hook, a global).\n"
                "Return it from forward, or set it as an attribute of the module, so that its gradient finds the way."
            )


def leaf_like(source: Tensor, data: Tensor) -> Tensor:
    """A leaf of the source tensor's own class and attributes around `data`."""
    made = torch.Tensor._make_subclass(type(source), data, source.requires_grad)
    made.__dict__.update(source.__dict__)
    return made


@dataclass
class Tensors:
    """Makes the tensors of one replica and remembers what each stands for."""

    device: torch.device
    alias: bool
    """Whether trainable tensors share the source's memory (same device) or have their own."""
    share: bool = False
    """Whether trainable tensors are the source's own objects: one joint graph."""
    guard: Guard = field(default_factory=Guard)
    trainable: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, leaf) for each tensor that takes a gradient."""
    state: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(source, copy) for each tensor that takes none."""

    def make(self, source: Tensor) -> Tensor:
        """The replica's counterpart of one tensor of the source."""
        with torch.inference_mode(False), torch.no_grad():
            if not source.requires_grad:
                made = self.copy(source)
                self.state.append((source, made))
                return made
            if self.share:
                self.trainable.append((source, source))
                return source
            made = self._leaf(source)
            self.trainable.append((source, made))
        made.register_hook(self.guard)
        return made

    def _leaf(self, source: Tensor) -> Tensor:
        data = source.detach()
        if not self.alias:
            data = data.to(self.device, copy=True)
        elif source.is_inference():
            data = data.clone()
        if source.is_leaf:
            return leaf_like(source, data)
        return data.requires_grad_()  # a buffer that was computed: a leaf here, its graph goes on at the source

    def copy(self, source: Tensor) -> Tensor:
        """A copy of a tensor that takes no gradient, as the class that the source is."""
        data = source.detach().to(self.device, copy=True)
        if isinstance(source, nn.Parameter) or type(source) is not Tensor:
            return leaf_like(source, data) if type(source).__torch_function__ is _PLAIN else data
        return data


_PLAIN: Any = nn.Parameter.__torch_function__
