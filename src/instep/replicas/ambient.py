"""What surrounds a call in the caller's thread and must surround it on every replica."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import DeviceContext


@dataclass(frozen=True)
class Autocast:
    """Autocast as it stands for one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Ambient:
    """The thread-local state of a call, captured once and entered by every replica."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    device: torch.device | None
    saved_hooks: tuple[Any, Any] | None
    context: contextvars.Context

    @classmethod
    def capture(cls, device_types: frozenset[str]) -> Ambient:
        """The caller's state, for replicas on devices of these types."""
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in sorted(device_types)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=_default_device(),
            saved_hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
            context=contextvars.copy_context(),
        )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """The captured state, for the length of a `with` block in any thread.

        Autocast is entered and left by its context manager: a thread that only sets the flags keeps a stale
        cache of cast weights.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device is not None:
                stack.enter_context(self.device)
            for cast in self.autocast:
                if cast.enabled:
                    stack.enter_context(torch.autocast(cast.device_type, cast.dtype, cache_enabled=self.autocast_cache))
            if self.saved_hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self.saved_hooks))
            yield


def _default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose in this thread, if any."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None
