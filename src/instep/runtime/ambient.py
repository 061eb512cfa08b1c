"""Thread-local torch state (grad mode, autocast, default device, streams) captured from the caller."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from instep.runtime.modes import (
    CombinedContext,
    active_compiler,
    scaled_recompile_limit,
    set_inference_mode,
    use_recompile_limit,
)
from instep.runtime.torch_private import default_device, saved_tensor_hooks


@dataclass(frozen=True)
class AutocastSetting:
    """Autocast as it is enabled for one device type."""

    device_type: str
    dtype: torch.dtype


class AutocastState(NamedTuple):
    """Autocast as it is around the caller of a backward."""

    enabled: tuple[AutocastSetting, ...] = ()
    cache: bool = True

    @classmethod
    def capture(cls) -> AutocastState:
        enabled = autocast_settings(_DEVICE_TYPES)
        return cls(enabled, torch.is_autocast_cache_enabled()) if enabled else _AUTOCAST_OFF

    def enter(self) -> AbstractContextManager[Any]:
        """The same in another thread; in the caller's own it is so already."""
        if not self.enabled or self == AutocastState.capture():
            return nullcontext()
        return CombinedContext(_autocast_contexts(self.enabled, self.cache))


_DEVICE_TYPES = ("cpu", "cuda", "xpu")
_AUTOCAST_OFF = AutocastState()


def autocast_settings(kinds: Iterable[str]) -> tuple[AutocastSetting, ...]:
    """Autocast as it is enabled in this thread for kinds of devices."""
    return tuple(
        AutocastSetting(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )


def _autocast_contexts(casts: Iterable[AutocastSetting], cache: bool) -> list[AbstractContextManager[Any]]:
    return [torch.autocast(cast.device_type, cast.dtype, cache_enabled=cache) for cast in casts]


@dataclass(slots=True)
class AmbientState:
    """The thread-local state of a call, captured once and entered by every replica."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[AutocastSetting, ...]
    autocast_cache: bool
    default_device: torch.device | None
    saved_tensor_hooks: tuple[Any, Any] | None
    streams: Mapping[torch.device, Any]
    """The stream that the caller works on, for each accelerator."""
    context_vars: contextvars.Context
    """The caller's context variables."""
    compiler: Any
    """What compiles the code of the module, if the caller was called by compiled code."""
    recompile_limit: int | None
    """How many graphs a replica's thread may compile of one piece of code."""

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> AmbientState:
        """The caller's state, for replicas on these devices."""
        devices = list(devices)
        places = {device for device in devices if device.type != "cpu"}
        kinds = (*_DEVICE_TYPES, *{place.type for place in places}.difference(_DEVICE_TYPES))
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=autocast_settings(kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=default_device(),
            saved_tensor_hooks=saved_tensor_hooks(),
            streams={place: torch.get_device_module(place).current_stream(place) for place in places},
            context_vars=contextvars.copy_context(),
            compiler=active_compiler(),
            recompile_limit=scaled_recompile_limit(len(devices)),
        )

    def enter(self, device: torch.device) -> AbstractContextManager[Any]:
        """The captured state, for the length of a `with` block in any thread, with `device` as the current one.

        Autocast is entered and left by its context manager: a thread that only sets the flags keeps a stale
        cache of cast weights.
        """
        if self.is_trivial(device):  # the most common state of all, in the fewest steps
            return _GradMode(self.grad_enabled)
        return _EnteredState(self, device)

    def is_trivial(self, device: torch.device) -> bool:
        """Whether there is nothing to enter but whether gradients are wanted."""
        return (
            not self.inference_mode
            and not self.autocast
            and self.recompile_limit is None
            and self.allows_internal_ops(device)
        )

    def allows_internal_ops(self, device: torch.device) -> bool:
        """Whether instep can work in the middle of it: copies look at no autocast, and inference mode can be left."""
        return self.default_device is None and self.saved_tensor_hooks is None and device not in self.streams


class _GradMode:
    """Whether gradients are wanted."""

    __slots__ = ("_enabled", "_outer")

    def __init__(self, grad: bool) -> None:
        self._enabled = grad

    def __enter__(self) -> None:
        self._outer = torch.is_grad_enabled()
        torch.set_grad_enabled(self._enabled)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._outer)


class _EnteredState(ExitStack):
    """All of the captured state.

    Not made of a generator function: one that an interruption leaves open ends when it is cleared away, and would set
    then what was set long ago.
    """

    def __init__(self, ambient: AmbientState, device: torch.device) -> None:
        super().__init__()
        self._state, self._device = ambient, device

    def __enter__(self) -> _EnteredState:
        super().__enter__()
        try:
            self._enter_all()
        except BaseException:
            self.close()
            raise
        return self

    def _enter_all(self) -> None:
        ambient, device = self._state, self._device
        self.enter_context(set_inference_mode(ambient.inference_mode))
        self.enter_context(torch.set_grad_enabled(ambient.grad_enabled))
        if ambient.default_device is not None:
            self.enter_context(ambient.default_device)
        for cast in _autocast_contexts(ambient.autocast, ambient.autocast_cache):
            self.enter_context(cast)
        if device in ambient.streams:
            backend = torch.get_device_module(device)
            _init_device_context(backend, device)
            self.enter_context(backend.stream(ambient.streams[device]))
        if ambient.saved_tensor_hooks is not None:
            self.enter_context(torch.autograd.graph.saved_tensors_hooks(*ambient.saved_tensor_hooks))
        self.enter_context(use_recompile_limit(ambient.recompile_limit))


_thread_local = threading.local()


def _init_device_context(backend: Any, device: torch.device) -> None:
    """Let a thread make a device's context its own before it first works there; cuBLAS warns if it has none."""
    if device not in _thread_local.__dict__.setdefault("devices", set()):
        _thread_local.devices.add(device)
        if device.type == "cuda":
            backend.mem_get_info(device)
