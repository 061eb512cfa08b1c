"""What surrounds a call in the caller's thread and must surround it on every replica."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from instep.compiled import allowing, compiler, graph_limit
from instep.modes import All, inference
from instep.private import default_device, saved_tensor_hooks


@dataclass(frozen=True)
class Autocast:
    """Autocast as it is enabled for one device type."""

    device_type: str
    dtype: torch.dtype


class Casts(NamedTuple):
    """Autocast as it is around the caller of a backward."""

    enabled: tuple[Autocast, ...] = ()
    cache: bool = True

    @classmethod
    def capture(cls) -> Casts:
        enabled = autocasts(_KINDS)
        return cls(enabled, torch.is_autocast_cache_enabled()) if enabled else _NO_CASTS

    def enter(self) -> AbstractContextManager[Any]:
        """The same in another thread; in the caller's own it is so already."""
        if not self.enabled or self == Casts.capture():
            return nullcontext()
        return All(_casting(self.enabled, self.cache))


_KINDS = ("cpu", "cuda", "xpu")
_NO_CASTS = Casts()


def autocasts(kinds: Iterable[str]) -> tuple[Autocast, ...]:
    """Autocast as it is enabled in this thread for kinds of devices."""
    return tuple(Autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def _casting(casts: Iterable[Autocast], cache: bool) -> list[AbstractContextManager[Any]]:
    return [torch.autocast(cast.device_type, cast.dtype, cache_enabled=cache) for cast in casts]


@dataclass(slots=True)
class Ambient:
    """The thread-local state of a call, captured once and entered by every replica."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    device: torch.device | None
    saved_hooks: tuple[Any, Any] | None
    streams: Mapping[torch.device, Any]
    """The stream that the caller works on, for each accelerator."""
    context: contextvars.Context
    """The caller's context variables."""
    compiler: Any
    """What compiles the code of the module, if the caller was called by compiled code."""
    graphs: int | None
    """How many graphs a replica's thread may compile of one piece of code."""

    @classmethod
    def capture(cls, devices: Iterable[torch.device]) -> Ambient:
        """The caller's state, for replicas on these devices."""
        devices = list(devices)
        places = {device for device in devices if device.type != "cpu"}
        kinds = (*_KINDS, *{place.type for place in places}.difference(_KINDS))
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=autocasts(kinds),
            autocast_cache=torch.is_autocast_cache_enabled(),
            device=default_device(),
            saved_hooks=saved_tensor_hooks(),
            streams={place: torch.get_device_module(place).current_stream(place) for place in places},
            context=contextvars.copy_context(),
            compiler=compiler(),
            graphs=graph_limit(len(devices)),
        )

    def enter(self, device: torch.device) -> AbstractContextManager[Any]:
        """The captured state, for the length of a `with` block in any thread, with `device` as the current one.

        Autocast is entered and left by its context manager: a thread that only sets the flags keeps a stale
        cache of cast weights.
        """
        if self.is_plain(device):  # the most common state of all, in the fewest steps
            return _Gradients(self.grad)
        return _Surroundings(self, device)

    def is_plain(self, device: torch.device) -> bool:
        """Whether there is nothing to enter but whether gradients are wanted."""
        return not self.inference and not self.autocast and self.graphs is None and self.lets_work(device)

    def lets_work(self, device: torch.device) -> bool:
        """Whether instep can work in the middle of it: copies look at no autocast, and inference mode can be left."""
        return self.device is None and self.saved_hooks is None and device not in self.streams


class _Gradients:
    """Whether gradients are wanted."""

    __slots__ = ("_grad", "_outer")

    def __init__(self, grad: bool) -> None:
        self._grad = grad

    def __enter__(self) -> None:
        self._outer = torch.is_grad_enabled()
        torch.set_grad_enabled(self._grad)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._outer)


class _Surroundings(ExitStack):
    """All of the captured state.

    Not made of a generator function: one that an interruption leaves open ends when it is cleared away, and would set
    then what was set long ago.
    """

    def __init__(self, ambient: Ambient, device: torch.device) -> None:
        super().__init__()
        self._ambient, self._device = ambient, device

    def __enter__(self) -> _Surroundings:
        super().__enter__()
        try:
            self._enter_all()
        except BaseException:
            self.close()
            raise
        return self

    def _enter_all(self) -> None:
        ambient, device = self._ambient, self._device
        self.enter_context(inference(ambient.inference))
        self.enter_context(torch.set_grad_enabled(ambient.grad))
        if ambient.device is not None:
            self.enter_context(ambient.device)
        for cast in _casting(ambient.autocast, ambient.autocast_cache):
            self.enter_context(cast)
        if device in ambient.streams:
            backend = torch.get_device_module(device)
            _greet(backend, device)
            self.enter_context(backend.stream(ambient.streams[device]))
        if ambient.saved_hooks is not None:
            self.enter_context(torch.autograd.graph.saved_tensors_hooks(*ambient.saved_hooks))
        self.enter_context(allowing(ambient.graphs))


_met = threading.local()


def _greet(backend: Any, device: torch.device) -> None:
    """Let a thread make a device's context its own before it first works there; cuBLAS warns if it has none."""
    if device not in _met.__dict__.setdefault("devices", set()):
        _met.devices.add(device)
        if device.type == "cuda":
            backend.mem_get_info(device)
