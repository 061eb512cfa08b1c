"""Ambient torch state (grad mode, autocast, default device, streams): capture, enter elsewhere, restore, encode.

`AmbientState.capture` reads the state of the calling thread. A replica enters it in its own thread; after an
interruption the caller restores it; worker processes get it as an `EncodedAmbientState`.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import starmap
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from instep.runtime.modes import (
    NO_CONTEXT,
    CombinedContext,
    active_compiler,
    scaled_recompile_limit,
    set_inference_mode,
    use_recompile_limit,
)
from instep.runtime.torch_private import (
    default_device,
    has_compiled_code,
    has_no_saved_tensor_hooks,
    make_global_state_guard,
    saved_tensor_hooks,
)
from instep.runtime.warning_filters import WarningFilter, get_warning_filters, set_warning_filters

_AUTOCAST_DEVICE_TYPES = ("cpu", "cuda", "xpu")

_thread_locals: list[tuple[Callable[[], Any], Callable[[Any], object]]] = []


def register_thread_local(get: Callable[[], Any], set_value: Callable[[Any], object]) -> None:
    """Register a thread-local value of instep's own that `AmbientState` captures and restores."""
    _thread_locals.append((get, set_value))


@lru_cache
def _device_types(devices: tuple[torch.device, ...]) -> tuple[tuple[torch.device, ...], tuple[str, ...]]:
    """The accelerators among the devices, and the device types whose autocast a call may use."""
    accelerators = dict.fromkeys(device for device in devices if device.type != "cpu")
    others = {device.type for device in accelerators}.difference(_AUTOCAST_DEVICE_TYPES)
    return tuple(accelerators), (*_AUTOCAST_DEVICE_TYPES, *others)


class AutocastSetting(NamedTuple):
    """Autocast, enabled for one device type."""

    device_type: str
    dtype: torch.dtype


class AutocastState(NamedTuple):
    """Autocast of one thread."""

    enabled: tuple[AutocastSetting, ...] = ()
    cache: bool = True

    @classmethod
    def capture(cls) -> AutocastState:
        _, enabled = _read_autocast(_AUTOCAST_DEVICE_TYPES)
        return cls(enabled, torch.is_autocast_cache_enabled()) if enabled else _AUTOCAST_OFF

    def enter(self) -> AbstractContextManager[Any]:
        """Enter this state; does nothing in a thread that is in it already."""
        if not self.enabled or self == AutocastState.capture():
            return NO_CONTEXT
        return CombinedContext(_autocast_contexts(self.enabled, self.cache))


_AUTOCAST_OFF = AutocastState()

AutocastFlags = tuple[tuple[str, bool, torch.dtype], ...]
"""The device type, whether autocast is enabled for it, and its dtype."""


def _read_autocast(device_types: Iterable[str]) -> tuple[AutocastFlags, tuple[AutocastSetting, ...]]:
    """The flags of autocast, and the settings of those device types for which it is enabled."""
    flags, settings = [], []
    for device_type in device_types:
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        flags.append((device_type, enabled, dtype))
        if enabled:
            settings.append(AutocastSetting(device_type, dtype))
    return tuple(flags), tuple(settings)


def _autocast_contexts(settings: Iterable[AutocastSetting], cache: bool) -> list[AbstractContextManager[Any]]:
    return [torch.autocast(device_type, dtype, cache_enabled=cache) for device_type, dtype in settings]


_call = methodcaller("__call__")
_enter_and_leave_autocast: Any = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


def _autocast_nesting() -> int:
    """The number of autocast contexts that this thread is in."""
    # The loop runs in C: an interruption cannot come between the two.
    return int(list(map(_call, _enter_and_leave_autocast))[1])


@dataclass(slots=True)
class AmbientState:
    """Thread-local state of the caller. Captured once per call and entered by every replica."""

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[AutocastSetting, ...]
    autocast_cache: bool
    default_device: torch.device | None
    saved_tensor_hooks: tuple[Any, Any] | None
    streams: Mapping[torch.device, Any]
    """The caller's current stream on each accelerator."""
    context_vars: contextvars.Context
    compiler: Any
    """The `torch.compile` callback that was active around the call; None if there was none."""
    recompile_limit: int | None
    """How many graphs a replica's thread may compile for one code object; None leaves the limit."""
    thread_state: ThreadState | None = None
    """What `restore` sets again; None if the state came from another process."""
    thread_id: int = 0
    """The thread whose state it is; 0 if it came from another process."""

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> AmbientState:
        """Capture the state of this thread, for replicas on these devices."""
        devices = tuple(devices)
        accelerators, autocast_types = _device_types(devices)
        flags, autocast = _read_autocast(autocast_types)
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=autocast,
            autocast_cache=torch.is_autocast_cache_enabled(),
            default_device=default_device(),
            saved_tensor_hooks=saved_tensor_hooks(),
            streams={device: torch.get_device_module(device).current_stream(device) for device in accelerators},
            context_vars=contextvars.copy_context(),
            compiler=active_compiler(),
            recompile_limit=scaled_recompile_limit(len(devices)),
            thread_state=ThreadState.read(flags),
            thread_id=threading.get_ident(),
        )

    def enter(self, device: torch.device) -> AbstractContextManager[Any]:
        """Enter this state in any thread, with `device` as the current device.

        Autocast is entered through its context manager, which clears the cache of cast weights on exit.
        """
        if device in self.streams:
            _init_device_context(torch.get_device_module(device), device)
        if self.is_trivial(device) or self._is_current(device):  # the common cases
            return _GradMode(self.grad_enabled)
        return _EnteredState(self, device)

    def _is_current(self, device: torch.device) -> bool:
        """Whether a state without modes was captured in this thread, which is still in it, apart from grad mode."""
        if self.thread_id != threading.get_ident() or not self._has_no_modes or torch.is_inference_mode_enabled():
            return False
        if device in self.streams:
            backend: Any = torch.get_device_module(device)
            if backend.current_device() != device.index or backend.current_stream(device) != self.streams[device]:
                return False
        return AutocastState.capture() == AutocastState(self.autocast, self.autocast_cache)

    def is_trivial(self, device: torch.device) -> bool:
        """Whether entering it only sets grad mode."""
        return self._has_no_modes and not self.autocast and device not in self.streams

    @property
    def is_ordinary(self) -> bool:
        """Whether it consists of grad mode, autocast and streams."""
        return self._has_no_modes and self.compiler is None

    @property
    def _has_no_modes(self) -> bool:
        """Whether there is no inference mode, default device, hook on saved tensors or limit of recompilations."""
        has_mode = self.inference_mode or self.default_device is not None or self.saved_tensor_hooks is not None
        return not has_mode and self.recompile_limit is None

    def restore(self) -> None:
        """Set the state of the capturing thread again (see `ThreadState.restore`)."""
        assert self.thread_state is not None
        self.thread_state.restore()

    def encode(self, source_device: torch.device, worker_device: torch.device) -> EncodedAmbientState:
        """The form that is sent to a worker process, which has `worker_device` in place of `source_device`.

        Context variables are left out: which of them can be sent depends on the connection.
        """
        return EncodedAmbientState(
            grad_enabled=self.grad_enabled,
            inference_mode=self.inference_mode,
            autocast=[(setting.device_type, setting.dtype) for setting in self.autocast],
            autocast_cache=self.autocast_cache,
            default_device=worker_device if self.default_device == source_device else self.default_device,
            saved_tensor_hooks=self.saved_tensor_hooks,
            process=ProcessSettings.capture(accelerator=worker_device.type != "cpu"),
        )


def is_current_device(device: torch.device) -> bool:
    """Whether a device is the CPU or the current CUDA device."""
    return device.type == "cpu" or torch.cuda.current_device() == device.index


class AmbientGuard:
    """Checks whether this thread is still in the ambient state of an earlier call, with replicas on one device.

    The state is what an `AmbientState` and its encoded form hold, without context variables and streams. On a GPU that
    is not the current device, no state counts as the same.
    """

    def __init__(self, device: torch.device) -> None:
        """Read the state of this thread. The device is the CPU or a CUDA device."""
        self._device = device
        self._is_same_global_state = make_global_state_guard()
        """Torch's guard on grad mode, autocast, the default dtype, determinism and the number of threads."""
        self._values = self._read()

    def is_current(self) -> bool:
        """Whether the state is that of the thread that created this guard, at that time, and this is that thread."""
        guard = self._is_same_global_state
        return is_current_device(self._device) and (guard is None or guard()) and self._read() == self._values

    def _read(self) -> tuple[Any, ...]:
        compiler = active_compiler()
        values = (
            threading.get_ident(),
            torch.is_inference_mode_enabled(),
            _autocast_nesting(),
            *map(torch.get_autocast_dtype, _AUTOCAST_DEVICE_TYPES),  # torch's guard ignores them where autocast is off
            default_device(),
            saved_tensor_hooks(),
            has_no_saved_tensor_hooks(),
            None if compiler is None else id(compiler),
            has_compiled_code(),
            [get() for get, _ in _thread_locals],
            torch.get_float32_matmul_precision(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_cudnn_deterministic(),
            anomaly_mode(),
            get_warning_filters(),
            backend_flags() if self._device.type != "cpu" else None,
        )
        if self._is_same_global_state is not None:
            return values
        return (
            *values,
            torch.is_grad_enabled(),
            _read_autocast(_AUTOCAST_DEVICE_TYPES)[0],
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.get_deterministic_debug_mode(),
            torch.get_num_threads(),
        )


class ThreadState(NamedTuple):
    """The state of a thread that is set again after an interruption skipped the exit of a context manager."""

    grad_enabled: bool
    autocast_cache: bool
    autocast_flags: AutocastFlags
    autocast_nesting: int
    num_threads: int
    thread_locals: list[Any]

    @classmethod
    def capture(cls) -> ThreadState:
        """Capture the state of this thread."""
        return cls.read(_read_autocast(_AUTOCAST_DEVICE_TYPES)[0])

    @classmethod
    def read(cls, autocast_flags: AutocastFlags) -> ThreadState:
        """Capture the state of this thread, whose autocast was read already."""
        nesting = _autocast_nesting()
        thread_locals = [get() for get, _ in _thread_locals]
        grad_enabled, autocast_cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        return cls(grad_enabled, autocast_cache, autocast_flags, nesting, torch.get_num_threads(), thread_locals)

    def restore(self) -> None:
        """Set the state of the capturing thread again. May be called more than once."""
        torch.set_grad_enabled(self.grad_enabled)
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for device_type, enabled, dtype in self.autocast_flags:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        for _ in range(_autocast_nesting() - self.autocast_nesting):
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        for (_, set_value), value in zip(_thread_locals, self.thread_locals, strict=False):
            set_value(value)


class _GradMode:
    """Sets grad mode, like `torch.set_grad_enabled`, which changes it already when it is constructed."""

    __slots__ = ("_enabled", "_outer")

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __enter__(self) -> None:
        self._outer = torch.is_grad_enabled()
        torch.set_grad_enabled(self._enabled)

    def __exit__(self, *_: object) -> None:
        torch.set_grad_enabled(self._outer)


class _EnteredState(ExitStack):
    """Enters all of an `AmbientState`.

    Not a `@contextmanager` generator: one that an interruption leaves suspended runs its `finally` when it is garbage
    collected, and would then restore outdated state.
    """

    def __init__(self, state: AmbientState, device: torch.device) -> None:
        super().__init__()
        self._state, self._device = state, device

    def __enter__(self) -> _EnteredState:
        super().__enter__()
        try:
            self._enter_all()
        except BaseException:
            self.close()
            raise
        return self

    def _enter_all(self) -> None:
        state, device = self._state, self._device
        self.enter_context(set_inference_mode(state.inference_mode))
        self.enter_context(torch.set_grad_enabled(state.grad_enabled))
        if state.default_device is not None:
            self.enter_context(state.default_device)
        for autocast in _autocast_contexts(state.autocast, state.autocast_cache):
            self.enter_context(autocast)
        if device in state.streams:
            backend = torch.get_device_module(device)
            self.enter_context(backend.stream(state.streams[device]))
        if state.saved_tensor_hooks is not None:
            self.enter_context(torch.autograd.graph.saved_tensors_hooks(*state.saved_tensor_hooks))
        self.enter_context(use_recompile_limit(state.recompile_limit))


_thread_local = threading.local()


def _init_device_context(backend: Any, device: torch.device) -> None:
    """Initialize the device's context in this thread before its first use; cuBLAS warns if there is none."""
    if device not in _thread_local.__dict__.setdefault("devices", set()):
        _thread_local.devices.add(device)
        if device.type == "cuda":
            backend.mem_get_info(device)


@dataclass
class EncodedAmbientState:
    """An `AmbientState` and the process-wide settings around it, as sent to worker processes."""

    grad_enabled: bool
    inference_mode: bool
    autocast: list[tuple[str, torch.dtype]]
    autocast_cache: bool
    default_device: torch.device | None
    saved_tensor_hooks: tuple[Any, Any] | None
    process: ProcessSettings
    context_vars: list[tuple[contextvars.ContextVar[Any], Any]] = field(default_factory=list)

    def decode(self) -> AmbientState:
        """The state to enter in the worker."""
        context = contextvars.copy_context()
        for variable, value in self.context_vars:
            context.run(variable.set, value)
        return AmbientState(
            grad_enabled=self.grad_enabled,
            inference_mode=self.inference_mode,
            autocast=tuple(starmap(AutocastSetting, self.autocast)),
            autocast_cache=self.autocast_cache,
            default_device=self.default_device,
            saved_tensor_hooks=self.saved_tensor_hooks,
            streams={},
            context_vars=context,
            compiler=None,
            recompile_limit=None,
        )


@dataclass
class ProcessSettings:
    """Process-wide torch and warning settings."""

    default_dtype: torch.dtype
    deterministic_mode: int
    matmul_precision: str
    cudnn: tuple[bool, bool]
    """`torch.backends.cudnn.benchmark` and `.deterministic`."""
    num_threads: int
    backend_flags: dict[str, Any]
    """Flags of the CUDA backends; empty for CPU workers."""
    anomaly_mode: int
    """Autograd's anomaly detection: 0 if off, 1 if on, 2 if it also checks for NaN."""
    warning_filters: tuple[WarningFilter, ...]

    @classmethod
    def capture(cls, *, accelerator: bool) -> ProcessSettings:
        return cls(
            default_dtype=torch.get_default_dtype(),
            deterministic_mode=torch.get_deterministic_debug_mode(),
            matmul_precision=torch.get_float32_matmul_precision(),
            cudnn=(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
            num_threads=torch.get_num_threads(),
            backend_flags=backend_flags() if accelerator else {},
            anomaly_mode=anomaly_mode(),
            warning_filters=get_warning_filters(),
        )

    def apply(self) -> None:
        """Set what differs in this process, except for the number of threads."""
        if torch.get_default_dtype() != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if torch.get_deterministic_debug_mode() != self.deterministic_mode:
            torch.set_deterministic_debug_mode(self.deterministic_mode)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        cudnn = torch.backends.cudnn
        if (cudnn.benchmark, cudnn.deterministic) != self.cudnn:
            cudnn.benchmark, cudnn.deterministic = self.cudnn
        set_backend_flags(self.backend_flags)
        set_anomaly_mode(self.anomaly_mode)
        set_warning_filters(self.warning_filters)


def anomaly_mode() -> int:
    """Autograd's anomaly detection: 0 if off, 1 if on, 2 if it also checks for NaN."""
    return 1 + torch.is_anomaly_check_nan_enabled() if torch.is_anomaly_enabled() else 0


def set_anomaly_mode(mode: int) -> None:
    if mode != anomaly_mode():
        torch.set_anomaly_enabled(mode > 0, mode != 1)


_FLAGS: dict[str, tuple[Any, str]] = {
    "cudnn.enabled": (torch.backends.cudnn, "enabled"),
    "cudnn.benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": (torch.backends.cudnn, "deterministic"),
    "cudnn.allow_tf32": (torch.backends.cudnn, "allow_tf32"),
    "matmul.fp16": (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "matmul.bf16": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
}
_SDP_BACKENDS = {
    "flash": ("flash_sdp_enabled", "enable_flash_sdp"),
    "memory": ("mem_efficient_sdp_enabled", "enable_mem_efficient_sdp"),
    "math": ("math_sdp_enabled", "enable_math_sdp"),
    "cudnn": ("cudnn_sdp_enabled", "enable_cudnn_sdp"),
}


def backend_flags() -> dict[str, Any]:
    """The CUDA backends' flags. A flag that torch refuses to read (mixed old and new TF32 APIs) is left out."""
    flags: dict[str, Any] = {}
    for name, (holder, attribute) in _FLAGS.items():
        try:
            flags[name] = getattr(holder, attribute)
        except (RuntimeError, AttributeError):
            continue
    for name, (getter, _) in _SDP_BACKENDS.items():
        if hasattr(torch.backends.cuda, getter):
            flags[name] = getattr(torch.backends.cuda, getter)()
    return flags


def set_backend_flags(flags: Mapping[str, Any]) -> None:
    """Set the flags that differ in this process."""
    current = backend_flags() if flags else {}
    for name, value in flags.items():
        if current.get(name) == value:
            continue
        if name in _FLAGS:
            setattr(*_FLAGS[name], value)
        else:
            getattr(torch.backends.cuda, _SDP_BACKENDS[name][1])(value)
