"""Refusing gradients that reach a replica's leaf by another way than the bridge: they would be lost to the source."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import BridgeError
from instep.structure.shapes import is_dense

_FROM_OUTSIDE = (
    "a gradient reached a replica's parameter from outside its call: a tensor made inside forward was kept by another "
    "way than the outputs (a list, a hook, a global).\n"
    "Return it from forward, or set it as an attribute of the module, so that its gradient finds the way."
)
_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_set_gradient: Callable[[Tensor, Tensor | None], None] = vars(torch._C.TensorBase)["grad"].__set__


class Hooks:
    """Watches leaves by a hook on each, for which autograd stops for the interpreter at every leaf."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        """How many forwards and backwards are at work in which gradients may come."""
        self._touched = False

    def watch(self, leaf: Tensor) -> None:
        """Refuse gradients of a leaf from now on."""
        leaf.register_hook(self)

    def open(self) -> None:
        """Gradients may come, until this is closed as many times."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._touched = False
                self._let_in()

    def close(self, *, graph: bool = True) -> None:
        """No more gradients may come; unless there was no `graph` for them to come by, now or earlier."""
        with self._lock:
            self._open = max(0, self._open - 1)
            if not self._open:
                self._shut(graph)

    def may_have_gradients(self) -> bool:
        """Whether gradients may have come to the leaves since this was opened."""
        return self._touched

    def forget(self, leaves: Collection[int]) -> None:
        """Leaves, by their ids, are gone."""

    def _let_in(self) -> None:
        """The first one is at work."""

    def _shut(self, graph: bool) -> None:
        """The last one is done."""

    def __call__(self, _: Tensor) -> None:
        self._touched = True
        if not self._open:
            raise BridgeError(_FROM_OUTSIDE)


class Guard(Hooks):
    """Watches leaves by what lies where their gradients would be added: that refuses it, and costs a backward nothing.

    It is there only while no forward and no backward is at work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaves: list[Tensor] = []
        self._wires: list[Tensor] = []
        self._needed = self._set = False

    def watch(self, leaf: Tensor) -> None:
        if type(leaf) in (Tensor, nn.Parameter) and is_dense(leaf):
            self._leaves.append(leaf)
            self._wires.append(_Tripwire(leaf))
        else:
            super().watch(leaf)

    def may_have_gradients(self) -> bool:
        return super().may_have_gradients() or have_gradients(self._leaves)

    def forget(self, leaves: Collection[int]) -> None:
        with self._lock:
            kept = [place for place, leaf in enumerate(self._leaves) if id(leaf) not in leaves]
            self._leaves, self._wires = [self._leaves[n] for n in kept], [self._wires[n] for n in kept]

    def _let_in(self) -> None:
        if self._set:
            deque(map(_set_gradient, self._leaves, repeat(None)), 0)
            self._set = False

    def _shut(self, graph: bool) -> None:
        self._needed = self._needed or graph
        if not self._needed:
            return
        try:
            deque(map(_set_gradient, self._leaves, self._wires), 0)
        except RuntimeError:  # a leaf has another shape or dtype by now
            self._wires = list(map(_Tripwire, self._leaves))
            deque(map(_set_gradient, self._leaves, self._wires), 0)
        self._set = True


class _Tripwire(Tensor):
    """A tensor without memory, with which nothing can be done."""

    @staticmethod
    def __new__(cls, leaf: Tensor) -> _Tripwire:
        made: Any = Tensor._make_wrapper_subclass(
            cls, leaf.shape, strides=leaf.stride(), dtype=leaf.dtype, device=leaf.device
        )
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise BridgeError(_FROM_OUTSIDE)


def have_gradients(leaves: Iterable[Tensor]) -> bool:
    """Whether gradients lie on leaves."""
    return any(gradient is not None for gradient in map(_gradient, leaves))


def refuse_strays(leaves: Sequence[Tensor]) -> None:
    """`BridgeError` if gradients lie on leaves that nobody has watched."""
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
