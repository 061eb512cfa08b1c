"""Tensors in a worker that need a gradient and are not reached through the module: by a global, or by a closure.

A gradient that came to one of them would stay in the worker, and what the script sees would be the first replica's
alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from instep.bridge import leaves_below
from instep.engines.processes.freight import CannotCross
from instep.engines.processes.spaces import Spaces
from instep.structure.tree import tensors_in


class Strangers:
    """Those that a worker has been sent, as long as somebody there holds them."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def __bool__(self) -> bool:
        return bool(self._known)

    def meet(self, tensors: Sequence[Tensor], own: Iterable[Tensor], elsewhere: Iterable[Any]) -> None:
        """Some tensors that need a gradient came with a message.

        `own` are the module's, for which its replica has others; but not where globals and closures lead to them.
        """
        mine = set(map(id, own)).difference(map(id, _tensors_of(elsewhere)))
        self._known.update((id(t), t) for t in tensors if t.is_leaf and id(t) not in mine)

    def refuse(self, outputs: Sequence[Tensor], spaces: Spaces) -> None:
        """Raise where a gradient of what comes out of a forward would come to one of them."""
        below = leaves_below(outputs)
        for key, tensor in list(self._known.items()):
            if key in below:
                raise lost(_described(tensor, spaces))


def lost(what: str) -> CannotCross:
    """Says of a tensor that its gradient would stay in a worker."""
    return CannotCross(
        f"forward computes with {what}, which needs a gradient and is not reached through the module: a worker process "
        f"could not send the gradient back.\n"
        f"Use it by way of the module (self.head = head), say that it needs none (requires_grad_(False), "
        f"torch.no_grad()), or write engine='threads'."
    )


def held(tensor: Tensor) -> str:
    """What is said of a tensor that has no name."""
    return f"a tensor of shape {tuple(tensor.shape)} that a closure or a container holds"


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, nn.Module):
            yield from value.parameters()
        else:
            yield from tensors_in(value)


def _described(tensor: Tensor, spaces: Spaces) -> str:
    for name, value in spaces.received():
        if value is tensor:
            return f"the global {name!r}"
        if isinstance(value, nn.Module):
            inside = next((path for path, held in value.named_parameters() if held is tensor), None)
            if inside is not None:
                return f"the global {name!r} ({inside})"
    return held(tensor)
