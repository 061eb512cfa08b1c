"""Private torch APIs that instep uses, each with a fallback where torch does not have it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

_autograd: Any = torch._C._autograd
_functorch: Any = torch._C._functorch


def is_graph_retained() -> bool:
    """Inside a backward: whether it was asked to retain the graph. Without an answer, graphs are retained."""
    ask: Callable[[], bool] | None = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def will_accumulate_grad(parameter: Tensor) -> bool:
    """Inside a backward: whether it adds to this leaf's `.grad`, rather than return gradients or leave it out."""
    if not parameter.is_leaf:
        return False
    ask: Any = getattr(torch._C, "_will_engine_execute_node", None)
    if ask is None:
        return False
    try:
        return bool(ask(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # `torch.autograd.grad` with respect to leaves has no such nodes to execute
        return False


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks on saved tensors around the caller (from torch 2.8 on), except those of checkpointing.

    Checkpointing matches tensors by the order in which they are saved, which replicas do not have; without its hooks
    the call is recomputed as a whole.
    """
    ask: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    hooks: tuple[Any, Any] | None = None if ask is None else ask(False)
    if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
        return None
    return hooks


def has_no_saved_tensor_hooks() -> bool:
    """Whether no hooks on saved tensors are around the caller, not even those of checkpointing; False if unknown."""
    ask: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    return ask is not None and ask(False) is None


def inference_guard(on: bool) -> AbstractContextManager[Any]:
    """`torch.inference_mode(on)` without its Python, in which an interruption could leave it half entered."""
    guard: Any = getattr(torch._C, "_InferenceMode", torch.inference_mode)
    entered: AbstractContextManager[Any] = guard(on)
    return entered


def has_compiled_code() -> bool:
    """Whether this process has compiled functions or modules; torch loads its compiler for optimizers too."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    backends: Any = getattr(frames, "cached_backends", None)
    return frames is not None and (backends is None or any(backend is not None for backend in backends.values()))


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` stands for, whose names do not begin with `_orig_mod.`; or itself."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind = getattr(frames, "OptimizedModule", None)
    while kind is not None and isinstance(module, kind):
        module = module._orig_mod
    return module


def default_device() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose in this thread, if any."""
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def has_thread_local_transform() -> bool:
    """Whether something is at work that sees the operations of its own thread only.

    That is `torch.func`, forward-mode differentiation, tracing, cached parametrizations, and modes that count or
    rewrite operations.
    """
    return (
        _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or bool(parametrize._cache_enabled)
        or any(not isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())
    )


_storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors use a tensor's storage; more than there can be where torch does not say."""
    if _storage_use_count is None:
        return sys.maxsize
    return int(_storage_use_count(tensor.untyped_storage()._cdata)) - 1  # the storage's own object is one


_engine_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor], keep: bool) -> None:
    """As `torch.autograd.backward`, for gradients that autograd itself has made: they need not be looked at again."""
    if _engine_run_backward is None or any(type(output) is not Tensor for output in outputs):
        torch.autograd.backward(outputs, gradients, retain_graph=keep)
    else:
        _engine_run_backward(
            tuple(outputs), tuple(gradients), keep, False, (), allow_unreachable=True, accumulate_grad=True
        )


def is_batched_gradient(gradient: Tensor) -> bool:
    """Whether a gradient is many at once, as `is_grads_batched=True` makes them."""
    return bool(_functorch.is_legacy_batchedtensor(gradient))


def make_tensor_guard(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A quick look at some tensors: True only if sizes, strides, dtypes, devices and `requires_grad` are as they were.

    It is what compiled code asks of its inputs, in one pass. False proves nothing: it also depends on modes such as
    autocast, and is all that is said where torch has no such pass.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Any = getattr(guards, "TensorGuards", None)
    if make is None:
        return lambda: False
    try:
        check = make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return partial(check, *tensors) if check(*tensors) else lambda: False
    except (TypeError, RuntimeError, ValueError):
        return lambda: False


_eval_frame: Any = getattr(torch._C, "_dynamo", None) and torch._C._dynamo.eval_frame


def _no_eval_frame(_: Any) -> Any:
    """There is none to set, and there was none."""


set_eval_frame: Callable[[Any], Any] = getattr(_eval_frame, "set_eval_frame", _no_eval_frame)
"""Sets what compiles the frames that this thread runs from now on, None for nothing; returns what did before."""


def skip_frame(function: Any) -> None:
    """Ask the compiler not to look at a function's own code; without a way to ask it looks, and finds nothing to do."""
    strategy: Any = getattr(_eval_frame, "set_code_exec_strategy", None)
    skip: Any = getattr(_eval_frame, "skip_code", None)
    if strategy is not None:
        action = _eval_frame._FrameAction
        strategy(function.__code__, _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif skip is not None:
        skip(function.__code__)


_RNG_KEY_NAME: Any = "TESTING_ONLY_GenericMode"
_libraries: list[torch.library.Library] = []


@cache
def _rng_key() -> Any:
    return torch._C._parse_dispatch_key(_RNG_KEY_NAME)


def register_rng_kernels(pick: Callable[[], torch.Generator | None]) -> None:
    """Have aten's random operations on the CPU ask `pick` for a generator, in threads that `route` is on for.

    A dispatch key that nothing else uses falls through everywhere but in operations that take a generator. Raises where
    torch has no such key, or where it is taken.
    """
    below: Any = torch._C._dispatch_keyset_full_after(_rng_key())
    others = torch.library.Library("_", "IMPL", _RNG_KEY_NAME)
    others.fallback(torch.library.fallthrough_kernel)
    _libraries.append(others)
    draws = torch.library.Library("aten", "IMPL")
    _libraries.append(draws)
    for schema in torch._C._jit_get_all_schemas():
        place = next((i for i, a in enumerate(schema.arguments) if str(a.type) == "Optional[Generator]"), None)
        if place is None or not schema.name.startswith("aten::"):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        overload = schema.overload_name or "default"
        if overload in packet.overloads():
            kernel = _rng_kernel(getattr(packet, overload), place, below, pick)
            full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            draws.impl(full, kernel, _RNG_KEY_NAME, with_keyset=True)


def _rng_kernel(
    operation: Any, place: int, below: Any, pick: Callable[[], torch.Generator | None]
) -> Callable[..., Any]:
    """One random operation with the generator that `pick` gives, unless it was given one.

    Only at the bottom, where there is a plain CPU tensor to fill: what other modes and tensor subclasses (compilers
    among them) see has no generator added to it, and what they call in the end comes by here again.
    """
    host, python = torch._C.DispatchKey.CPU, torch._C.DispatchKey.Python
    front = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    name = operation._schema.arguments[place].name
    positional = not operation._schema.arguments[place].kwarg_only

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        by_place = positional and len(args) > place
        given = args[place] if by_place else kwargs.get(name)
        if given is None and keys.has(host) and not keys.has(python) and not keys.has(front):
            chosen = pick()
            if by_place:
                args = (*args[:place], chosen, *args[place + 1 :])
            else:
                kwargs[name] = chosen
        return operation.redispatch(keys & below, *args, **kwargs)

    return kernel


def set_rng_dispatch(on: bool) -> bool:
    """Whether random operations of this thread ask for their generator (see `route_draws`); says how it was before.

    A backward carries it to the threads that take part.
    """
    outer = is_rng_dispatch_enabled()
    torch._C._dispatch_tls_set_dispatch_key_included(_rng_key(), on)
    return outer


def is_rng_dispatch_enabled() -> bool:
    """Whether random operations of this thread ask for their generator."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_rng_key()))


def replace_default_generator(stand_in: Any) -> None:
    """Put an object in the place from which `torch.get_rng_state`, `manual_seed` and the like take the CPU's generator.

    Raises where they take it from somewhere else.
    """
    functions: Any = torch.random
    if functions.default_generator is not torch.default_generator:
        raise RuntimeError("torch.random keeps its generator elsewhere")
    functions.default_generator = stand_in


def _import_class(module: str, name: str) -> Any:
    """A class that torch keeps in a private place, or None."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


spectral_norm_class: Any = _import_class("torch.nn.utils.parametrizations", "_SpectralNorm")
"""The parametrization behind `spectral_norm`; where it is missing, its vectors have to be equal on every replica."""


_global_hooks: dict[str, Any] = {
    kind: getattr(torch.nn.modules.module, f"_global_{kind}", {})
    for kind in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
}


def global_hooks() -> list[tuple[str, list[Any]]]:
    """Hooks that were registered for every module; none where torch keeps them elsewhere."""
    tables = _global_hooks
    if not any(tables.values()):
        return []
    return [(kind.replace("_", " ")[:-1], list(table.values())) for kind, table in tables.items() if table]


def custom_function(node: Any) -> Any:
    """The `torch.autograd.Function` that a node of a graph belongs to; None for torch's own, or if it is not told."""
    return getattr(node, "_forward_cls", None)


def nccl_group_class() -> Any:
    """The class of torch's NCCL groups; None where torch has none, or none that can be given up in the middle."""
    kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None) if torch.distributed.is_available() else None
    return kind if any(hasattr(kind, name) for name in _ABORT_METHODS) else None


_ABORT_METHODS = ("abort", "_abort")


def make_file_store(path: str, size: int) -> Any:
    """Where the members of a group find one another."""
    kind: Any = vars(torch.distributed)["FileStore"]
    return kind(path, size)


def make_nccl_group(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """A group of its own, beside any other; its communicator is made, without blocking, by the first collective."""
    kind = nccl_group_class()
    options = kind.Options()
    options._timeout = patience
    config: Any = getattr(options, "config", None)
    if hasattr(config, "blocking"):  # without it, whoever meets nobody waits for ever, in a thread of its own
        config.blocking = 0
    return kind(store, rank, size, options)


def make_gloo_group(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """The same for members on the host, on the loopback interface."""
    kind: Any = torch.distributed.ProcessGroupGloo
    options = kind._Options()
    options._timeout = patience
    options._devices = [kind.create_device(interface="lo")]
    return kind(store, rank, size, options)


def abort_group(group: Any) -> None:
    """End what a group is in the middle of; what cannot be told to ends with its connections."""
    end: Any = next((getattr(group, name) for name in _ABORT_METHODS if hasattr(group, name)), None)
    if end is not None and isinstance(group, nccl_group_class() or ()):
        end()
