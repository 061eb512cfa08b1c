"""Keeping a parameter's hooks from being called where no gradient passes.

On one device autograd does not come by a parameter that gets no gradient. The bridge has an edge to every parameter,
and autograd calls the hooks along it even when nothing passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class _Note:
    """A hook that only notes whether a gradient came by."""

    __torch_unserializable__ = True  # torch leaves it out when the parameter is saved

    def __init__(self) -> None:
        self.absent = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.absent = gradient is None


class _OnGradient:
    """A user's hook on the gradient, called only where there is one."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _AfterGradient:
    """A user's hook on the accumulated gradient, called only where one was added."""

    def __init__(self, hook: Callable[[Tensor], None], note: _Note) -> None:
        self.hook = hook
        self.note = note

    def __call__(self, parameter: Tensor) -> None:
        if not self.note.absent:
            self.hook(parameter)


def spare_hooks(parameter: Tensor) -> None:
    """See to it that this parameter's hooks are not called in a backward that brings it nothing."""
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    if any(not isinstance(hook, _AfterGradient) for hook in after.values()):
        note = _note_on(parameter)
        for key, hook in after.items():
            if not isinstance(hook, _AfterGradient):
                after[key] = _AfterGradient(hook, note)
    before: dict[int, Any] = parameter._backward_hooks or {}
    for key, hook in before.items():
        if not isinstance(hook, (_OnGradient, _Note)):
            before[key] = _OnGradient(hook)


def _note_on(parameter: Tensor) -> _Note:
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    for hook in hooks.values():
        if isinstance(hook, _Note):
            return hook
    note = _Note()
    note.absent = True  # it is made in the middle of a backward that brings nothing
    parameter.register_hook(note)
    return note
